"""Whole texts: read, cut, skipped, dealt out."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lincorr_lightning.data.tiny_world.texts import CIRCLES, world_texts
from lincorr_lightning.data.tokenized_texts import TokenizedTextDataModule
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel


def words(n: int, start: int = 0) -> str:
    return " ".join(f"name{(start + i) % 400}" for i in range(n))


def set_up(small_lm: str, rank: int = 0, world: int = 1, **options: Any) -> TokenizedTextDataModule:
    data = TokenizedTextDataModule(**options)
    lm = LanguageModel(LMConfig(small_lm))
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        lightning_module=SimpleNamespace(lm=lm), global_rank=rank, world_size=world
    )
    data.setup("test")
    return data


def tokens(data: TokenizedTextDataModule) -> torch.Tensor:
    return torch.cat([b.tokens for b in data.test_dataloader() if not b.is_padding])


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return path


def test_short_texts_are_skipped_counted_and_told_of(small_lm: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [words(20), words(15), words(16, 30), words(3)])
    with pytest.warns(UserWarning, match=r"2 of 4 texts are shorter than data\.n_tokens, 16"):
        data = set_up(small_lm, texts=str(path), n_tokens=16)
    assert data.n_skipped == 2
    assert [text.where for text in data.prompts] == [f"{path}, line 1", f"{path}, line 3"]
    first = data._lm().tokenizer(words(16))["input_ids"]
    assert tokens(data)[0].tolist() == first


def test_all_too_short(small_lm: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [words(10), words(15)])
    with pytest.raises(SubjectsError, match=r"all 2 texts .* the longest has 15\. Lower"):
        set_up(small_lm, texts=str(path), n_tokens=16)


def test_a_folder_of_all_kinds(small_lm: str, tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [words(16, 1), words(16, 2)])
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("\ufeff" + words(20, 3), encoding="utf-8")
    (tmp_path / "letters" / "empty.txt").write_text("\n", encoding="utf-8")
    (tmp_path / "c.csv").write_text(f'text,corpus\n"{words(16, 4)}",mine\n', encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89")
    (tmp_path / ".hidden.txt").write_text(words(30))
    data = set_up(small_lm, texts=str(tmp_path), n_tokens=16)
    assert [text.corpus for text in data.prompts] == ["b", "b", "mine", "letters"]
    ids = data._lm().tokenizer.convert_tokens_to_ids([f"name{i}" for i in (1, 2, 4, 3)])
    assert tokens(data)[:, 0].tolist() == ids
    assert len(set_up(small_lm, texts=str(tmp_path), n_tokens=16, n_texts=3).prompts) == 3


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, {}, r"holds no text\. Put .txt"),
        ({"a.txt": "  "}, {}, "holds no text"),
        ({"a.jsonl": '{"body": "x"}'}, {}, r"a\.jsonl, line 1: 'text' is None; .* as data\.key"),
        ({"a.jsonl": '{"text": "x"}'}, {"key": "body"}, "'body' is None"),
        ({"a.csv": "words\nx"}, {}, r"a\.csv, line 1: the header lacks text"),
        ({"a.jsonl": "[1, 2]"}, {}, "line 1: 'text' is None"),
    ],
)
def test_bad_folders(
    small_lm: str, tmp_path: Path, content: Any, options: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in (content or {}).items():
        (folder / name).write_text(text)
    with pytest.raises(SubjectsError, match=message):
        set_up(small_lm, texts=str(folder), n_tokens=16, **options)


def test_no_such_place(small_lm: str, tmp_path: Path) -> None:
    with pytest.raises(SubjectsError, match=r"data\.texts .*nowhere does not exist"):
        set_up(small_lm, texts=str(tmp_path / "nowhere"), n_tokens=16)
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(SubjectsError, match=r"is no \.txt, \.jsonl, \.csv file"):
        set_up(small_lm, texts=str(tmp_path / "a.md"), n_tokens=16)


def test_more_tokens_than_the_lm_reads(small_lm: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.n_tokens is 65, but .* reads 64 tokens"):
        set_up(small_lm, n_tokens=65)


@pytest.mark.parametrize("setting", [{"n_tokens": 3}, {"n_texts": 0}, {"batch_size": 0}])
def test_numbers_that_are_too_small(setting: dict[str, int]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=rf"data\.{name} is"):
        TokenizedTextDataModule(**setting)


def test_needs_an_lm() -> None:
    data = TokenizedTextDataModule()
    data.trainer = SimpleNamespace(lightning_module=SimpleNamespace())  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="such as TokenGeometry"):
        data.setup("test")


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_prompt_goes_to_one_process_once(small_lm: str, tmp_path: Path, world: int) -> None:
    path = write(tmp_path / "a.jsonl", [words(8, i) for i in range(11)])
    options = {"texts": str(path), "n_tokens": 8, "batch_size": 2}
    alone = tokens(set_up(small_lm, **options))
    assert len(alone) == 11
    steps, seen = set(), {}
    for rank in range(world):
        batches = list(set_up(small_lm, rank, world, **options).test_dataloader())
        assert not batches[0].is_padding  # seven processes have a batch each, of six
        steps.add(len(batches))
        for batch in batches:
            assert len(batch.tokens)  # a sharded LM needs every process
            if not batch.is_padding:
                for i, row in enumerate(batch.tokens.tolist()):
                    assert batch.first + i not in seen
                    seen[batch.first + i] = row
    assert len(steps) == 1  # in step
    assert [seen[i] for i in range(11)] == alone.tolist()


def test_a_long_text_is_cut_as_if_it_were_read_as_a_whole(small_lm: str, tmp_path: Path) -> None:
    for name, text in (("a", words(5000, 9)), ("b", " " * 3000 + words(20, 9))):
        (tmp_path / f"{name}.txt").write_text(text)
        data = set_up(small_lm, texts=str(tmp_path / f"{name}.txt"), n_tokens=16)
        expected = data._lm().tokenizer(words(16, 9))["input_ids"]
        assert tokens(data).tolist() == [expected]


def test_the_sample_is_what_the_embedded_lm_knows() -> None:
    tokenizer = LanguageModel(LMConfig()).tokenizer
    texts = list(world_texts(16, 64))
    assert texts == list(world_texts(16, 64))
    assert texts != list(world_texts(16, 64, seed=1))
    assert len({text.corpus for text in texts}) == len(CIRCLES)
    for text, size in zip(texts, CIRCLES * 2, strict=True):
        ids = tokenizer(text.text, add_special_tokens=False)["input_ids"]
        assert len(ids) >= 64
        assert tokenizer.unk_token_id not in ids
        people = {sentence.split()[0].split("’")[0] for sentence in text.text.split(". ")}
        assert len(people) <= size
        assert (len(people) == 1) == (size == 1)
        sentences = text.text.split(". ")
        assert len(set(sentences)) == len(sentences)
