"""Several wordings of a prompt: scores are means over them, each as in a run of its own."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lincorr_lightning import LinearMap
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
def alone(small_lm: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs with one wording each, those of the pairs of `WORDINGS` in their order."""
    runs = []
    for i, town in enumerate(TOWN):
        folder = tmp_path_factory.mktemp("alone")
        content = FILE.replace(json.dumps(TOWN), json.dumps([town]))
        content = content.replace(f'"{LAND[0]}"', f'"{LAND[i % 2]}"')
        (folder / "alone.yaml").write_text(content)
        options = OPTIONS | {"knowledge_files": [str(folder / "alone.yaml")]}
        runs.append(run_probe(folder, small_lm, **options)[2])
    return runs


def by_pair(run: Path) -> dict[str, dict[str, Any]]:
    return {f"{p['source']}->{p['target']}": p for p in results_of(run)["pairs"]}


def test_scores_are_means_over_wordings(fitted: Fitted, alone: list[Path]) -> None:
    pairs, singles = by_pair(fitted[2]), list(map(by_pair, alone))
    rows = read_table(fitted[2] / "tables" / "wordings.csv")
    assert [(row["pair"], row["source"], row["target"]) for row in rows] == [
        (pair, *prompts) for pair, own in WORDINGS.items() for prompts in own
    ]
    assert set(pairs) == set(WORDINGS)
    for name, wordings in WORDINGS.items():
        pair, own = pairs[name], [single[name] for single in singles[: len(wordings)]]
        r, control = ([one[key] for one in own] for key in ("label_mean", "control_label_mean"))
        of_table = [float(row["label_mean"]) for row in rows if row["pair"] == name]
        assert of_table == pytest.approx(r, abs=1e-5)
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
        assert found["excess_over_random"]["mean"] == pytest.approx(pair["excess_over_random"])
        assert ("influenced_1" in found) == (name == "town->land")
    pair = pairs["town->land"]
    hits = [single["town->land"]["precision"]["influenced"]["1"] for single in singles]
    assert np.std(hits) > 0
    assert pair["templates"]["influenced_1"]["values"] == pytest.approx(hits)
    assert pair["precision"]["influenced"]["1"] == pytest.approx(np.mean(hits))
    above = pair["templates"]["above_best_baseline"]
    assert pair["above_best_baseline"]["difference"] == pytest.approx(np.mean(above["values"]))


def test_each_point_of_the_ridge_path_is_a_mean(fitted: Fitted) -> None:
    results = results_of(fitted[2])
    means = {(p["source"], p["target"]): p["label_mean"] for p in results["pairs"]}
    for own in results["ridge_path"]:
        r = {point["ridge"]: point["label_mean"] for point in own["path"]}
        assert r[1.0] == pytest.approx(means[own["source"], own["target"]], abs=1e-9)
        assert r[1.0] != r[0.1]


def test_the_saved_map_is_that_of_the_first_wording(fitted: Fitted, alone: list[Path]) -> None:
    assert {pair["templates"] for pair in by_pair(alone[0]).values()} == {None}
    assert not (alone[0] / "tables" / "wordings.csv").exists()
    own, other = (LinearMap.from_pretrained(run / "linear_map") for run in (fitted[2], alone[0]))
    assert own.pairs == other.pairs and own.knowledge == ["town", "land", "team"]
    assert all(own.label_set(name) == other.label_set(name) for name in own.knowledge)
    for pair in own.pairs:
        torch.testing.assert_close(own.weight(pair), other.weight(pair), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(own.bias(pair), other.bias(pair), rtol=1e-3, atol=1e-4)


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
