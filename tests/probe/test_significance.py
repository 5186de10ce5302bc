"""Which correlations are real: against the tiny world, where it is known, and scikit-learn."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
from scipy import stats
from sklearn.linear_model import LinearRegression

from lincorr_lightning import LanguageModel
from lincorr_lightning.probe.module import LinearProbe
from tests.probe.test_module import run_probe
from tests.toys import read_table

pytestmark = pytest.mark.slow

# Knowledge of a group follows from one another in the tiny world (docs/pairs.md).
GROUPS = ("city country continent", "ceo company")
FREE = ("pet",)


def _run(
    folder: Path, n_subjects: int, **options: Any
) -> tuple[dict[str, Any], LinearProbe, L.Trainer, Path]:
    data = {"n_subjects": n_subjects, "batch_size": 200}
    probe, trainer, run = run_probe(folder, "tiny-world", data=data, **options)
    return json.loads((run / "results.json").read_text()), probe, trainer, run


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Any], LinearProbe, L.Trainer, Path]:
    names = [name for group in GROUPS for name in group.split()] + list(FREE)
    return _run(tmp_path_factory.mktemp("runs"), 1000, knowledge=names, partial_out=["pet"])


def test_findings_are_relations_of_the_world(found: Any) -> None:
    """Most relations are of no more than words: the LM's states are small."""
    pairs = {(pair["source"], pair["target"]): pair for pair in found[0]["pairs"]}
    related = {pair for group in GROUPS for pair in permutations(group.split(), 2)}
    significant = {name for name, pair in pairs.items() if pair["q"] <= 0.01}
    assert significant and significant <= related
    assert len(pairs) > 3 * len(related)


def test_p_and_q_follow_from_r_above_random_words(found: Any) -> None:
    pairs = found[0]["pairs"]
    for pair in pairs:
        above = pair["excess_over_random_labels"]
        half = (above["high"] - above["low"]) / 2
        # Of few or many degrees of freedom.
        z = above["mean"] / half
        bounds = [stats.t.sf(z * stats.t.ppf(0.975, n), n) for n in (2, 10_000)]
        assert min(bounds) - 1e-12 <= pair["p"] <= max(bounds) + 1e-12
    adjusted = stats.false_discovery_control([pair["p"] for pair in pairs], method="by")
    np.testing.assert_allclose([pair["q"] for pair in pairs], adjusted, rtol=1e-8, atol=1e-300)


def _logits(probe: LinearProbe, run: Path, half: str, name: str, prompt: str = "") -> np.ndarray:
    """Logits of the labels of `name` after its own prompt, or after another one."""
    rows = read_table(run / "tables" / "subjects.csv")
    subjects = [row["subject"] for row in rows if row["half"] == half]
    domain = probe.layout.domains[name]
    prompts = [(prompt or domain.knowledge.template).format(x) for x in subjects]
    lm = LanguageModel.from_pretrained("tiny-world")
    return lm.domain_logits(prompts, domain.token_ids).numpy()


def test_partial_r_is_that_of_scikit_learn(found: Any) -> None:
    results, probe, _, run = found
    pair = next(p for p in results["pairs"] if (p["source"], p["target"]) == ("country", "city"))
    halves = ("fit", "test")
    x, y, z = ({h: _logits(probe, run, h, n) for h in halves} for n in ("country", "city", "pet"))

    def without_pet(side: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        removed = LinearRegression().fit(z["fit"], side["fit"])
        return {half: side[half] - removed.predict(z[half]) for half in halves}

    u, v = without_pet(x), without_pet(y)
    predicted = LinearRegression().fit(u["fit"], v["fit"]).predict(u["test"])
    r = [stats.pearsonr(p, t)[0] for p, t in zip(predicted.T, v["test"].T, strict=True)]
    assert pair["partial_label_mean"] == pytest.approx(np.mean(r), abs=1e-6)
    plain = LinearRegression().fit(x["fit"], y["fit"]).predict(x["test"])
    alone = [stats.pearsonr(p, t)[0] ** 2 for p, t in zip(plain.T, y["test"].T, strict=True)]
    unique = np.square(r) * v["test"].var(0) / y["test"].var(0)
    assert pair["through_given"] == pytest.approx(1 - unique.sum() / np.sum(alone), abs=1e-6)


def test_what_is_partialled_out_needs_no_pair(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"knowledge": ["country", "city"], "partial_out": ["pet"]}
    results, probe, trainer, _ = _run(tmp_path, 600, control=None, **options)
    assert {(p["source"], p["target"]) for p in results["pairs"]} == {
        ("country", "city"),
        ("city", "country"),
    }
    assert all(pair["partial_label_mean"] > 0.5 for pair in results["pairs"])
    for pair in results["pairs"]:
        assert pair["excess"] is None and pair["label_error"] > 0
    trainer.test(probe, datamodule=trainer.datamodule, verbose=False)  # type: ignore[attr-defined]
    assert probe.results is not None, "the fit has moments no more"
    assert {pair["partial_label_mean"] for pair in probe.results.values["pairs"]} == {None}
