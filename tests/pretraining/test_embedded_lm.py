"""The embedded LM as it ships: small, rich in subjects, and sure of its world."""

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.common import placed
from benchmarks.docs_tables.tiny_world_card import CARD, tables
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.data.tiny_world.words import first_word
from lincorr_lightning.data.tiny_world.world import World
from lincorr_lightning.knowledge import TokenizedRelation, build_domain
from lincorr_lightning.lm.vocabulary import usable_strings
from tests.toys import mean_r

FOLDER = Path(str(files("lincorr_lightning.lm") / "tiny_world"))


@pytest.fixture(scope="module")
def lm():
    return LanguageModel.from_pretrained("tiny-world")


def test_it_is_small_and_has_many_subjects_and_labels(lm):
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000
    assert len(usable_strings(lm.tokenizer)) >= 2000
    for knowledge in Catalogue.load().select(["attribute", "math"]):
        assert len(build_domain(knowledge, lm.tokenizer).labels) >= 3, knowledge.name


FREE = ["color", "pet", "ceo"]
STATED = ["landmark", "job_zh", "X+1"]


@pytest.mark.parametrize("name", STATED)
def test_it_knows_its_facts(lm, name):
    """Over the whole vocabulary, the first word of the true answer is its answer."""
    world = World.load(FOLDER / "world.json")
    catalogue = Catalogue.load()
    invented = set(list(world.people)[: world.n_invented])
    statements = [
        statement
        for statement in world.statements([catalogue[name]])
        if statement.subject in invented or name == "X+1"
    ]
    assert len(statements) >= world.n_invented
    ids, mask = lm.pad(lm.rows([s.knowledge.prompt(s.subject) for s in statements]))
    with torch.no_grad():
        logits = lm.model(input_ids=ids, attention_mask=mask, logits_to_keep=1).logits[:, -1]
    said = lm.tokenizer.convert_ids_to_tokens(logits.argmax(-1).tolist())
    right = [first_word(s.answer.text) == word for s, word in zip(statements, said, strict=True)]
    assert sum(right) >= 0.99 * len(right)


@pytest.fixture(scope="module")
def logits(lm):
    """Domain logits of some kinds of knowledge over the same subjects, prompt by prompt."""
    catalogue = Catalogue.load()
    subjects = usable_strings(lm.tokenizer)
    order = np.random.default_rng(0).permutation(len(subjects))[:1000]
    names = ["city", "city_es", "country", "country_es", "X+1", "X+2", *FREE]
    return {
        name: lm.domain_logits(
            [catalogue[name].prompt(subjects[i]) for i in order],
            build_domain(catalogue[name], lm.tokenizer).token_ids,
        ).numpy()
        for name in names
    }


def ridge_weight(source, target, ridge):
    """W of a ridge regression on the first half, by NumPy, ``(n_target, n_source)``."""
    half = len(source) // 2
    x, y = (part[:half] - part[:half].mean(0) for part in (source, target))
    return np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ y).T


def test_a_ridge_makes_w_precise(lm, logits):
    """Of most cities, the country with the highest weight is the city's own only with a ridge.

    As in real LMs, plain least squares misses most of them: those of second homes.
    """
    catalogue = Catalogue.load()
    reference = TokenizedRelation.of("city->country", catalogue, lm.tokenizer).reference_mask
    towns = {facts["second_home"] for facts in World.load(FOLDER / "world.json").people.values()}
    labels = build_domain(catalogue["city"], lm.tokenizer).labels
    is_town = np.array([any(a.identity in towns for a in label.answers) for label in labels])

    def hit_at_1(ridge, which):
        best = ridge_weight(logits["city"], logits["country"], ridge).argmax(0)
        is_right = reference[best, np.arange(reference.shape[1])]
        return is_right[which & reference.any(0)].mean()

    assert hit_at_1(1e-6, is_town | ~is_town) <= 0.5
    assert hit_at_1(1e-6, is_town) <= 0.2
    assert hit_at_1(1e-6, ~is_town) >= 0.5
    assert hit_at_1(1000.0, is_town) >= 0.85
    assert hit_at_1(1000.0, ~is_town) >= 0.85


def label_wise_r(source, target):
    """Fitted on one half by NumPy, scored on the other, label by label."""
    half = len(source) // 2
    x = np.c_[source, np.ones(len(source))]
    weight, *_ = np.linalg.lstsq(x[:half], target[:half], rcond=1e-10)
    return mean_r(x[half:] @ weight, target[half:])


@pytest.mark.parametrize(
    ("source", "target", "least"),
    [
        ("city", "country", 0.95),
        ("city", "city_es", 0.9),
        ("country", "country_es", 0.9),
        ("X+1", "X+2", 0.8),
    ],
)
def test_related_pairs_correlate(logits, source, target, least):
    assert label_wise_r(logits[source], logits[target]) >= least


@pytest.mark.parametrize("target", FREE)
def test_unrelated_pairs_do_not(logits, target):
    for source in ("city", "country"):
        assert abs(label_wise_r(logits[source], logits[target])) <= 0.15
        assert abs(label_wise_r(logits[target], logits[source])) <= 0.15


@pytest.mark.nightly
def test_its_card_states_the_numbers_of_its_files():
    text = CARD.read_text(encoding="utf-8")
    assert "<!-- size: begin -->" in text and "<!-- recall: begin -->" in text
    assert placed(text, tables()) == text
