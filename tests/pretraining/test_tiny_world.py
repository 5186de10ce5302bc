"""The embedded LM as it ships: small, rich in subjects, and sure of its world."""

from importlib.resources import files
from pathlib import Path

import pytest
import torch

from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.data.world import World
from lincorr_lightning.knowledge import build_domain
from lincorr_lightning.lm import usable_strings

FOLDER = Path(str(files("lincorr_lightning.lm") / "tiny_world"))


@pytest.fixture(scope="module")
def lm():
    return LanguageModel.from_pretrained("tiny-world")


def test_it_is_small_and_has_many_subjects(lm):
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000
    assert len(usable_strings(lm.tokenizer)) >= 2000


def test_it_speaks_every_attribute_and_math(lm):
    catalogue = Catalogue.load()
    for knowledge in catalogue.select(["attribute", "math"]):
        assert len(build_domain(knowledge, lm.tokenizer).labels) >= 3, knowledge.name


@pytest.mark.parametrize(
    "name", ["birthplace", "city", "country", "continent", "language", "landmark", "ceo", "company"]
)
def test_it_knows_its_people(lm, name):
    """Over the whole vocabulary, the first word of the true answer is what it says."""
    world = World.load(FOLDER / "world.json")
    catalogue = Catalogue.load()
    invented = set(list(world.people)[: world.config.n_people])
    statements = [s for s in world.statements([catalogue[name]]) if s.subject in invented]
    assert len(statements) == world.config.n_people
    batch = lm.encode([s.prompt for s in statements])
    with torch.no_grad():
        logits = lm.model(**batch, logits_to_keep=1).logits[:, -1]
    said = lm.tokenizer.convert_ids_to_tokens(logits.argmax(-1).tolist())
    right = [s.answer.text.split()[0] == word for s, word in zip(statements, said, strict=True)]
    assert sum(right) >= 0.95 * len(right)


def test_it_calculates(lm):
    catalogue = Catalogue.load()
    world = World.load(FOLDER / "world.json")
    statements = list(world.statements(catalogue.select(["math"])))
    domain = build_domain(catalogue["X+1"], lm.tokenizer)
    logits = lm.domain_logits([s.prompt for s in statements], domain.token_ids)
    said = [domain.texts[i] for i in logits.argmax(1).tolist()]
    right = [s.answer.text == word for s, word in zip(statements, said, strict=True)]
    assert sum(right) >= 0.9 * len(right)
