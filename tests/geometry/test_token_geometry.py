"""The study of token geometry, against numpy and scipy, and from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from safetensors.torch import load_file, save_file
from scipy import stats
from scipy.special import softmax
from torch.utils.data import DataLoader

from lincorr_lightning.cli import main
from lincorr_lightning.data.texts import TokenBatch, TokenizedTextDataModule
from lincorr_lightning.errors import ConfigError, NonFiniteError
from lincorr_lightning.geometry import TokenGeometry
from lincorr_lightning.geometry.observables import shuffle_blocks
from lincorr_lightning.geometry.results import correlate
from lincorr_lightning.lm.config import LMConfig
from tests.geometry.conftest import naive_dimension, naive_overlap, naive_states
from tests.toys import quiet_trainer, read_table

SCALINGS = [2, 4]
KS = [1, 2, 5]
LEVELS = [0, 1, 2]


def run(lm, path, folder, n_texts=None, **options):
    settings = {"shuffles": LEVELS, "range_scalings": SCALINGS, "ks": KS} | options
    study = TokenGeometry(lm, **settings)
    data = TokenizedTextDataModule(study.lm, path, n_tokens=16, batch_size=3, n_texts=n_texts)
    quiet_trainer(folder).test(study, datamodule=data, verbose=False)
    return study


def command(small_lm, texts, folder):
    options = (
        "test --config token_geometry.yaml --data.n_tokens=16 --data.batch_size=3 "
        "--trainer.enable_progress_bar=false"
    )
    levels = f"--model.shuffles={LEVELS}", f"--model.range_scalings={SCALINGS}", f"--model.ks={KS}"
    paths = f"--model.lm.name_or_path={small_lm}", f"--data.texts={texts.path}"
    return [*options.split(), *levels, *paths, f"--trainer.default_root_dir={folder}"]


@pytest.fixture(scope="module")
def finished(small_lm, texts, tmp_path_factory):
    """A run of the study through the program: its profiles, its folder and its results."""
    cli = main(command(small_lm, texts, tmp_path_factory.mktemp("run")))
    return cli.model.profiles, Path(cli.trainer.log_dir), cli.model.results


def cube(profiles, key):
    """A column of the layers' table, ``(n_prompts, n_levels, n_layers)``."""
    n_layers, n_levels = (profiles.layers[name].nunique() for name in ("layer", "shuffle"))
    values = profiles.layers[key].to_numpy().reshape(-1, n_levels, n_layers)
    return values[:, :, :-1] if key.startswith("overlap") else values


def grid(profiles, key):
    """A column of the prompts' table, ``(n_prompts, n_levels)``."""
    return profiles.prompts[key].to_numpy().reshape(-1, profiles.prompts["shuffle"].nunique())


# -- numbers ---------------------------------------------------------------------------------------


def naive_prompt(small_lm, ids):
    """The numbers of a prompt by layer, and those of its next tokens."""
    hidden, logits = naive_states(small_lm, ids)
    probability = softmax(logits, axis=-1)
    units = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
    cosines = [(u @ u.T)[~np.eye(len(u), dtype=bool)] for u in units]
    layers = {f"dimension n2={n}": [naive_dimension(x, n) for x in hidden] for n in SCALINGS}
    layers |= {f"overlap k={k}": [naive_overlap(*hidden, k)] for k in KS}
    layers |= {"cosine_mean": np.mean(cosines, 1)}
    return layers, {
        "loss": -np.log([probability[i, token] for i, token in enumerate(ids[1:])]).mean(),
        "entropy": stats.entropy(probability, axis=1).mean(),
    }


def test_every_observable_of_every_prompt_at_every_level(finished, small_lm, texts):
    profiles, *_ = finished
    assert (len(profiles.prompts), profiles.n_skipped) == (30, 1)
    assert profiles.layers["layer"].unique().tolist() == [1, 2]
    assert profiles.prompts["corpus"].tolist()[::3] == texts.corpora
    for p, ids in enumerate(texts.tokens):
        for level in LEVELS:
            shuffled = torch.tensor(ids)[shuffle_blocks(16, level, [0, p, level])].tolist()
            assert sorted(shuffled) == sorted(ids) and (shuffled == ids) == (level == 0)
            layers, numbers = naive_prompt(small_lm, shuffled)
            for key, expected in layers.items():
                found = cube(profiles, key)[p, level]
                assert found == pytest.approx(np.array(expected), rel=1e-3, abs=1e-5), key
            for key, expected in numbers.items():
                assert grid(profiles, key)[p, level] == pytest.approx(expected, rel=1e-3), key


def test_correlations_over_prompts(finished):
    profiles, _, results = finished
    losses = grid(profiles, "loss")
    for row in results.values["dimension_loss"]:
        dimension = cube(profiles, f"dimension n2={row['n2']}")[:, row["shuffle"], row["layer"] - 1]
        loss = losses[:, row["shuffle"]]
        expected = np.corrcoef(np.log(dimension), np.log(loss))[0, 1]
        assert (row["pearson"], row["n"]) == (pytest.approx(expected), 10)
        rho = stats.spearmanr(dimension, loss)
        assert [row["spearman"], row["spearman_p"]] == pytest.approx([*rho])


def test_a_correlation_is_pearson_and_spearman_of_the_finite_pairs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=30)
    y = x + rng.normal(size=30)
    found = correlate(np.append(x, [np.nan, 1.0, np.inf]), np.append(y, [1.0, np.nan, 2.0]))
    assert found["n"] == 30
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [np.argsort(np.argsort(v)) for v in (x, y)]
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    z = np.arctanh(found["pearson"])
    half = 1.959964 / np.sqrt(27)
    assert [found["low"], found["high"]] == pytest.approx(np.tanh([z - half, z + half]))
    rhos = [np.corrcoef(x, rng.permutation(y))[0, 1] for _ in range(4000)]
    share = (np.abs(rhos) >= abs(found["pearson"])).mean()
    assert found["pearson_p"] == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("x", [[1, 2, 3], [1, 1, 1, 1], [1, 2, 3, np.nan], []])
def test_too_few_or_constant_points_have_no_correlation(x):
    y = [2, 1, 3, 4][: len(x)]
    assert correlate(x, y) == correlate(y, x) == {}


# -- files -----------------------------------------------------------------------------------------


def test_results_tables_and_logs(finished):
    profiles, folder, results = finished
    saved = json.loads((folder / "results.json").read_text())
    assert saved["study"] == "token_geometry"
    assert saved["settings"]["shuffles"] == LEVELS
    assert (saved["n_prompts"], saved["n_skipped"], saved["n_corpora"]) == (10, 1, 5)
    dimension, overlap, cosine = (
        cube(profiles, key).mean(0) for key in ("dimension n2=2", "overlap k=2", "cosine_mean")
    )
    loss, entropy = (grid(profiles, key).mean(0) for key in ("loss", "entropy"))
    level = saved["shuffles"][1]
    assert level["dimension"]["2"] == pytest.approx(dimension[1])
    assert level["overlap"]["2"] == pytest.approx(overlap[1])
    means = results.table("layers").frame.set_index(["observable", "setting", "shuffle", "layer"])
    values = cube(profiles, "dimension n2=4")[:, 2, 0]
    row = means.loc["dimension", "n2=4", 2, 1]
    assert [row["mean"], row["std"]] == pytest.approx([values.mean(), values.std()])
    rows = read_table(folder / "tables" / "profiles.csv")
    assert len(rows) == 10 * 3 * 2
    assert rows[0]["overlap k=2"] != "" and rows[1]["overlap k=2"] == ""
    for i, row in enumerate(read_table(folder / "tables" / "levels.csv")):
        expected = {
            "shuffle": i,
            "loss": loss[i],
            "entropy": entropy[i],
            "dimension": dimension[i, -1],
            "peak_dimension": dimension[i].max(),
            "overlap": overlap[i, -1],
            "lowest_overlap": overlap[i].min(),
            "cosine": cosine[i, -1],
            "peak_layer": 1 + dimension[i].argmax(),
        }
        assert {key: float(cell) for key, cell in row.items()} == pytest.approx(expected)
    (headline,) = [table for table in saved["tables"] if table["headline"]]
    assert "10 prompts of 16 tokens (1 too short)" in headline["caption"]
    for key, value in {"dimension_n2=2/layer_1": dimension[0, 0], "loss": loss[0]}.items():
        assert results.scalars[f"test/{key}"] == pytest.approx(value)


def test_the_figure_has_the_means(finished):
    profiles, folder, results = finished
    assert [p.stem for p in (folder / "figures").iterdir()] == ["profiles"]
    keys = ["dimension n2=2", "overlap k=2", "cosine_mean", "angle_mean"]
    for axes, key in zip(results.figure("profiles").axes, keys, strict=True):
        curves = [line.get_ydata() for line in axes.get_lines()]
        assert np.array(curves) == pytest.approx(cube(profiles, key).mean(0))


def test_any_dataloader_will_do_without_a_logger(finished, small_lm, texts, tmp_path):
    """Prompts may come from anywhere, in any batches, as long as they are in `TokenBatch`es."""
    profiles, *_ = finished
    tokens = torch.tensor(texts.tokens)
    names = [f"text {n}" for n in range(8)]
    batches = [
        TokenBatch(tokens[i : i + 4], names[i : i + 4], texts.corpora[i : i + 4], first=i)
        for i in (0, 4)
    ]
    study = TokenGeometry(LMConfig(small_lm), LEVELS, SCALINGS, KS)
    trainer = quiet_trainer(tmp_path, logger=False)
    trainer.test(study, DataLoader(batches, batch_size=None), verbose=False)
    assert study.profiles.prompts["prompt"].tolist()[::3] == names
    found = study.profiles.layers.drop(columns="prompt")
    expected = profiles.layers.drop(columns="prompt").head(len(found))
    assert_frame_equal(found, expected, rtol=1e-4, atol=1e-5)
    loss = grid(study.profiles, "loss")[:, 0].mean()
    assert float(trainer.callback_metrics["test/loss"]) == pytest.approx(loss, rel=1e-6)


def test_one_prompt_and_one_layer_are_enough(texts, tmp_path, make_lm):
    """No correlation, no overlap, and no crash."""
    lm = LMConfig(str(make_lm(tmp_path / "lm", num_hidden_layers=1)))
    study = run(lm, texts.path, tmp_path, n_texts=1)
    assert cube(study.profiles, "overlap k=2").size == 0
    assert all(row["pearson"] is None for row in study.results.values["dimension_loss"])
    for figure in study.results.figures:
        assert figure.png


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffles": [0, 3]}, r"level 3.* data\.n_tokens"),
        ({"range_scalings": [2, 16]}, r"model\.range_scalings is 16"),
        ({"range_scalings": [3]}, r"model\.range_scalings has 3.*even"),
        ({"ks": [16]}, r"model\.ks is 16"),
        ({"shuffles": [1, 1]}, r"model\.shuffles is \[1, 1\]"),
    ],
)
def test_settings_that_do_not_fit(small_lm, texts, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run(LMConfig(small_lm), texts.path, tmp_path, **options)


@pytest.mark.parametrize(
    ("weight", "value", "name"),
    [
        ("lm_head.weight", torch.nan, "logits"),
        ("lm_head.weight", 1e300, "logits"),
        ("model.norm.weight", 1e200, "hidden states of layer 2"),
    ],
)
def test_extreme_states_are_named(weight, value, name, texts, make_lm, tmp_path):
    folder = make_lm(tmp_path / "lm", architecture="llama", dtype="float64")
    path = folder / "model.safetensors"
    weights = {key: tensor.double() for key, tensor in load_file(path).items()}
    weights[weight][3] = value
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(NonFiniteError, match=f"the {name} of the LM .* for prompt .*texts"):
        run(LMConfig(str(folder), dtype="auto"), texts.path, tmp_path)
