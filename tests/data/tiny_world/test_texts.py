"""Texts about the tiny world."""

from pathlib import Path

import pytest
import yaml

from lincorr_lightning.data.tiny_world.world import (
    GROUP_SIZES,
    WORLD_CORPUS,
    World,
    world_documents,
    world_file,
    world_sentences,
)
from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel

ROOT = Path(__file__).resolve().parents[3]
WORLD = ROOT / "lincorr_lightning" / "lm" / "tiny_world" / "world.json"


def test_documents_are_in_words_that_the_embedded_lm_knows() -> None:
    tokenizer = LanguageModel(LMConfig()).tokenizer
    texts = list(world_documents(16, 64))
    assert texts == list(world_documents(16, 64))
    assert texts != list(world_documents(16, 64, seed=1))
    assert len({text.corpus for text in texts}) == len(GROUP_SIZES)
    for text, size in zip(texts, GROUP_SIZES * 2, strict=True):
        ids = tokenizer(text.text, add_special_tokens=False)["input_ids"]
        assert len(ids) >= 64
        assert tokenizer.unk_token_id not in ids
        people = {sentence.split()[0].split("’")[0] for sentence in text.text.split(". ")}
        assert len(people) <= size
        assert (len(people) == 1) == (size == 1)
        sentences = text.text.split(". ")
        assert len(set(sentences)) == len(sentences)


def test_sentences_are_the_statements_of_the_world() -> None:
    kinds = Catalogue.load().select(["city", "X+1"])
    expected = [f"{s.text}." for s in World.load(WORLD).statements(kinds)]
    assert list(world_sentences(WORLD, ["city", "X+1"])) == expected
    with pytest.raises(KnowledgeError, match="nonsense"):
        list(world_sentences(WORLD, ["nonsense"]))


def test_the_corpus_is_what_the_embedded_lm_was_trained_on() -> None:
    config = yaml.safe_load((ROOT / "configs" / "pretraining.yaml").read_text(encoding="utf-8"))
    settings = config["data"]["init_args"]
    assert list(WORLD_CORPUS) == settings.get("knowledge", settings.get("knowledges"))


def test_an_lm_has_a_world_if_one_lies_beside_it(small_lm: str) -> None:
    assert world_file("tiny-world") == WORLD
    assert world_file(str(WORLD.parent)) == WORLD
    assert world_file(small_lm) is None
    assert world_file("openai-community/gpt2") is None
