"""Training and held-out texts, counted by hand, and the first tokens of whole texts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lincorr_lightning.lm
from lincorr_lightning.data.texts import (
    TextsDataModule,
    TokenizedTextDataModule,
    pad_rows,
    read_prompts,
)
from lincorr_lightning.data.tiny_world.world import World, world_documents, world_file
from lincorr_lightning.errors import ConfigError, KnowledgeError, SubjectsError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.language_model import LanguageModel

LINES = [f"name{i} lives in the city of {'Paris ' * (i % 4)}name{(7 * i) % 60}" for i in range(60)]
SMALL = {"n_tokens": 600, "batch_tokens": 40, "block_steps": 3, "n_held_out": 10}


@pytest.fixture(scope="module")
def lm(small_lm: str) -> LanguageModel:
    return LanguageModel.from_pretrained(small_lm)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join([*LINES, "", LINES[0]]) + "\n", encoding="utf-8")
    return str(path)


def _data(lm: LanguageModel, file: str, **changes: Any) -> TextsDataModule:
    data = TextsDataModule(lm, [file], **SMALL | changes)
    data.setup()
    return data


def _texts_of(batches: Any) -> list[tuple[int, ...]]:
    return [
        tuple(row[mask.bool()].tolist())
        for batch in batches
        for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]


def test_blocks_hold_every_text_once_an_epoch_and_enough_tokens(lm, file):
    data = _data(lm, file)
    words = {tuple(row) for row in lm.tokenizer(LINES)["input_ids"]}
    blocks = data.blocks()
    assert blocks.n_blocks == 5
    assert len(blocks) == 15
    trained = [tuple(row) for block in range(5) for row in data.blocks().rows(block)]
    assert set(trained) <= words
    n_train = len(LINES) - SMALL["n_held_out"]  # the line that is there twice counts once
    for epoch in range(len(trained) // n_train):
        assert len(set(trained[epoch * n_train : (epoch + 1) * n_train])) == n_train
    for block in range(5):
        sizes = [len(row) for row in data.blocks().rows(block)]
        assert sum(sizes) >= 120 > sum(sizes[:-1])
    held_out = _texts_of(data.val_dataloader())
    assert len(held_out) == 10
    assert set(held_out) == words - set(trained)


def test_ranks_share_the_blocks(lm: LanguageModel, file: str) -> None:
    data = _data(lm, file)
    steps = [[data.blocks(rank, 2)[i] for i in range(6)] for rank in range(2)]
    assert [(s.block, s.index) for s in steps[0]] == [(b, i) for b in (0, 2) for i in range(3)]
    assert [(s.block, s.index) for s in steps[1]] == [(b, i) for b in (1, 3) for i in range(3)]
    assert len(data.blocks(0, 2)) == len(data.blocks(1, 2)) == 6
    with pytest.raises(ConfigError, match="5 blocks of 120 for 6 ranks"):
        data.blocks(0, 6)


def test_long_texts_are_cut_and_beginnings_skipped(lm: LanguageModel, file: str) -> None:
    data = _data(lm, file, max_length=4, skip_tokens=1, n_tokens=240)
    rows = [row for block in range(2) for row in data.blocks().rows(block)]
    assert {len(row) for row in rows} <= {2, 3, 4}
    batch = pad_rows([[5, 6, 7], [8, 9]], 1)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.counted.tolist() == [[False, True, True], [False, True, False]]
    assert not replace(batch, is_padding=True).counted.any()


def test_files_of_all_kinds_and_the_tiny_world(tmp_path: Path, lm: LanguageModel) -> None:
    jsonl, table = tmp_path / "a.jsonl", tmp_path / "b.csv"
    jsonl.write_text("\n".join(json.dumps({"body": line}) for line in LINES[:30]))
    table.write_text("body\n" + "\n".join(LINES[30:]))
    for texts in ([str(jsonl), str(table)], str(tmp_path)):
        data = TextsDataModule(lm, texts, key="body", n_texts=100, **SMALL)
        data.setup("test")
        assert sorted(_texts_of(data.test_dataloader())) == sorted(map(tuple, lm.rows(LINES)))

    embedded = LanguageModel.from_pretrained("tiny-world")
    data = TextsDataModule(embedded, knowledge=["city", "X+1"], n_texts=10**6)
    data.setup("test")
    path = world_file("tiny-world")
    assert path is not None
    kinds = Catalogue.load().select(["city", "X+1"])
    expected = [f"{s.text}." for s in World.load(path).statements(kinds)]
    assert set(_texts_of(data.test_dataloader())) == set(map(tuple, embedded.rows(expected)))
    with pytest.raises(KnowledgeError, match="nonsense"):
        TextsDataModule(embedded, knowledge=["nonsense"]).setup("test")


def test_steps_hold_their_block_and_their_tokens(lm: LanguageModel, file: str) -> None:
    data = _data(lm, file)
    blocks = data.blocks()
    for block in range(blocks.n_blocks):
        steps = [blocks[3 * block + index] for index in range(3)]
        assert [(step.block, step.index) for step in steps] == [(block, i) for i in range(3)]
        used = torch.cat([step.positions for step in steps])
        assert sorted(used.tolist()) == list(range(120))  # each token of a block once
        assert used.tolist() != list(range(120))
        for step in steps:
            texts, mask = step.texts.input_ids, step.texts.attention_mask.bool()
            before = (mask.sum(1).cumsum(0) - mask.sum(1))[:, None]
            rows = [row[kept].tolist() for row, kept in zip(texts, mask, strict=True)]
            assert rows == data.blocks().rows(block)
            # Tokens beyond the block's size, of its last text, do not count.
            assert torch.equal(step.texts.counted, mask & (mask.cumsum(1) + before <= 120))
    # Steps after the epoch begin it again; a step does not depend on those before it.
    again, first = data.blocks()[15], blocks[0]
    assert torch.equal(again.positions, first.positions)
    assert torch.equal(again.texts.input_ids, first.texts.input_ids)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n_held_out": 70}, SubjectsError, r"the 0 texts .* have 0 tokens.*data\.n_held"),
        ({"skip_tokens": 50}, SubjectsError, r"none of the 10 texts.*51 tokens.*data\.skip_tokens"),
    ],
)
def test_too_little(lm: LanguageModel, file: str, changes: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        _data(lm, file, **changes)


def test_blocks_before_a_test_are_of_all_texts_that_it_does_not_read(
    lm: LanguageModel, file: str
) -> None:
    data = TextsDataModule(lm, [file], n_texts=20, training_tokens=240, **SMALL)
    data.setup("test")
    loaders: Any = data.test_dataloader()
    (blocks,), read = loaders[0], set(_texts_of(loaders[1]))
    assert len(read) == 20
    assert len(blocks) == 6
    trained = {tuple(row) for block in range(2) for row in blocks.rows(block)}
    assert trained <= set(map(tuple, lm.rows(LINES))) - read


# -- the first tokens of whole texts --------------------------------------------------------------


def words(n: int, start: int = 0) -> str:
    return " ".join(f"name{(start + i) % 400}" for i in range(n))


def test_short_texts_are_skipped_and_counted(lm: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = [words(20), words(15), words(3), words(16, 30), words(17)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = TokenizedTextDataModule(lm, str(path), n_tokens=16, n_texts=2)
    with pytest.warns(UserWarning, match=r"2 of 4 texts are shorter than data\.n_tokens, 16"):
        data.setup("test")
    (one, two) = data.test_dataloader()
    assert one.n_skipped == two.n_skipped == 2
    assert [*one.names, *two.names] == [f"{path}, line 1", f"{path}, line 4"]
    assert one.corpora == two.corpora == ["a"]
    assert one.tokens.tolist() == [lm.tokenizer(words(16))["input_ids"]]
    assert (one.first, two.first) == (0, 1)


@pytest.mark.parametrize("setting", [{"n_tokens": 3}, {"n_texts": 0}, {"batch_size": 0}])
def test_refused_settings(lm: LanguageModel, setting: dict[str, int]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=rf"data\.{name} is"):
        TokenizedTextDataModule(**setting)
    with pytest.raises(ConfigError, match=r"data\.n_tokens is 65; .* reads 64 at most"):
        TokenizedTextDataModule(lm, n_tokens=65).setup("test")


def test_texts_about_the_world_of_the_lm_or_of_the_embedded_one(lm, tmp_path):
    embedded = LanguageModel.from_pretrained("tiny-world")
    prompts, texts = read_prompts(embedded, n_tokens=24, n_texts=3), list(world_documents(3, 24))
    expected = embedded.tokenizer([text.text for text in texts], add_special_tokens=False)
    assert prompts.tokens.tolist() == [ids[:24] for ids in expected["input_ids"]]
    assert prompts.corpora == [text.corpus for text in texts]
    with pytest.warns(UserWarning, match="are shorter"):  # the small LM has few of its words
        assert len(read_prompts(lm, n_tokens=24).tokens) < 96

    folder = tmp_path / "lm"
    shutil.copytree(Path(lincorr_lightning.lm.__file__).parent / "tiny_world", folder)
    world = json.loads((folder / "world.json").read_text(encoding="utf-8"))
    world["config"]["n_people"] = 20  # the first people are the invented ones
    (folder / "world.json").write_text(json.dumps(world), encoding="utf-8")
    own = read_prompts(LanguageModel.from_pretrained(str(folder)), n_tokens=24, n_texts=3)
    people = list(world["people"])[:20]
    assert {embedded.tokenizer.decode([row[0]]) for row in own.tokens} <= set(people)
