"""Several wordings of a prompt: scores are means over them, each against plain loops."""

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import Ridge

from lincorr_lightning import LanguageModel, LinearMap
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.probe.module import LinearProbe
from tests.probe.test_module import Fitted, run_probe
from tests.toys import read_table

pytestmark = pytest.mark.slow

TOWN = ["{} lives in the city of", "the city of {} is", "{} was born in the city of"]
LAND = ["{} lives in the country of", "the country of {} is"]
TEAM = "{} saw a"
FILE = f"""\
version: 1
source: me
knowledge:
  town: {{family: attribute, language: en, answers: city, templates: {json.dumps(TOWN)}}}
  land: {{family: attribute, language: en, answers: country, template: "{LAND[0]}",
         paraphrases: ["{LAND[1]}", "the capital of {{}} is in"]}}
  team: {{family: attribute, language: en, answers: color, template: "{TEAM}"}}
"""
COUNTRY_OF = {
    "Paris": "France",
    "Tokyo": "Japan",
    "Berlin": "Germany",
    "Madrid": "Spain",
    "Rome": "Italy",
    "Vienna": "Austria",
    "Oslo": "Norway",
    "Cairo": "Egypt",
    "Lima": "Peru",
    "Beijing": "China",
    "Moscow": "Russia",
}
# Where one side has fewer wordings, its first follows its last.
WORDINGS = {
    "town->land": [(TOWN[0], LAND[0]), (TOWN[1], LAND[1]), (TOWN[2], LAND[0])],
    "town->team": [(prompt, TEAM) for prompt in TOWN],
    "land->town": [(LAND[0], TOWN[0]), (LAND[1], TOWN[1]), (LAND[0], TOWN[2])],
    "land->team": [(prompt, TEAM) for prompt in LAND],
    "team->town": [(TEAM, prompt) for prompt in TOWN],
    "team->land": [(TEAM, prompt) for prompt in LAND],
}
OPTIONS: dict[str, Any] = {
    "knowledge": ["town", "land", "team"],
    "ridge": 1.0,
    "random_labels": 5,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("files") / "towns.yaml"
    path.write_text(FILE)
    return str(path)


@pytest.fixture(scope="module")
def fitted(small_lm: str, file: str, tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    folder = tmp_path_factory.mktemp("runs")
    options = OPTIONS | {"knowledge_files": [file], "paraphrases": True, "partial_out": ["team"]}
    return run_probe(folder, small_lm, **options)


def results_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("results.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def logits(small_lm: str, fitted: Fitted) -> Callable[..., np.ndarray]:
    """Logits of a half of the subjects, whose prompts have one length, at the labels of a kind."""
    linear_map = LinearMap.from_pretrained(fitted[2] / "linear_map")
    lm = LanguageModel.from_pretrained(small_lm)
    rows = read_table(fitted[2] / "tables" / "subjects.csv")
    subjects = {half: [r["subject"] for r in rows if r["half"] == half] for half in ("fit", "test")}

    @cache
    def read_logits(half: str, template: str, name: str) -> np.ndarray:
        prompts = [template.format(subject) for subject in subjects[half]]
        with torch.no_grad():
            read = lm.model(**lm.tokenizer(prompts, return_tensors="pt")).logits[:, -1]
        return read[:, linear_map.token_ids(name)].double().numpy()

    return read_logits


@pytest.fixture(scope="module")
def oracle(
    logits: Callable[..., np.ndarray], fitted: Fitted
) -> dict[str, list[tuple[float, float, float | None]]]:
    """R, r of the control and Hit@1 of each wording, by scikit-learn and scipy."""
    linear_map, halves = LinearMap.from_pretrained(fitted[2] / "linear_map"), ("fit", "test")
    scores = {}
    for pair, wordings in WORDINGS.items():
        source, target = pair.split("->")
        scores[pair] = []
        for prompt, target_prompt in wordings:
            y = {half: logits(half, target_prompt, target) for half in halves}
            r = []
            for first in (prompt, "One day, {} saw a"):
                x = {half: logits(half, first, source) for half in halves}
                model = Ridge(alpha=1.0).fit(x["fit"], y["fit"])
                predicted = model.predict(x["test"])
                by_label = zip(predicted.T, y["test"].T, strict=True)
                r.append(float(np.mean([stats.pearsonr(p, t)[0] for p, t in by_label])))
                if first == prompt:
                    weight = model.coef_
            hits = [
                linear_map.labels(target)[weight[:, column].argmax()] == COUNTRY_OF[label]
                for column, label in enumerate(linear_map.labels(source))
                if pair == "town->land" and label in COUNTRY_OF
            ]
            scores[pair].append((*r, float(np.mean(hits)) if hits else None))
    return scores


def test_scores_are_means_over_wordings(fitted: Fitted, oracle: Any) -> None:
    pairs = {f"{p['source']}->{p['target']}": p for p in results_of(fitted[2])["pairs"]}
    assert set(pairs) == set(WORDINGS)
    for name, wordings in oracle.items():
        pair, (r, control, hits) = pairs[name], zip(*wordings, strict=True)
        assert pair["label_mean"] == pytest.approx(np.mean(r), abs=1e-5)
        assert pair["control_label_mean"] == pytest.approx(np.mean(control), abs=1e-5)
        assert pair["label_error"] > 0 and 0 < pair["q"] <= 1
        found = pair["templates"]
        assert found["n"] == len(wordings)
        assert found["label_mean"]["values"] == pytest.approx(r, abs=1e-5)
        expected = {"mean": np.mean(r), "std": np.std(r), "low": min(r), "high": max(r)}
        for key, value in expected.items():
            assert found["label_mean"][key] == pytest.approx(value, abs=1e-5)
        above = np.subtract(r, control)
        assert found["excess"]["values"] == pytest.approx(above, abs=1e-5)
        assert found["excess"]["std"] == pytest.approx(np.std(above), abs=1e-5)
        assert found["excess_over_random"]["mean"] == pytest.approx(pair["excess_over_random"])
        assert ("influenced_1" in found) == (name == "town->land")
    hits = [hit for *_, hit in oracle["town->land"]]
    assert np.std(hits) > 0
    pair = pairs["town->land"]
    assert pair["templates"]["influenced_1"]["values"] == pytest.approx(hits)
    assert pair["precision"]["influenced"]["1"] == pytest.approx(np.mean(hits))
    above = pair["templates"]["above_best_baseline"]
    assert pair["above_best_baseline"]["difference"] == pytest.approx(np.mean(above["values"]))
    rows = read_table(fitted[2] / "tables" / "wordings.csv")
    assert [(row["pair"], row["source"], row["target"]) for row in rows] == [
        (pair, *prompts) for pair, own in WORDINGS.items() for prompts in own
    ]
    ours = [float(row["label_mean"]) for row in rows]
    assert ours == pytest.approx([r for own in oracle.values() for r, *_ in own], abs=1e-5)


def test_each_point_of_the_ridge_path_is_a_mean(fitted: Fitted) -> None:
    results = results_of(fitted[2])
    means = {(p["source"], p["target"]): p["label_mean"] for p in results["pairs"]}
    for own in results["ridge_path"]:
        r = {point["ridge"]: point["label_mean"] for point in own["path"]}
        assert r[1.0] == pytest.approx(means[own["source"], own["target"]], abs=1e-9)
        assert r[1.0] != r[0.1]


def test_the_saved_map_is_that_of_the_first_wording(
    fitted: Fitted, small_lm: str, file: str, tmp_path: Path
) -> None:
    path = tmp_path / "alone.yaml"
    path.write_text(FILE.replace(json.dumps(TOWN), json.dumps(TOWN[:1])))
    options = OPTIONS | {"knowledge_files": [str(path)]}
    alone = run_probe(tmp_path, small_lm, **options)
    for pair in results_of(alone[2])["pairs"]:
        assert pair["templates"] is None
    assert not (alone[2] / "tables" / "wordings.csv").exists()
    own, other = (LinearMap.from_pretrained(one[2] / "linear_map") for one in (fitted, alone))
    assert own.pairs == other.pairs and own.knowledge == ["town", "land", "team"]
    assert all(own.label_set(name) == other.label_set(name) for name in own.knowledge)
    for pair in own.pairs:
        torch.testing.assert_close(own.weight(pair), other.weight(pair), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(own.bias(pair), other.bias(pair), rtol=1e-3, atol=1e-4)
    values = {(p["source"], p["target"]): p["templates"] for p in results_of(fitted[2])["pairs"]}
    for pair in results_of(alone[2])["pairs"]:
        spread = values[pair["source"], pair["target"]]["label_mean"]
        assert spread["values"][0] == pytest.approx(pair["label_mean"], abs=1e-5)


def test_wordings_that_the_lm_cannot_read_are_left_out(
    fitted: Fitted, small_lm: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    left_out = {"the capital of {} is in": "the LM does not know these words of it: capital"}
    assert results_of(fitted[2])["left_out"] == left_out
    with caplog.at_level(logging.WARNING):
        LinearProbe(LMConfig(small_lm), knowledge_files=[file], paraphrases=True, **OPTIONS)
    assert "land: 'the capital of {} is in' is left out" in caplog.text
    with pytest.raises(ConfigError, match=r"paraphrases is true, but city, country have none"):
        LinearProbe(LMConfig(small_lm), knowledge=["city", "country"], paraphrases=True)
