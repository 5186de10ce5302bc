"""The first tokens of whole texts, and how ranks share them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import lincorr_lightning.lm
from lincorr_lightning.data.texts import TokenizedTextDataModule, read_prompts
from lincorr_lightning.data.tiny_world.world import world_documents
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel


def words(n: int, start: int = 0) -> str:
    return " ".join(f"name{(start + i) % 400}" for i in range(n))


def set_up(small_lm: str, **options: Any) -> TokenizedTextDataModule:
    data = TokenizedTextDataModule(LanguageModel(LMConfig(small_lm)), **options)
    data.setup("test")
    return data


def token_ids(small_lm: str, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(small_lm)(text)["input_ids"]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return path


def test_short_texts_are_skipped_and_counted(small_lm: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [words(20), words(15), words(3), words(16, 30), words(17)])
    with pytest.warns(UserWarning, match=r"2 of 4 texts are shorter than data\.n_tokens, 16"):
        data = set_up(small_lm, texts=str(path), n_tokens=16, n_texts=2)
    (one, two) = data.test_dataloader()
    assert one.n_skipped == two.n_skipped == 2
    assert [*one.names, *two.names] == [f"{path}, line 1", f"{path}, line 4"]
    assert one.corpora == two.corpora == ["a"]
    assert one.tokens.tolist() == [token_ids(small_lm, words(16))]
    assert (one.first, two.first) == (0, 1)


@pytest.mark.parametrize("setting", [{"n_tokens": 3}, {"n_texts": 0}, {"batch_size": 0}])
def test_refused_settings(small_lm: str, setting: dict[str, int]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=rf"data\.{name} is"):
        TokenizedTextDataModule(**setting)
    with pytest.raises(ConfigError, match=r"data\.n_tokens is 65; .* reads 64 at most"):
        set_up(small_lm, n_tokens=65)


def test_texts_about_the_world_of_the_lm_or_of_the_embedded_one(small_lm, tmp_path):
    embedded = LanguageModel(LMConfig())
    prompts, texts = read_prompts(embedded, n_tokens=24, n_texts=3), list(world_documents(3, 24))
    expected = embedded.tokenizer([text.text for text in texts], add_special_tokens=False)
    assert prompts.tokens.tolist() == [ids[:24] for ids in expected["input_ids"]]
    assert prompts.corpora == [text.corpus for text in texts]
    with pytest.warns(UserWarning, match="are shorter"):  # the small LM has few of its words
        assert len(read_prompts(LanguageModel(LMConfig(small_lm)), n_tokens=24).tokens) < 96

    folder = tmp_path / "lm"
    shutil.copytree(Path(lincorr_lightning.lm.__file__).parent / "tiny_world", folder)
    world = json.loads((folder / "world.json").read_text(encoding="utf-8"))
    world["config"]["n_people"] = 20  # the first people are the invented ones
    (folder / "world.json").write_text(json.dumps(world), encoding="utf-8")
    own = read_prompts(LanguageModel(LMConfig(str(folder))), n_tokens=24, n_texts=3)
    people = list(world["people"])[:20]
    assert {embedded.tokenizer.decode([row[0]]) for row in own.tokens} <= set(people)
