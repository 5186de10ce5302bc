"""The probe against scikit-learn and scipy on logits taken the naive way."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from scipy import stats
from sklearn.linear_model import LinearRegression, Ridge
from torch.utils.data import DataLoader

from lincorr_lightning import LanguageModel, LinearMap
from lincorr_lightning.callbacks import PredictionWriter
from lincorr_lightning.data.subjects import SubjectBatch, SubjectsDataModule
from lincorr_lightning.errors import (
    CheckpointError,
    ConfigError,
    KnowledgeError,
    LanguageModelError,
    SubjectsError,
)
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.probe.module import LinearProbe
from tests.toys import mean_r, quiet_trainer, read_table

Fitted = tuple[LinearProbe, L.Trainer, Path]

TEMPLATES = {
    "city": "{} lives in the city of",
    "country": "{} lives in the country of",
    "color": "{}’s favorite color is",
}


def run_probe(
    folder: Path,
    lm: str | LMConfig,
    *,
    data: dict[str, Any] | None = None,
    epochs: int = 1,
    **options: Any,
) -> Fitted:
    """Fit a probe and return it, its trainer and its run folder."""
    options = {"knowledge": ["city", "country", "color"], "ridge": 0.0, **options}
    lm = LMConfig(name_or_path=lm) if isinstance(lm, str) else lm
    probe = LinearProbe(lm=lm, **options)
    # Scored once, after the last epoch.
    trainer = quiet_trainer(folder, max_epochs=epochs, check_val_every_n_epoch=epochs)
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
    fit, test = (probe.joint_rows(halves[half]).numpy() for half in ("fit", "test"))
    return SimpleNamespace(fit=fit, test=test, columns=probe.layout.columns, halves=halves)


@pytest.fixture(scope="module")
def naive(small_lm: str, fitted: Fitted) -> dict[str, dict[str, np.ndarray]]:
    """Logits of the same subjects, one prompt at a time, for the labels in the run's files."""
    linear_map = LinearMap.from_pretrained(fitted[2] / "linear_map")
    lm = LanguageModel.from_pretrained(small_lm)
    rows = read_table(fitted[2] / "tables" / "subjects.csv")

    def logits(subject: str, name: str) -> torch.Tensor:
        prompt = lm.tokenizer(TEMPLATES[name].format(subject), return_tensors="pt")
        with torch.no_grad():
            return lm.model(**prompt).logits[0, -1, list(linear_map.token_ids(name))].double()

    return {
        half: {
            name: torch.stack(
                [logits(row["subject"], name) for row in rows if row["half"] == half]
            ).numpy()
            for name in TEMPLATES
        }
        for half in ("fit", "test")
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


def test_stored_map_predicts_as_scikit_learn_on_the_same_logits(
    fitted: Fitted, read: SimpleNamespace
) -> None:
    linear_map = LinearMap.from_pretrained(fitted[2] / "linear_map")
    for source, target in fitted[0].layout.pairs:
        x, y = read.columns(source), read.columns(target)
        expected = LinearRegression().fit(read.fit[:, x], read.fit[:, y]).predict(read.test[:, x])
        ours = linear_map.predict(f"{source}->{target}", torch.from_numpy(read.test[:, x])).numpy()
        assert np.abs(ours - expected).max() <= 1e-6 * np.abs(expected).max()


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


def test_prompts_that_share_their_beginning_or_not_give_one_map(
    small_lm: str,
    fitted: Fitted,
    tmp_path: Path,
) -> None:
    shared = fitted[0]
    assert (shared.lm.reads_prompts or "").startswith("with shared prefixes")
    alone, _, other = run_probe(
        tmp_path, LMConfig(name_or_path=small_lm, share_prefixes=False), ridge=1.0
    )
    assert (alone.lm.reads_prompts or "").startswith("one by one")
    again, _, ours = run_probe(tmp_path, small_lm, ridge=1.0)
    rows = [probe.joint_rows(shared.fit_subjects) for probe in (alone, again)]
    assert (rows[0] - rows[1]).abs().max() <= 1e-4 * rows[0].abs().max()
    for pair, scores in _pairs(other).items():
        assert scores["label_mean"] == pytest.approx(_pairs(ours)[pair]["label_mean"], abs=1e-5)


def test_ridge_path_equals_scikit_learn(fitted: Fitted, read: SimpleNamespace) -> None:
    probe, _, folder = fitted
    results = json.loads((folder / "results.json").read_text())
    path = next(
        p["path"]
        for p in results["ridge_path"]
        if (p["source"], p["target"]) == ("city", "country")
    )
    assert [point["ridge"] for point in path] == pytest.approx(list(probe.ridge_request.strengths))
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


def test_a_pair_by_itself_has_the_numbers_of_the_joint_run(
    fitted: Fitted, small_lm: str, tmp_path: Path
) -> None:
    joint = _pairs(fitted[2])["city", "country"]
    folder = run_probe(tmp_path, small_lm, pairs=["city->country"], knowledge=[])[2]
    (alone,) = _pairs(folder).values()

    def numbers(tree: object) -> list[float]:
        if isinstance(tree, dict):
            return [number for key in sorted(tree) for number in numbers(tree[key])]
        return [tree] if isinstance(tree, float) else []

    # What is adjusted for the number of pairs depends on it.
    parts = [{k: v for k, v in one.items() if k != "q"} for one in (joint, alone)]
    ours, theirs = map(numbers, parts)
    assert len(ours) >= 9
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_auto_ridge_is_judged_on_the_fit_half_alone(small_lm: str, tmp_path: Path) -> None:
    probe, trainer, folder = run_probe(tmp_path, small_lm, ridge="auto", pairs="city->country")
    halves = trainer.datamodule.halves  # type: ignore[attr-defined]
    rows = probe.joint_rows(halves["fit"]).numpy()
    x, y = probe.layout.columns("city"), probe.layout.columns("country")
    judge = np.arange(len(rows)) % 5 == 4
    means = []
    for ridge in probe.ridge_request.strengths:
        model = Ridge(alpha=max(ridge, 1e-9)).fit(rows[~judge][:, x], rows[~judge][:, y])
        means.append(mean_r(model.predict(rows[judge][:, x]), rows[judge][:, y]))
    expected = max(i for i, mean in enumerate(means) if mean >= max(means) - 0.02)
    assert probe.ridges["city", "country"] == pytest.approx(probe.ridge_request.strengths[expected])
    # The final map is fitted on the whole half.
    model = Ridge(alpha=probe.ridges["city", "country"]).fit(rows[:, x], rows[:, y])
    np.testing.assert_allclose(probe.maps["city"].weight.detach(), model.coef_, atol=1e-7)
    assert _pairs(folder)["city", "country"]["ridge"] == probe.ridges["city", "country"]


def test_gradient_descent_reaches_the_closed_form(small_lm: str, tmp_path: Path) -> None:
    data = {"n_subjects": 200, "batch_size": 100}
    options: dict[str, Any] = {"pairs": "color->country", "ridge": 1.0}
    closed, *_ = run_probe(tmp_path / "a", small_lm, data=data, **options)
    descent, *_ = run_probe(
        tmp_path / "b", small_lm, data=data, epochs=220, solver="sgd", **options
    )
    ours, theirs = (probe.results.values["pairs"][0] for probe in (descent, closed))  # type: ignore[union-attr]
    assert ours["label_mean"] == pytest.approx(theirs["label_mean"], abs=5e-3)
    rows = closed.joint_rows(["Paris", "name3", "blue"])
    difference = descent(rows)["color", "country"] - closed(rows)["color", "country"]
    assert difference.abs().max() < 0.05 * closed(rows)["color", "country"].std()


def test_a_step_of_descent_is_the_gradient_of_the_ridge_loss(small_lm: str, tmp_path: Path) -> None:
    """One batch of all subjects, one step from W = 0: centred, at the rate of its curvature."""
    probe, trainer, _ = run_probe(
        tmp_path,
        small_lm,
        data={"n_subjects": 120, "batch_size": 64},
        solver="sgd",
        pairs="city->country",
        ridge=3.0,
        epochs=2,
        learning_rate=0.4,
        momentum=0.0,
    )
    rows = probe.joint_rows(trainer.datamodule.halves["fit"]).numpy()  # type: ignore[attr-defined]
    x, y = rows[:, probe.layout.columns("city")], rows[:, probe.layout.columns("country")]
    centred, n = x - x.mean(0), len(rows)
    curvature = np.linalg.svd(centred, compute_uv=False)[0] ** 2 / n
    weight, bias = np.zeros((y.shape[1], x.shape[1])), np.zeros(y.shape[1])
    for rate in (0.4, 0.2):  # a half cosine
        wrong = centred @ weight.T + bias - y
        step = wrong.T @ centred / n + 3.0 / n * weight
        weight, bias = weight - rate / curvature * step, bias - rate * wrong.mean(0)
    np.testing.assert_allclose(probe.maps["city"].weight.detach(), weight, rtol=1e-4, atol=1e-6)


def test_the_closed_form_is_one_optimizer_step(
    fitted: Fitted, small_lm: str, tmp_path: Path
) -> None:
    probe, trainer, _ = fitted
    assert trainer.global_step == 1
    again, *_ = run_probe(tmp_path, small_lm, epochs=3)
    for one, other in zip(probe.maps.parameters(), again.maps.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


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
    probe = LinearProbe(LMConfig(small_lm), knowledge=list(TEMPLATES))
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
    assert again.n_fit == 150
    score_checkpoint(tmp_path, small_lm, checkpoint)
    (results,) = tmp_path.rglob("results.json")
    scores = _pairs(results.parent)
    for pair, before in _pairs(folder).items():
        for key in ("label_mean", "instance_mean", "control_label_mean"):
            assert scores[pair][key] == pytest.approx(before[key], abs=1e-6)
        assert scores[pair]["precision"] == before["precision"]


@pytest.mark.parametrize("solver", ["closed_form", pytest.param("sgd", marks=pytest.mark.nightly)])
def test_kinds_named_like_attributes_of_a_module(
    solver: str, fitted: Fitted, small_lm: str, tmp_path: Path
) -> None:
    """All are the same knowledge as color, and have its numbers; checkpoints have them, too."""
    names = sorted({name for name in dir(torch.nn.ModuleDict()) if name.strip("_") == name})
    assert {"type", "keys", "training", "forward"} <= set(names) and len(names) > 50
    knowledge = {
        "family": "attribute",
        "language": "en",
        "template": TEMPLATES["color"],
        "answers": ["red", "blue", "green", "yellow", "black", "white"],
    }
    path = tmp_path / "mine.yaml"
    kinds = {"version": 1, "source": "me", "knowledge": dict.fromkeys(names, knowledge)}
    path.write_text(yaml.safe_dump(kinds))
    options = {
        "knowledge_files": [str(path)],
        "knowledge": [],
        "solver": solver,
        "ridge": 1.0,
        "pairs": [f"{name}->city" for name in (*names, "color")],
        "random_labels": 0,
    }
    probe, trainer, folder = run_probe(tmp_path, small_lm, data={"n_subjects": 60}, **options)
    scores = {source: pair["label_mean"] for (source, _), pair in _pairs(folder).items()}
    assert scores == pytest.approx(dict.fromkeys([*names, "color"], scores["color"]))
    weights = LinearMap.from_pretrained(folder / "linear_map")
    again = LinearProbe.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    rows = probe.joint_rows(["Paris", "name7"])
    for (source, target), logits in again(rows).items():
        torch.testing.assert_close(logits, probe(rows)[source, target])
        x = rows[:, probe.layout.columns(source)]
        torch.testing.assert_close(logits, weights.predict(f"{source}->{target}", x))


def test_checkpoints_that_do_not_fit_are_refused(
    checkpoint: str, small_lm: str, make_lm: Callable[..., Path], tmp_path: Path
) -> None:
    other = LMConfig(str(make_lm(tmp_path / "other", seed=1)))
    with pytest.raises(CheckpointError, match=r"whose weights .* differs from that of .*other"):
        LinearProbe.load_from_checkpoint(checkpoint, lm=other)
    with pytest.raises(CheckpointError, match=r"Set the same model\.knowledge"):
        LinearProbe.load_from_checkpoint(checkpoint, knowledge=["city", "country"])
    with pytest.raises(SubjectsError, match="among those that the maps were fitted on"):
        score_checkpoint(tmp_path, small_lm, checkpoint, seed=1)
    with pytest.raises(ConfigError, match="no map to test yet"):
        score_checkpoint(tmp_path, small_lm, None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ridge": -1.0}, ConfigError, "model.ridge is -1.0"),
        ({"ridge": "auto", "solver": "sgd"}, ConfigError, "closed_form"),
        ({"ridge_grid": [1.0, 0.5]}, ConfigError, "model.ridge_grid must be increasing"),
        ({"momentum": 1.0}, ConfigError, "model.momentum is 1.0"),
        ({"control": "no place"}, ConfigError, "model.control 'no place'"),
        ({"figure_labels": ["Paris", "Atlantis"]}, ConfigError, "'Atlantis' is no label of city"),
        ({"knowledge": ["city"]}, ConfigError, "two kinds of knowledge or more"),
        (
            {"require_reference": ["country->city"], "pairs": "city->country"},
            ConfigError,
            "does not fit",
        ),
        ({"require_reference": ["city->color"]}, KnowledgeError, "has no reference"),
        ({"knowledge": ["city", "contry"]}, KnowledgeError, "country"),
    ],
)
def test_refused_settings(
    small_lm: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    options = {"knowledge": ["city", "country", "color"], "ridge": 0.0, **options}
    with pytest.raises(error, match=message):
        LinearProbe(lm=LMConfig(name_or_path=small_lm), **options)


@pytest.mark.parametrize(
    ("n", "ridge", "warns"), [(10, 0.0, True), (10, 1.0, False), (60, 0.0, False)]
)
def test_fewer_subjects_than_labels(
    small_lm: str, tmp_path: Path, n: int, ridge: float, warns: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_probe(tmp_path, small_lm, data={"n_subjects": n}, ridge=ridge)
    said = [str(one.message) for one in caught if "without a ridge they fit" in str(one.message)]
    assert bool(said) == warns
    assert all(
        "fitted on 5 subjects" in message and "Raise data.n_subjects" in message for message in said
    )


def test_an_lm_that_does_not_read_its_prompts_is_refused(small_lm: str, tmp_path: Path) -> None:
    """A negative base of its rotary positions makes its attention NaN, which torch takes as 0."""
    config = shutil.copytree(small_lm, tmp_path / "lm") / "config.json"
    wrong = {"rope_type": "default", "rope_theta": -1e4}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_parameters": wrong}))
    with pytest.raises(LanguageModelError, match="the same logits after every subject"):
        run_probe(tmp_path, str(config.parent))


def test_half_precision_trainer_is_refused(small_lm: str, tmp_path: Path) -> None:
    probe = LinearProbe(lm=LMConfig(name_or_path=small_lm), ridge=0.0)
    trainer = quiet_trainer(tmp_path, logger=False, precision="bf16-true")
    with pytest.raises(ConfigError, match=r"trainer\.precision is bf16-true"):
        trainer.fit(probe, datamodule=SubjectsDataModule(probe.lm, n_subjects=100))


def test_stored_maps_are_scored_without_reading_layers(
    small_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, trainer, _ = run_probe(tmp_path, small_lm, layers=[0])
    monkeypatch.setattr("lincorr_lightning.probe.module.logit_lens", pytest.fail)
    again = LinearProbe(lm=LMConfig(small_lm), knowledge=["city", "country", "color"], layers=[0])
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    data = SubjectsDataModule(again.lm, n_subjects=300, batch_size=64)
    found = quiet_trainer(tmp_path / "again")
    found.validate(again, datamodule=data, ckpt_path=path)
    assert again.results is not None and not again.results.values.get("logit_lens")
    assert probe.results is not None and probe.results.values["logit_lens"]


def test_predictions_are_no_results_of_an_earlier_fit(small_lm: str, tmp_path: Path) -> None:
    probe, trainer, _ = run_probe(tmp_path / "fit", small_lm)
    data = trainer.datamodule  # type: ignore[attr-defined]
    quiet_trainer(tmp_path / "predict").predict(probe, datamodule=data)
    assert not list((tmp_path / "predict").rglob("results.json"))


def test_a_dry_run_writes_no_predictions(checkpoint: str, small_lm: str, tmp_path: Path) -> None:
    probe = LinearProbe(lm=LMConfig(small_lm), knowledge=["city", "country", "color"])
    data = SubjectsDataModule(probe.lm, n_subjects=300)
    trainer = L.Trainer(
        accelerator="cpu",
        fast_dev_run=True,
        default_root_dir=tmp_path,
        callbacks=[PredictionWriter()],
    )
    trainer.predict(probe, datamodule=data, ckpt_path=checkpoint)
    assert not list(tmp_path.rglob("*.*"))
