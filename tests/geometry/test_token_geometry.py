"""The study of token geometry, against numpy and scipy, and from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from safetensors.torch import load_file, save_file
from scipy import stats
from scipy.special import log_softmax, softmax
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from lincorr_lightning.cli import main
from lincorr_lightning.data.texts import TokenBatch, TokenizedTextDataModule
from lincorr_lightning.errors import ConfigError, NonFiniteError
from lincorr_lightning.geometry import TokenGeometry
from lincorr_lightning.geometry.observables import shuffle_blocks
from lincorr_lightning.lm.config import LMConfig
from tests.geometry.conftest import naive_dimension, naive_overlap, naive_states
from tests.launching import run_in_two
from tests.toys import read_table

SCALINGS, KS = [2, 4], [1, 2, 5]


def run(small_lm, texts, trainer, **options):
    data = {"n_tokens": 16, "batch_size": 3} | options.pop("data", {})
    settings = {"shuffles": [0, 1, 2], "range_scalings": SCALINGS, "ks": KS}
    study = TokenGeometry(LMConfig(small_lm), **settings | options)
    data = TokenizedTextDataModule(study.lm, texts.path, **data)
    trainer.test(study, datamodule=data, verbose=False)
    return study


@pytest.fixture(scope="module")
def finished(small_lm, texts, tmp_path_factory):
    """A run of the study through the program: its profiles, its folder and its results."""
    folder = tmp_path_factory.mktemp("run")
    cli = main(["test", *command(small_lm, texts, folder)])
    return cli.model.profiles, Path(cli.trainer.log_dir), cli.model.results


def command(small_lm, texts, folder):
    return [
        "--config", "token_geometry.yaml", f"--model.lm.name_or_path={small_lm}",
        f"--data.texts={texts.path}", "--data.n_tokens=16", "--data.batch_size=3",
        "--model.shuffles=[0,1,2]", f"--model.range_scalings={SCALINGS}", f"--model.ks={KS}",
        "--model.embedding_layer=false", f"--trainer.default_root_dir={folder}",
        "--trainer.enable_progress_bar=false",
    ]  # fmt: skip


def cube(profiles, key):
    """A column of the layers' table, ``(n_prompts, n_levels, n_layers)``."""
    n_layers, n_levels = (profiles.layers[name].nunique() for name in ("layer", "shuffle"))
    values = profiles.layers[key].to_numpy().reshape(-1, n_levels, n_layers)
    return values[:, :, :-1] if key.startswith("overlap") else values


def grid(profiles, key):
    """A column of the prompts' table, ``(n_prompts, n_levels)``."""
    return profiles.prompts[key].to_numpy().reshape(-1, profiles.prompts["shuffle"].nunique())


# -- numbers ---------------------------------------------------------------------------------------


def test_every_observable_of_every_prompt(finished, small_lm, texts):
    profiles, *_ = finished
    assert (len(profiles.prompts), profiles.n_skipped) == (30, 1)
    assert profiles.layers["layer"].unique().tolist() == [1, 2]
    assert profiles.prompts["corpus"].tolist()[::3] == texts.corpora
    loss, entropy = grid(profiles, "loss"), grid(profiles, "entropy")
    for p, ids in enumerate(texts.tokens):
        hidden, logits = naive_states(small_lm, ids)
        probability = softmax(logits, axis=-1)
        for layer in range(2):
            for n2 in SCALINGS:
                expected = naive_dimension(hidden[layer], n2)
                found = cube(profiles, f"dimension n2={n2}")[p, 0, layer]
                assert found == pytest.approx(expected, rel=1e-3)
            u = hidden[layer] / np.linalg.norm(hidden[layer], axis=1, keepdims=True)
            cosines = (u @ u.T)[~np.eye(16, dtype=bool)]
            for key, expected in (("mean", cosines.mean()), ("std", cosines.std())):
                found = cube(profiles, f"cosine_{key}")[p, 0, layer]
                assert found == pytest.approx(expected, abs=1e-5)
        for k in KS:
            found = cube(profiles, f"overlap k={k}")[p, 0, 0]
            assert found == pytest.approx(naive_overlap(*hidden, k), abs=1e-12)
        expected = -np.log([probability[i, ids[i + 1]] for i in range(15)]).mean()
        assert loss[p, 0] == pytest.approx(expected, abs=1e-5)
        expected = stats.entropy(probability, axis=1).mean()
        assert entropy[p, 0] == pytest.approx(expected, abs=1e-5)
        expected = naive_dimension(probability, 2)
        found = grid(profiles, "logits_dimension n2=2")[p, 0]
        assert found == pytest.approx(expected, rel=1e-3)


def test_shuffled_prompts_are_read_as_such(finished, small_lm, texts):
    profiles, *_ = finished
    for p, ids in enumerate(texts.tokens):
        for i in (1, 2):
            shuffled = torch.tensor(ids)[shuffle_blocks(16, i, [0, p, i])].tolist()
            assert sorted(shuffled) == sorted(ids)
            blocks = {tuple(ids[at : at + 4]) for at in range(0, 16, 4)}
            assert (i == 2) or {tuple(shuffled[at : at + 4]) for at in range(0, 16, 4)} == blocks
            hidden, _ = naive_states(small_lm, shuffled)
            expected = naive_dimension(hidden[1], 2)
            found = cube(profiles, "dimension n2=2")[p, i, 1]
            assert found == pytest.approx(expected, rel=1e-3)
    loss = grid(profiles, "loss")
    assert (loss[:, 0] != loss[:, 2]).all()


def test_correlations_over_prompts(finished):
    profiles, _, results = finished
    loss = grid(profiles, "loss")
    for row in results.values["dimension_loss"]:
        level, layer = row["shuffle"], row["layer"] - 1
        x = np.log(cube(profiles, f"dimension n2={row['n2']}")[:, level, layer])
        assert row["pearson"] == pytest.approx(np.corrcoef(x, np.log(loss[:, level]))[0, 1])
        assert row["n"] == 10


def test_the_spearman_table_of_both_kinds_of_clouds(small_lm, make_trainer, tmp_path):
    """Six corpora of nine prompts each: their clouds are of the prompts' last tokens."""
    rng = np.random.default_rng(1)
    rows, last, losses = [], {}, {}
    tokenizer = AutoTokenizer.from_pretrained(small_lm)
    for c in range(6):
        for _ in range(9):
            words = [f"name{n}" for n in rng.choice(60 * (c + 1), 8, replace=False)]
            rows.append(json.dumps({"text": " ".join(words), "corpus": f"c{c}"}))
            ids = tokenizer.convert_tokens_to_ids(words)
            hidden, logits = naive_states(small_lm, ids)
            last.setdefault(c, []).append(hidden[:, -1])
            loss = -log_softmax(logits, axis=-1)[range(7), ids[1:]].mean()
            losses.setdefault(c, []).append(loss)
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    study = TokenGeometry(LMConfig(small_lm), [0], [2, 4], [2])
    path = str(tmp_path / "t.jsonl")
    data = TokenizedTextDataModule(study.lm, path, n_tokens=8, batch_size=5)
    make_trainer().test(study, datamodule=data, verbose=False)
    found = {
        (row["cloud"], row["layer"], row["n2"]): (row["spearman"], row["p"], row["n"])
        for row in study.results.values["spearman"]
    }
    for layer in (1, 2):
        for n2 in (2, 4):
            clouds = [np.stack(last[c])[:, layer - 1] for c in range(6)]
            dimension = [naive_dimension(cloud, n2) for cloud in clouds]
            expected = stats.spearmanr(dimension, [np.mean(losses[c]) for c in range(6)])
            wanted = (expected.statistic, expected.pvalue, 6)
            assert found["prompts", layer, n2] == pytest.approx(wanted)
            assert found["tokens", layer, n2][2] == 54
    all_losses = [loss for each in losses.values() for loss in each]
    for row in study.results.values["dimension_loss"]:
        frame = study.profiles.layers[study.profiles.layers["layer"] == row["layer"]]
        expected = stats.spearmanr(frame[f"dimension n2={row['n2']}"], all_losses)
        wanted = (expected.statistic, expected.pvalue, 54)
        assert found["tokens", row["layer"], row["n2"]] == pytest.approx(wanted)
    assert study.profiles.corpora["corpus"].nunique() == 6


def test_embedding_layer_adds_layer_0(small_lm, texts, make_trainer):
    profiles = run(small_lm, texts, make_trainer(), embedding_layer=True, shuffles=[0, 2]).profiles
    assert profiles.layers["layer"].unique().tolist() == [0, 1, 2]
    # A cloud of embeddings has no order.
    dimension = cube(profiles, "dimension n2=2")
    assert dimension[:, 0, 0] == pytest.approx(dimension[:, 1, 0])
    assert np.isfinite(cube(profiles, "overlap k=5")).all()


# -- files -----------------------------------------------------------------------------------------


def test_results_tables_and_logs(finished):
    profiles, folder, results = finished
    saved = json.loads((folder / "results.json").read_text())
    assert saved["study"] == "token_geometry"
    assert saved["settings"]["shuffles"] == [0, 1, 2]
    assert (saved["n_prompts"], saved["n_skipped"], saved["n_corpora"]) == (10, 1, 5)
    dimension, overlap, cosine = (
        cube(profiles, key).mean(0) for key in ("dimension n2=2", "overlap k=2", "cosine_mean")
    )
    loss, entropy = (grid(profiles, key).mean(0) for key in ("loss", "entropy"))
    level = saved["shuffles"][1]
    assert level["shuffle"] == 1
    assert level["dimension"]["2"] == pytest.approx(dimension[1])
    assert level["overlap"]["2"] == pytest.approx(overlap[1])
    means = results.table("layers").frame.set_index(["observable", "setting", "shuffle", "layer"])
    values, row = cube(profiles, "dimension n2=4")[:, 2, 0], means.loc["dimension", "n2=4", 2, 1]
    assert [row["mean"], row["std"]] == pytest.approx([values.mean(), values.std()])
    rows = read_table(folder / "tables" / "profiles.csv")
    assert len(rows) == 10 * 3 * 2
    assert rows[0]["overlap k=2"] != "" and rows[1]["overlap k=2"] == ""
    assert len(read_table(folder / "tables" / "prompts.csv")) == 30
    for i, row in enumerate(read_table(folder / "tables" / "levels.csv")):
        expected = {
            "shuffle": i, "loss": loss[i], "entropy": entropy[i], "dimension": dimension[i, -1],
            "peak_dimension": dimension[i].max(), "overlap": overlap[i, -1],
            "lowest_overlap": overlap[i].min(), "cosine": cosine[i, -1],
            "peak_layer": 1 + dimension[i].argmax(),
        }  # fmt: skip
        assert {key: float(cell) for key, cell in row.items()} == pytest.approx(expected)
    (headline,) = [one for one in saved["tables"] if one["headline"]]
    assert headline["name"] == "levels"
    assert "10 prompts of 16 tokens (1 too short)" in headline["caption"]
    logged = {"loss": loss[0], "dimension_n2=2/layer_1": dimension[0, 0],
              "cosine_mean/layer_2": cosine[0, 1]}  # fmt: skip
    assert logged == pytest.approx({key: results.scalars[f"test/{key}"] for key in logged})


def test_figures_are_means_and_correlations(finished):
    profiles, folder, results = finished
    assert {p.stem for p in (folder / "figures").iterdir()} == {"dimension_loss", "profiles"}
    figure = results.figure("profiles").draw()
    keys = ["dimension n2=2", "overlap k=2", "cosine_mean", "angle_mean"]
    for axes, key in zip(figure.axes, keys, strict=True):
        curves = [line.get_ydata() for line in axes.get_lines()]
        assert np.array(curves) == pytest.approx(cube(profiles, key).mean(0))
    x, y = np.log(cube(profiles, "dimension n2=2")[:, 0]), np.log(grid(profiles, "loss")[:, 0])
    expected = pytest.approx([np.corrcoef(column, y)[0, 1] for column in x.T])
    lines = results.figure("dimension_loss").draw().axes[0].get_lines()
    assert any(list(line.get_ydata()) == expected for line in lines)


def test_any_dataloader_will_do_without_a_logger(finished, small_lm, texts, make_trainer):
    """Prompts may come from anywhere, in any batches, as long as they are in `TokenBatch`es."""
    profiles, *_ = finished
    batches = [
        TokenBatch(torch.tensor(texts.tokens[i : i + 4]), [f"text {n}" for n in range(i, i + 4)],
                   texts.corpora[i : i + 4], first=i)
        for i in (0, 4)
    ]  # fmt: skip
    study = TokenGeometry(LMConfig(small_lm), [0, 1, 2], SCALINGS, KS)
    trainer = make_trainer(logger=False)
    trainer.test(study, DataLoader(batches, batch_size=None), verbose=False)
    assert study.profiles.prompts["prompt"].tolist()[::3] == [f"text {n}" for n in range(8)]
    for name in ("prompts", "layers"):
        found, expected = (
            getattr(one, name).drop(columns="prompt") for one in (study.profiles, profiles)
        )
        assert_frame_equal(found, expected.head(len(found)), rtol=1e-4, atol=1e-5)
    loss = grid(study.profiles, "loss")[:, 0].mean()
    assert float(trainer.callback_metrics["test/loss"]) == pytest.approx(loss, rel=1e-6)


def test_one_prompt_and_one_layer_are_enough(texts, make_trainer, tmp_path, make_lm):
    """No correlation, no overlap, and no crash."""
    folder = str(make_lm(tmp_path / "lm", num_hidden_layers=1))
    study = run(folder, texts, make_trainer(), data={"n_texts": 1})
    assert cube(study.profiles, "overlap k=2").size == 0
    assert all(entry["pearson"] is None for entry in study.results.values["dimension_loss"])


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(finished, small_lm, texts, tmp_path):
    """Ten prompts in batches of four: the second rank has one batch of padding."""
    _, alone, _ = finished
    arguments = ["test", *command(small_lm, texts, tmp_path), "--config", "trainer/ddp_cpu.yaml"]
    done = run_in_two(*arguments, "--data.batch_size=4")
    assert done.returncode == 0, done.stderr[-3000:]
    again = main(["test", *command(small_lm, texts, tmp_path / "one"), "--data.batch_size=4"])
    (path,) = tmp_path.glob("token_geometry/*/results.json")
    folders = (Path(again.trainer.log_dir), path.parent)
    one, two = (json.loads((folder / "results.json").read_text()) for folder in folders)
    for found in (one, two):
        found["settings"].pop("trainer", None)
    assert one == two
    for name in ("prompts.csv", "profiles.csv"):
        ours, other = (folder / "tables" / name for folder in folders)
        assert ours.read_text() == other.read_text()
    assert len(list(path.parent.glob("events.out.tfevents.*"))) == 1
    assert json.loads((alone / "results.json").read_text())["n_prompts"] == two["n_prompts"] == 10


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffles": [0, 3]}, r"level 3, which cuts a prompt into 64 .* data\.n_tokens, 16"),
        ({"range_scalings": [2, 16]}, r"model\.range_scalings has \[16\], with 16 points"),
        ({"shuffles": [1, 1]}, r"model\.shuffles is \[1, 1\]"),
    ],
)
def test_settings_that_do_not_fit(small_lm, texts, make_trainer, options, message):
    with pytest.raises(ConfigError, match=message):
        run(small_lm, texts, make_trainer(), **options)


@pytest.mark.parametrize(
    ("weight", "value", "message"),
    [
        ("lm_head.weight", torch.nan, "the logits of the LM .* are NaN, infinite or too large"),
        ("lm_head.weight", 1e300, "the logits of the LM"),
        ("model.norm.weight", 1e200, "the hidden states of layer 2 of the LM .* too large"),
    ],
)
def test_extreme_states_are_named(weight, value, message, texts, make_lm, make_trainer, tmp_path):
    folder = make_lm(tmp_path / "lm", architecture="llama", dtype="float64")
    path = folder / "model.safetensors"
    weights = {name: one.double() for name, one in load_file(path).items()}
    weights[weight][3] = value
    save_file(weights, path, {"format": "pt"})
    study = TokenGeometry(LMConfig(str(folder), dtype="auto"), range_scalings=SCALINGS, ks=KS)
    data = TokenizedTextDataModule(study.lm, texts.path, n_tokens=16)
    with pytest.raises(NonFiniteError, match=f"{message}.* for prompt "):
        make_trainer().test(study, datamodule=data)
