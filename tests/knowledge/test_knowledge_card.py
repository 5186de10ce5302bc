"""The card of the knowledge: what it says is what the data and the audit say."""

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from benchmarks.docs_tables import knowledge_card as script
from lincorr_lightning.knowledge import Catalogue, Completeness, audit_domains, build_domain

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "lincorr_lightning" / "knowledge" / "CARD.md"
REGENERATE = (
    "write the card again: `python -m benchmarks.docs_tables.knowledge_card`, as its head says"
)


def tables(markdown):
    """Heading and number of each table -> its rows by their first cells."""
    found, heading = {}, ""
    for block in markdown.split("\n\n"):
        if block.startswith("#"):
            heading = block.splitlines()[0]
        if not block.startswith("|"):
            continue
        lines = [
            [cell.replace("\\", "").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in block.splitlines()
        ]
        columns, _, *rows = lines
        place = (heading, sum(known == heading for known, _ in found))
        found[place] = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
        assert len(found[place]) == len(rows)
    return found


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    path = tmp_path_factory.mktemp("card") / "CARD.md"
    script.main(["--output", str(path)])
    return tables(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def committed():
    return tables(COMMITTED.read_text(encoding="utf-8"))


def test_the_committed_card_is_that_of_the_data(fresh, committed):
    assert list(fresh) == list(committed), REGENERATE
    for place, rows in fresh.items():
        stands = committed[place]
        if "tokenizer" not in next(iter(rows.values())):  # there, each tokenizer is a row
            assert list(stands) == list(rows), (place, REGENERATE)
        for name, row in rows.items():
            shown = {column: stands[name][column] for column in row}
            assert shown == row, (place, REGENERATE)


def test_every_prompt_stands_in_it_as_it_is(fresh):
    catalogue = Catalogue.load()
    prompts = {
        name: row for rows in fresh.values() for name, row in rows.items() if "prompt" in row
    }
    assert list(prompts) == list(catalogue)
    for name, row in prompts.items():
        knowledge = catalogue[name]
        assert row["prompt"] == knowledge.template
        assert row.get("as printed", "") == (knowledge.printed_template or "")
        entities, ways = map(int, re.findall(r"\d+", row["answers"]))
        assert ways == len(knowledge.answers)
        assert entities == len({answer.identity for answer in knowledge.answers})
    assert prompts["city"]["from"] == "1_places"
    assert prompts["ceo_ja"]["from"] == "3_languages + 2_life"
    assert prompts["X+1"]["from"] == "computed"
    assert prompts["city"]["reference to"].split(", ")[:2] == ["country ×6", "city ×5"]
    assert prompts["pet"]["reference to"] == ""


def test_every_tokenizer_of_the_card_accounts_for_every_answer(committed):
    """So a card that was written without the other tokenizers is noticed."""
    catalogue = Catalogue.load()
    ways = {name: len(knowledge.answers) for name, knowledge in catalogue.items()}
    families = [rows for rows in committed.values() if "simile" in next(iter(rows.values()))]
    assert len(families) == 1
    assert list(families[0]) == list(script.ORIGINS), REGENERATE
    for row in families[0].values():
        for family, cell in list(row.items())[1:]:
            counts = [int(count.replace(",", "")) for count in cell.split(" / ")]
            members = catalogue.select([family.replace("-", "_")])
            assert sum(counts) == sum(ways[member.name] for member in members)
    kept = [row for rows in committed.values() for row in rows.values() if "tiny-world" in row]
    assert len(kept) == len(catalogue)
    for row in kept:
        assert list(row)[1:] == list(script.ORIGINS)
        for cell in list(row.values())[1:]:
            whole, phrase, lost = map(int, re.fullmatch(r"(\d+)\+(\d+)/(\d+)", cell).groups())
            assert 0 <= lost <= ways[row["knowledge"]] - whole - phrase


def test_folders_are_read_by_their_names(byte_level, tmp_path):
    byte_level.save_pretrained(tmp_path / "mine")
    path = tmp_path / "CARD.md"
    script.main(["--tokenizer", f"A name={tmp_path / 'mine'}", "--output", str(path)])
    text = path.read_text(encoding="utf-8")
    assert str(tmp_path) not in text and '"A name=FOLDER"' in text
    row = tables(text)["### Attribute", 1]["continent"]
    assert list(row) == ["knowledge", "tiny-world", "A name"]
    assert row["A name"] == "0+2/5"  # it has learnt South and North, of South and North America
    with pytest.raises(SystemExit, match="write NAME=FOLDER"):
        script.main(["--tokenizer", "nowhere", "--output", str(path)])


@pytest.mark.parametrize(
    ("make", "described"),
    [
        ("byte_level", "byte-level BPE"),
        ("unigram", "SentencePiece unigram"),
        ("word_piece", "WordPiece, lower case"),
        ("word_level", "word-level"),
    ],
)
def test_kinds_of_tokenizers(request, make, described):
    assert script.make_of(request.getfixturevalue(make)) == described


def test_sentencepiece_in_each_of_its_shapes(sentencepiece):
    assert script.make_of(sentencepiece) == "SentencePiece BPE, byte fallback"


# -- the audit's labels are what an LM would generate --------------------------------------------


def next_token(tokenizer, prompt, gap, text):
    """The truth: the ids of prompt and answer, less those of the prompt."""
    before = tokenizer(prompt, add_special_tokens=False).input_ids
    after = tokenizer(prompt + gap + text, add_special_tokens=False).input_ids
    assert after[: len(before)] == before
    return after[len(before)]


@pytest.fixture
def chinese_pieces(sentencepiece):
    """The same tokenizers with characters and words of Chinese, each with and without the mark."""
    text = "X所居住的城市是巴黎东京"
    words = ["巴黎", "东京", "▁巴黎"]
    old = sentencepiece.get_vocab()
    news = [p for p in [*dict.fromkeys(text), *words] if p not in old]
    vocabulary = old | {piece: len(old) + i for i, piece in enumerate(news)}
    model = models.BPE(
        vocabulary,
        [("巴", "黎"), ("东", "京"), ("▁", "巴黎")],
        unk_token="<unk>", byte_fallback=True, fuse_unk=True,
    )  # fmt: skip
    backend = Tokenizer.from_str(sentencepiece.backend_tokenizer.to_str())
    backend.model = model
    return type(sentencepiece)(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


def test_chinese_after_a_chinese_prompt_has_no_space_mark(chinese_pieces, ask):
    template = "{}所居住的城市是"
    domain = build_domain(ask("巴黎", "东京", template=template, space=False), chinese_pieces)
    vocabulary = chinese_pieces.get_vocab()
    assert "▁巴黎" in vocabulary  # what the answer alone would give
    assert chinese_pieces("巴黎", add_special_tokens=False).input_ids == [vocabulary["▁巴黎"]]
    assert domain.token_ids == [vocabulary["巴黎"], vocabulary["东京"]]
    assert domain.texts == ["巴黎", "东京"]
    prompt = template.format("X")
    for label in domain.labels:
        (answer,) = label.answers
        assert label.completeness is Completeness.WHOLE
        assert label.token_id == next_token(chinese_pieces, prompt, "", answer.text)


def test_special_tokens_are_collected_once_an_audit(byte_level, ask, monkeypatch):
    """Gemma 3 has 6,415 of them: collecting them for each of 110 prompts took a second."""
    kind = type(byte_level)
    collect = kind.added_tokens_decoder.fget
    times = []
    monkeypatch.setattr(
        kind, "added_tokens_decoder", property(lambda self: times.append(1) or collect(self))
    )
    audit_domains([ask("Paris", name=str(i)) for i in range(5)], byte_level)
    assert len(times) == 1
