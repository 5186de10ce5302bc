"""The study of knowledge geometry, against numpy, scikit-learn and the probe."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from lincorr_lightning.cli import main
from lincorr_lightning.data.subjects import SubjectBatch
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.geometry.knowledge_geometry import KnowledgeGeometry
from lincorr_lightning.lm.config import LMConfig
from tests.geometry.conftest import naive_dimension, naive_overlap, naive_states
from tests.launching import run_in_two
from tests.toys import mean_r, read_table

TEMPLATES = {
    "city": "{} lives in the city of", "country": "{} lives in the country of",
    "color": "{}’s favorite color is",
}  # fmt: skip
KS, SCALINGS = [2, 5], [2, 8]


def command(small_lm, folder, *more):
    return [
        "test", "--config", "knowledge_geometry.yaml", f"--model.lm.name_or_path={small_lm}",
        "--data.n_subjects=180", "--data.batch_size=20", f"--model.ks={KS}",
        f"--model.range_scalings={SCALINGS}", "--model.n_permutations=50",
        f"--trainer.default_root_dir={folder}", "--trainer.enable_progress_bar=false", *more,
    ]  # fmt: skip


NAMED = ["--model.knowledge=[city,country,color]", "--model.ridge=0"]


@pytest.fixture(scope="module")
def probe(small_lm, tmp_path_factory):
    """Folder of a finished probe."""
    cli = main(["fit", "--config", "linear_probe.yaml", f"--model.lm.name_or_path={small_lm}",
                "--model.knowledge=[city,country,color]", "--data.n_subjects=180",
                "--model.ridge=0", f"--trainer.default_root_dir={tmp_path_factory.mktemp('probe')}",
                "--trainer.enable_progress_bar=false"])  # fmt: skip
    return Path(cli.trainer.log_dir)


@pytest.fixture(scope="module")
def finished(small_lm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    cli = main(command(small_lm, folder, *NAMED))
    return cli, Path(cli.trainer.log_dir)


def states(small_lm, name, subjects):
    """Last tokens' hidden states, ``(n_layers, n_prompts, d)``, and logits; one by one."""
    prompts = [TEMPLATES[name].format(subject) for subject in subjects]
    rows = AutoTokenizer.from_pretrained(small_lm)(prompts)["input_ids"]
    hidden, logits = zip(*(naive_states(small_lm, ids) for ids in rows), strict=True)
    return np.stack([one[:, -1] for one in hidden], 1), np.stack([one[-1] for one in logits])


def test_closeness_of_all_pairs(finished, small_lm):
    cli, _ = finished
    found, held_out = cli.model.closeness, cli.datamodule.halves["test"]
    assert (found.n_subjects, list(found.layers)) == (90, [1, 2])
    clouds = {name: states(small_lm, name, held_out)[0] for name in TEMPLATES}
    for name, cloud in clouds.items():
        for layer in range(2):
            for i, n2 in enumerate(SCALINGS):
                expected = naive_dimension(cloud[layer], n2)
                assert found.dimension[name][layer, i] == pytest.approx(expected, rel=2e-3)
    for (a, b), values in found.overlap.items():
        for layer in range(2):
            for i, k in enumerate(KS):
                shared = naive_overlap(clouds[a][layer], clouds[b][layer], k)
                assert values[layer, i] == pytest.approx(shared, abs=0.01)
    assert list(found.overlap) == [("city", "country"), ("city", "color"), ("country", "color")]
    # lives in the city of | lives in the country of: "’s favorite color is" shares nothing.
    assert found.wording == {
        ("city", "country"): 4 / 6, ("city", "color"): 0, ("country", "color"): 0,
    }  # fmt: skip
    difference = found.difference_matrix(0)[0, 2]
    logs = [np.log(found.dimension[n][:, 0]) for n in ("city", "color")]
    assert difference == pytest.approx(np.abs(logs[0] - logs[1]).mean())


def test_r_is_that_of_scikit_learn(finished, small_lm):
    cli, _ = finished
    halves, layout = cli.datamodule.halves, cli.model.layout
    logits = {
        half: {n: states(small_lm, n, subjects)[1][:, layout.domains[n].token_ids]
               for n in ("city", "color")}
        for half, subjects in halves.items()
    }  # fmt: skip
    fitted = LinearRegression().fit(logits["fit"]["city"], logits["fit"]["color"])
    predicted, true = fitted.predict(logits["test"]["city"]), logits["test"]["color"]
    found = {score.pair: score.label_mean for score in cli.model.closeness.scores}
    assert found["city", "color"] == pytest.approx(mean_r(predicted, true), abs=1e-5)


def test_random_words_and_the_vocabulary_stand_beside_r_and_hits(finished, small_lm):
    """By scikit-learn on logits of the same words; a mean over other draws of them."""
    cli, folder = finished
    halves, layout, rng = cli.datamodule.halves, cli.model.layout, np.random.default_rng(0)
    logits = {
        (half, name): states(small_lm, name, subjects)[1]
        for half, subjects in halves.items()
        for name in ("city", "country")
    }

    def r_of(source, x, target, y):
        fitted = LinearRegression().fit(logits["fit", source][:, x], logits["fit", target][:, y])
        return mean_r(
            fitted.predict(logits["test", source][:, x]), logits["test", target][:, y]
        ), fitted.coef_

    city, country = (layout.domains[name].token_ids for name in ("city", "country"))
    words = layout.words["city"]
    draws = [[words[i] for i in rng.permutation(len(words))[: len(city)]] for _ in range(40)]
    r = [r_of("city", draw, "country", country)[0] for draw in draws]
    (score,) = (s for s in cli.model.closeness.scores if s.pair == ("city", "country"))
    assert score.random_label_mean == pytest.approx(np.mean(r), abs=0.03)
    own, weight = r_of("city", city, "country", country)
    assert score.excess_over_random == pytest.approx(own - np.mean(r), abs=0.03)
    right = layout.references["city", "country"]
    baselines = score.precision["baselines"]
    _, other = r_of("city", city, "city", country)
    judged = [i for i in range(right.shape[1]) if right[:, i].any()]
    for weights, hit in ((weight, score.precision["influenced"]["1"]),
                         (other, baselines["gaussian_states"]["1"])):  # fmt: skip
        assert hit == pytest.approx(np.mean([right[weights[:, i].argmax(), i] for i in judged]))
    assert baselines["constant"]["1"] == pytest.approx(right.sum(1).max() / len(judged))
    assert score.best_baseline_1 == max(one["1"] for one in baselines.values())
    (row,) = (row for row in read_table(folder / "tables" / "pairs.csv")
              if (row["a"], row["b"]) == ("city", "country"))  # fmt: skip
    both = [score.random_label_mean for score in cli.model.closeness.scores
            if {*score.pair} == {"city", "country"}]  # fmt: skip
    assert float(row["random_label_mean"]) == pytest.approx(np.mean(both))


def test_files(finished):
    cli, folder = finished
    results = json.loads((folder / "results.json").read_text())
    assert results["study"] == "knowledge_geometry"
    assert results["chance_overlap"] == {"2": 2 / 89, "5": 5 / 89}
    rows = read_table(folder / "tables" / "pairs.csv")
    assert [(row["a"], row["b"]) for row in rows] == list(cli.model.closeness.overlap)
    r = {score.pair: score.label_mean for score in cli.model.closeness.scores}
    for row in rows:
        both = r[row["a"], row["b"]], r[row["b"], row["a"]]
        assert float(row["r"]) == pytest.approx(np.mean(both))
        expected = cli.model.closeness.overlap[row["a"], row["b"]][:, 1].mean()
        assert float(row["overlap k=5"]) == pytest.approx(expected)
    assert rows[0]["hit1"] != "" and rows[1]["hit1"] == ""  # city->color has no reference
    # Three kinds of knowledge are too few for a test.
    assert all(test["spearman"] is None for test in results["tests"])
    assert not (folder / "tables" / "closeness.csv").exists()
    pictures = {path.name for path in (folder / "figures").iterdir()}
    assert pictures == {"closeness.png", "rho_by_layer.png"}


def test_beside_a_finished_probe(finished, probe, small_lm, tmp_path):
    """Its scores are taken as they are, with its control; clouds are the same."""
    _, alone = finished
    cli = main(command(small_lm, tmp_path, f"--model.probe={probe}"))
    scores = [score.to_json() for score in cli.model.closeness.scores]
    assert scores == json.loads((probe / "results.json").read_text())["pairs"]
    folders = (alone, Path(cli.trainer.log_dir))
    results = [json.loads((folder / "results.json").read_text()) for folder in folders]
    for ours, theirs in zip(*(r["pairs"] for r in results), strict=True):
        assert ours["overlap"] == theirs["overlap"]
        assert ours["r"] == pytest.approx(theirs["r"], abs=1e-6)
        for key in ("random_label_mean", "best_baseline_1"):  # other draws of words
            assert ours[key] == pytest.approx(theirs[key], abs=0.03) or theirs[key] is None
    scores = {"r", "random_label_mean", "excess_over_random", "hit1", "best_baseline_1"}
    for each, more in zip(results, ((), ("excess",)), strict=True):
        assert {test["against"] for test in each["tests"]} == {*scores, *more}


@pytest.mark.slow
def test_correlated_knowledge_of_the_tiny_world_is_close(tmp_path):
    """The world's own graph: who lives where goes with the country, not with the pet."""
    cli = main(["test", "--config", "knowledge_geometry.yaml", "--data.n_subjects=600",
                "--model.knowledge=[city,country,language,landmark,company,ceo,job,pet,color]",
                f"--trainer.default_root_dir={tmp_path}", "--model.n_permutations=5040",
                "--trainer.enable_progress_bar=false"])  # fmt: skip
    found = cli.model.closeness
    chance = 10 / 299
    first, overlap = (
        {pair: values[layer, found.middle_k] for pair, values in found.overlap.items()}
        for layer in (0, -1)
    )
    related = [("city", "country"), ("country", "language"), ("company", "ceo")]
    assert min(overlap[pair] for pair in related) > 0.4
    # It takes layers to get there.
    assert min(first[pair] for pair in related) < 0.3
    assert max(overlap[pair] for pair in (("city", "pet"), ("ceo", "color"))) < 0.2
    assert overlap["city", "ceo"] < 3 * chance
    test = found.test("overlap", "k=10", "r")
    assert (test.n_pairs, test.n_permutations) == (36, 5040)
    assert test.spearman > 0.5 and test.p < 0.05
    row = cli.model.results.table("closeness").frame.set_index("closeness").loc["overlap k=10"]
    assert (row["r"], row["r p"]) == (test.spearman, test.p)
    assert row["r given wording"] is not None
    logged = float(cli.trainer.callback_metrics["test/overlap_k=10/r"])
    assert logged == pytest.approx(test.spearman)


@pytest.mark.slow
def test_two_processes_give_one_process_s_numbers(finished, small_lm, tmp_path):
    arguments = [*command(small_lm, tmp_path, *NAMED), "--config", "trainer/ddp_cpu.yaml"]
    done = run_in_two(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = tmp_path.glob("knowledge_geometry/*/results.json")
    one, two = (json.loads((f / "results.json").read_text()) for f in (finished[1], path.parent))
    assert one["dimension"] == two["dimension"]
    for ours, theirs in zip(two["pairs"], one["pairs"], strict=True):
        assert ours["overlap"] == theirs["overlap"]
        assert ours["r"] == pytest.approx(theirs["r"], abs=1e-9)


# -- refusals --------------------------------------------------------------------------------------


def test_a_folder_that_is_no_probe(small_lm, finished, tmp_path):
    with pytest.raises(ConfigError, match="holds no finished run"):
        KnowledgeGeometry(LMConfig(small_lm), probe=str(tmp_path))
    with pytest.raises(ConfigError, match="is not a run of LinearProbe"):
        KnowledgeGeometry(LMConfig(small_lm), probe=str(finished[1]))


def test_a_probe_of_another_lm(probe, make_lm, tmp_path):
    other = make_lm(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"is of .*small_lm.*, whose weights differs from that"):
        main(command(str(other), tmp_path, f"--model.probe={probe}"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--model.range_scalings=[90]", r"model\.range_scalings has \[90\], with 90 points"),
        ("--data.test_on=held_out", r"batches are of the held-out half\. Set data\.test_on to all"),
    ],
)
def test_settings_that_do_not_fit(small_lm, tmp_path, option, message):
    with pytest.raises(ConfigError, match=message):
        main(command(small_lm, tmp_path, *NAMED, option))


def test_a_plain_dataloader_will_do(finished, small_lm, make_trainer):
    """Subjects may come from anywhere, as long as they are in `SubjectBatch`es."""
    cli, _ = finished
    batches = [
        SubjectBatch(subjects[first : first + 50], first=first, half=half)
        for half, subjects in cli.datamodule.halves.items()
        for first in (0, 50)
    ]
    settings = {"knowledge": list(TEMPLATES), "range_scalings": SCALINGS, "ks": KS}
    study = KnowledgeGeometry(LMConfig(small_lm), **settings)
    make_trainer().test(study, DataLoader(batches, batch_size=None), verbose=False)
    for pair, values in cli.model.closeness.overlap.items():
        assert study.closeness.overlap[pair] == pytest.approx(values, abs=0.01)
    for ours, theirs in zip(study.closeness.scores, cli.model.closeness.scores, strict=True):
        assert ours.label_mean == pytest.approx(theirs.label_mean, abs=1e-6)


def test_too_few_distinct_points(small_lm, tmp_path):
    """Unknown subjects all have the same hidden state."""
    (tmp_path / "x.txt").write_text("\n".join(f"unknown{i}" for i in range(60)))
    with pytest.raises(SubjectsError, match=r"the cloud of city has 1 distinct points of 30 in "
                                          r"layer 1; range scaling 8 needs 9"):  # fmt: skip
        main(command(small_lm, tmp_path, *NAMED, f"--data.subjects_file={tmp_path / 'x.txt'}",
                     "--data.n_subjects=60"))  # fmt: skip


@pytest.mark.parametrize(
    "limit", ["limit_test_batches=2", "limit_test_batches=0.5", "fast_dev_run=true"]
)
def test_a_part_of_the_subjects_is_refused(limit, small_lm, tmp_path):
    """The held-out ones come last: there would be none."""
    with pytest.raises(ConfigError, match=r"limit_test_batches is (1|2|0\.5); it must be 1\.0"):
        main(command(small_lm, tmp_path, *NAMED, f"--trainer.{limit}"))
