"""The probe against scikit-learn and scipy on logits taken the naive way."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LinearRegression, Ridge
from torch.utils.data import DataLoader

from lincorr_lightning import LanguageModel, LinearMap
from lincorr_lightning.data.subjects import SubjectBatch, SubjectsDataModule
from lincorr_lightning.errors import (
    CheckpointError,
    ConfigError,
    KnowledgeError,
    LanguageModelError,
    SubjectsError,
)
from lincorr_lightning.functional import HALF_DECADES
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.probe.module import LinearProbe
from tests.toys import mean_r, quiet_trainer, read_table

Fitted = tuple[LinearProbe, L.Trainer, Path]

TEMPLATES = {
    "city": "{} lives in the city of",
    "country": "{} lives in the country of",
    "color": "{}’s favorite color is",
}


def read_alone(lm: LanguageModel, prompts: list[str], tokens: list[int]) -> np.ndarray:
    """Logits after each prompt by transformers, one prompt at a time, in float64."""
    rows = []
    for prompt in prompts:
        with torch.no_grad():
            logits = lm.model(**lm.tokenizer(prompt, return_tensors="pt")).logits
        rows.append(logits[0, -1, tokens].double().numpy())
    return np.stack(rows)


def run_probe(
    folder: Path,
    lm: str | LMConfig,
    *,
    data: dict[str, Any] | None = None,
    **options: Any,
) -> Fitted:
    """Fit a probe and return it, its trainer and its run folder."""
    options = {"knowledge": ["city", "country", "color"], "ridge": 0.0, **options}
    lm = LMConfig(name_or_path=lm) if isinstance(lm, str) else lm
    probe = LinearProbe(lm=lm, **options)
    trainer = quiet_trainer(folder)
    options = {"n_subjects": 300, "batch_size": 64, **(data or {})}
    trainer.fit(probe, datamodule=SubjectsDataModule(probe.lm, **options))
    return probe, trainer, Path(trainer.log_dir or "")


@pytest.fixture(scope="module")
def fitted(small_lm: str, tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return run_probe(tmp_path_factory.mktemp("runs"), small_lm)


@pytest.fixture(scope="module")
def read(fitted: Fitted) -> SimpleNamespace:
    """The joint rows that the probe reads, and the columns of a kind of knowledge in them."""
    probe, trainer, _ = fitted
    halves = trainer.datamodule.halves  # type: ignore[attr-defined]
    fit, test = (probe.joint_rows(halves[half], half).numpy() for half in ("fit", "test"))
    return SimpleNamespace(fit=fit, test=test, columns=probe.layout.columns, halves=halves)


@pytest.fixture(scope="module")
def naive(small_lm: str, fitted: Fitted) -> dict[str, dict[str, np.ndarray]]:
    """Logits of the same subjects, one prompt at a time, for the labels in the run's files."""
    linear_map = LinearMap.from_pretrained(fitted[2] / "linear_map")
    lm = LanguageModel.from_pretrained(small_lm)
    rows = read_table(fitted[2] / "tables" / "subjects.csv")
    subjects = {half: [r["subject"] for r in rows if r["half"] == half] for half in ("fit", "test")}
    return {
        half: {
            name: read_alone(lm, [template.format(x) for x in xs], linear_map.token_ids(name))
            for name, template in TEMPLATES.items()
        }
        for half, xs in subjects.items()
    }


@pytest.fixture(scope="module")
def checkpoint(fitted: Fitted) -> str:
    return fitted[1].checkpoint_callback.best_model_path  # type: ignore[union-attr]


def _pairs(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    results = json.loads((folder / "results.json").read_text())
    return {(pair["source"], pair["target"]): pair for pair in results["pairs"]}


def test_scores_equal_scikit_learn_and_scipy(
    fitted: Fitted, naive: dict[str, dict[str, np.ndarray]]
) -> None:
    pairs = _pairs(fitted[2])
    assert set(pairs) == {(s, t) for s in TEMPLATES for t in TEMPLATES if s != t}
    for (source, target), ours in pairs.items():
        model = LinearRegression().fit(naive["fit"][source], naive["fit"][target])
        predicted, true = model.predict(naive["test"][source]), naive["test"][target]
        by_label = [stats.pearsonr(p, t)[0] for p, t in zip(predicted.T, true.T, strict=True)]
        by_instance = [stats.pearsonr(p, t)[0] for p, t in zip(predicted, true, strict=True)]
        assert ours["label_mean"] == pytest.approx(np.mean(by_label), abs=1e-5)
        assert ours["label_std"] == pytest.approx(np.std(by_label), abs=1e-5)
        assert ours["instance_mean"] == pytest.approx(np.mean(by_instance), abs=1e-5)
        assert ours["n_labels"] == true.shape[1]
        assert ours["n_constant_labels"] == 0


def test_nulls_are_refitted(fitted: Fitted, read: SimpleNamespace) -> None:
    probe, _, folder = fitted
    pair = _pairs(folder)["city", "country"]
    control, y = probe.layout.control_columns("city"), read.columns("country")
    model = LinearRegression().fit(read.fit[:, control], read.fit[:, y])
    expected = mean_r(model.predict(read.test[:, control]), read.test[:, y])
    assert pair["control_label_mean"] == pytest.approx(expected, abs=1e-8)
    # The control is the neutral prompt, read at the city's tokens.
    prompts = [f"One day, {x} saw a" for x in read.halves["fit"]]
    direct = probe.lm.domain_logits(prompts, probe.layout.domains["city"].token_ids)
    np.testing.assert_allclose(direct.numpy(), read.fit[:, control], atol=1e-5)
    assert abs(pair["permuted_label_mean"]) < 0.15
    assert max(pair["permuted_label_mean"], pair["control_label_mean"]) < pair["label_mean"]


def test_ridge_path_equals_scikit_learn(fitted: Fitted, read: SimpleNamespace) -> None:
    probe, _, folder = fitted
    results = json.loads((folder / "results.json").read_text())
    path = next(
        p["path"]
        for p in results["ridge_path"]
        if (p["source"], p["target"]) == ("city", "country")
    )
    assert [point["ridge"] for point in path] == pytest.approx(HALF_DECADES)
    x, y = read.columns("city"), read.columns("country")
    reference = probe.layout.references["city", "country"]
    assert reference is not None
    for point in path[1:]:
        model = Ridge(alpha=point["ridge"]).fit(read.fit[:, x], read.fit[:, y])
        expected = mean_r(model.predict(read.test[:, x]), read.test[:, y])
        assert point["label_mean"] == pytest.approx(expected, abs=1e-6)
        best = model.coef_.argmax(0)
        known = np.flatnonzero(reference.any(0))
        hits = np.mean([reference[best[column], column] for column in known])
        assert point["influenced"]["1"] == pytest.approx(hits)
    chosen = _pairs(folder)["city", "country"]
    assert path[0]["label_mean"] == pytest.approx(chosen["label_mean"], abs=1e-12)
    assert path[0]["influenced"] == chosen["precision"]["influenced"]


def test_a_plain_data_loader_gives_the_numbers_of_the_datamodule(
    fitted: Fitted, small_lm: str, tmp_path: Path
) -> None:
    halves = fitted[1].datamodule.halves  # type: ignore[attr-defined]
    loaders = {
        half: DataLoader(
            [SubjectBatch(xs[i : i + 50], i, half) for i in range(0, 150, 50)],
            batch_size=None,
            collate_fn=lambda batch: batch,
        )
        for half, xs in halves.items()
    }
    probe = LinearProbe(LMConfig(small_lm), knowledge=list(TEMPLATES), ridge=0.0)
    trainer = quiet_trainer(tmp_path, logger=False)
    trainer.fit(probe, loaders["fit"], loaders["test"])
    (path,) = tmp_path.rglob("results.json")
    rows = read_table(path.parent / "tables" / "subjects.csv")
    read = [(row["subject"], row["half"]) for row in rows]
    assert read == [(x, half) for half, xs in halves.items() for x in xs]
    ours = _pairs(path.parent)
    for pair, scores in _pairs(fitted[2]).items():
        assert ours[pair]["label_mean"] == pytest.approx(scores["label_mean"], abs=1e-5)


def test_the_mean_r_can_be_monitored(fitted: Fitted) -> None:
    _, trainer, folder = fitted
    mean = np.mean([pair["label_mean"] for pair in _pairs(folder).values()])
    assert trainer.callback_metrics["val/label_mean"].item() == pytest.approx(mean)
    r = trainer.callback_metrics["val/label_mean/city-country"].item()
    assert r == pytest.approx(_pairs(folder)["city", "country"]["label_mean"])


def score_checkpoint(folder: Path, lm: str, path: str | None, **data: Any) -> LinearProbe:
    probe = LinearProbe(LMConfig(lm), knowledge=list(TEMPLATES))
    subjects = SubjectsDataModule(probe.lm, n_subjects=300, **data)
    quiet_trainer(folder, logger=False).test(probe, subjects, ckpt_path=path, verbose=False)
    return probe


def test_checkpoint_holds_the_maps_and_not_the_lm(
    fitted: Fitted, checkpoint: str, small_lm: str, tmp_path: Path
) -> None:
    probe, _, folder = fitted
    assert not [k for k in torch.load(checkpoint)["state_dict"] if k.startswith("lm.")]
    again = LinearProbe.load_from_checkpoint(checkpoint)
    rows = probe.joint_rows(["Paris", "name7"])
    for pair, logits in again(rows).items():
        torch.testing.assert_close(logits, probe(rows)[pair])
    assert again.fitted is not None and again.fitted.n == 150
    score_checkpoint(tmp_path, small_lm, checkpoint)
    (results,) = tmp_path.rglob("results.json")
    scores = _pairs(results.parent)
    for pair, before in _pairs(folder).items():
        for key in ("label_mean", "instance_mean", "control_label_mean"):
            assert scores[pair][key] == pytest.approx(before[key], abs=1e-6)
        assert scores[pair]["precision"] == before["precision"]


def test_nulls_that_a_run_or_its_checkpoint_leaves_out_have_no_numbers(
    checkpoint: str, tmp_path: Path
) -> None:
    probe = LinearProbe.load_from_checkpoint(checkpoint, permuted=False, random_labels=0)
    data = SubjectsDataModule(probe.lm, n_subjects=300)
    trainer = quiet_trainer(tmp_path, logger=False)
    trainer.test(probe, data, verbose=False)
    every = LinearProbe.load_from_checkpoint(checkpoint)
    assert every.fitted is not None
    every.fitted = replace(every.fitted, maps={"y": every.fitted.maps["y"]})
    quiet_trainer(tmp_path, logger=False).test(every, data, verbose=False)
    for results in (probe.results, every.results):
        assert results is not None
        for pair in results.values["pairs"]:
            assert pair["label_mean"] is not None and pair["permuted_label_mean"] is None
            assert pair["decomposition"] is None


def test_checkpoints_that_do_not_fit_are_refused(
    checkpoint: str, small_lm: str, make_lm: Callable[..., Path], tmp_path: Path
) -> None:
    other = LMConfig(str(make_lm(tmp_path / "other", seed=1)))
    with pytest.raises(CheckpointError, match=r"whose weights .*other"):
        LinearProbe.load_from_checkpoint(checkpoint, lm=other)
    for options, key in (
        ({"knowledge": ["city", "country"]}, "pairs"),
        ({"control": "He saw {} and a"}, "control"),
    ):
        with pytest.raises(CheckpointError, match=rf"fitted with the {key} .*config\.yaml"):
            LinearProbe.load_from_checkpoint(checkpoint, **options)
    with pytest.raises(SubjectsError, match="among those that the maps were fitted on"):
        score_checkpoint(tmp_path, small_lm, checkpoint, seed=1)
    with pytest.raises(ConfigError, match=r"no map to test.*--ckpt_path"):
        score_checkpoint(tmp_path, small_lm, None)
    probe = LinearProbe(LMConfig(small_lm), knowledge=list(TEMPLATES), ridge=0.0)
    data = SubjectsDataModule(probe.lm, n_subjects=300, batch_size=64)
    with pytest.raises(CheckpointError, match=r"not resumed.*`lincorr validate`"):
        quiet_trainer(tmp_path).fit(probe, data, ckpt_path=checkpoint)


@pytest.mark.parametrize(
    ("options", "error", "key"),
    [
        ({"ridge": -1.0}, ConfigError, "model.ridge is -1.0"),
        ({"knowledge": ["city"]}, ConfigError, "model.knowledge gives"),
        (
            {"require_reference": ["country->city"], "pairs": "city->country"},
            ConfigError,
            "model.require_reference names country->city",
        ),
        ({"require_reference": ["city->color"]}, KnowledgeError, "city->color.*no reference"),
    ],
)
def test_refused_settings(
    small_lm: str, options: dict[str, Any], error: type[Exception], key: str
) -> None:
    options = {"knowledge": ["city", "country", "color"], "ridge": 0.0, **options}
    with pytest.raises(error, match=key):
        LinearProbe(lm=LMConfig(name_or_path=small_lm), **options)


@pytest.mark.parametrize(("ridge", "warns"), [(0.0, True), (1.0, False)])
def test_fewer_subjects_than_labels(
    small_lm: str, tmp_path: Path, ridge: float, warns: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_probe(tmp_path, small_lm, data={"n_subjects": 10}, ridge=ridge, random_labels=0)
    texts = [str(one.message) for one in caught]
    assert any("on 5 subjects" in x and "data.n_subjects" in x for x in texts) == warns


def test_an_lm_that_does_not_read_its_prompts_is_refused(small_lm: str, tmp_path: Path) -> None:
    """A negative base of its rotary positions makes its attention NaN, which torch takes as 0."""
    config = shutil.copytree(small_lm, tmp_path / "lm") / "config.json"
    wrong = {"rope_type": "default", "rope_theta": -1e4}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_parameters": wrong}))
    with pytest.raises(LanguageModelError, match="the same logits after every subject"):
        run_probe(tmp_path, str(config.parent))
