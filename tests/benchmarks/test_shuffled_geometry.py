"""Tables of shuffled texts, against scipy's t-test and the means that the run wrote itself."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks.real_lms import shuffled_geometry as geometry


@pytest.fixture(scope="module")
def profiles() -> dict[str, np.ndarray]:
    with np.load(geometry.FILE) as file:
        return {name: file[name].astype(float) for name in geometry.KEPT}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, str]]]:
    found = {}
    for name, table in geometry.tables().items():
        lines = [[x.strip() for x in line.split("|")[1:-1]] for line in table.splitlines()]
        found[name] = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    return found


def test_means_are_those_of_the_run(profiles: dict[str, np.ndarray]) -> None:
    run = json.loads((geometry.FILE.with_suffix(".json")).read_text())["results"]["shuffles"]
    for level, one in enumerate(run):
        for n2 in geometry.SCALES:
            own = profiles[f"dimension n2={n2}"][:, level].mean(0)
            assert own == pytest.approx(one["dimension"][str(n2)], rel=1e-3)


def test_layers_beyond_the_error_are_those_of_a_t_test(
    profiles: dict[str, np.ndarray], rows: dict[str, list[dict[str, str]]]
) -> None:
    for level in (1, 4, 5):
        counts = []
        for n2 in geometry.SCALES:
            x = profiles[f"dimension n2={n2}"]
            test = stats.ttest_rel(x[:, level], x[:, 0])
            clear = test.pvalue < 0.05
            counts.append(
                f"{(clear & (test.statistic > 0)).sum()}, {(clear & (test.statistic < 0)).sum()}"
            )
        row = rows["geometry_shuffled"][level]
        assert row["beyond the error: higher, lower"] == " / ".join(counts)
        test = stats.ttest_rel(*(profiles["overlap k=2"][:, at, :29] for at in (level, 0)))
        lower, higher = (
            ((test.pvalue < 0.05) & (sign * test.statistic > 0)).sum() for sign in (-1, 1)
        )
        assert row["overlap beyond the error: lower, higher"] == f"{lower}, {higher}"
        means = (profiles[f"dimension n2={n2}"].mean(0) for n2 in geometry.SCALES)
        higher = " / ".join(
            str(sum(a > b for a, b in zip(x[level], x[0], strict=True))) for x in means
        )
        assert row["layers with higher ID, by n2"] == higher
        x = profiles["dimension n2=2"][:, :, int(row["layer"]) - 1]
        low, high = stats.ttest_rel(x[:, level], x[:, 0]).confidence_interval()
        mean, half = map(float, row["ID, less that of S = 0"].split(" ± "))
        assert (mean, half) == pytest.approx(((low + high) / 2, (high - low) / 2), abs=0.006)


def test_peaks(rows: dict[str, list[dict[str, str]]], profiles: dict[str, np.ndarray]) -> None:
    for row in rows["geometry_scales"]:
        mean = profiles[f"dimension n2={row['n2']}"][:, 0].mean(0)
        assert int(row["peak layer"]) == 1 + max(range(30), key=lambda i: mean[i])
        assert row["ID, by level of shuffling"].startswith(f"{max(mean):.2f} / ")


def test_correlations_with_the_loss(rows: dict[str, list[dict[str, str]]]) -> None:
    run = json.loads(geometry.FILE.with_suffix(".json").read_text())["results"]
    for row in rows["geometry_loss"]:
        own = [x for x in run["dimension_loss"] if x["n2"] == int(row["n2"]) and not x["shuffle"]]
        (at_peak,) = (x for x in own if x["layer"] == int(row["peak layer"]))
        shown = "{pearson:.2f} ({low:.2f} to {high:.2f})".format(**at_peak)
        assert row["r of log ID and log loss there"] == shown
        clear = sum(x["pearson_p"] < 0.01 for x in own)
        assert row["p \\< .01 in: all / news"].startswith(f"{clear} / ")


def test_correlations_within_a_corpus_have_its_texts_alone() -> None:
    rng, corpora = np.random.default_rng(0), np.repeat(["long", "short"], (40, 12))
    layers = rng.normal(size=(52, 1, 3)) + 5 * (corpora == "short")[:, None, None]
    profiles = {f"dimension n2={n2}": np.exp(layers) for n2 in geometry.SCALES}
    profiles["loss"] = np.exp(rng.normal(size=(52, 1)) + 5 * (corpora == "short")[:, None])
    frame = pd.DataFrame(
        {"corpus": corpora, "x": layers[:, 0, 0], "y": np.log(profiles["loss"][:, 0])}
    )
    for _, peak, *cells, _ in geometry.correlations_with_loss(profiles, corpora):
        frame["x"] = layers[:, 0, peak - 1]
        within = frame.groupby("corpus")[["x", "y"]].corr().x.xs("y", level=1)
        expected = [frame.x.corr(frame.y), within["long"], within["short"]]
        assert [float(cell.split(" (")[0]) for cell in cells] == pytest.approx(expected, abs=0.005)
        assert expected[0] > 0.8 > max(expected[1:])


def test_observables_are_kept_by_text_level_and_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, sizes = np.random.default_rng(0), (3, 2, 4)
    values = {name: rng.normal(size=sizes) for name in geometry.KEPT}
    frame = pd.DataFrame(
        {"prompt": "abc"[i], "shuffle": j, "layer": k + 1}
        | {n: x[i, j, k] for n, x in values.items()}
        for i, j, k in np.ndindex(sizes)
    )
    (tmp_path / "tables").mkdir()
    frame.sample(frac=1, random_state=0).to_csv(tmp_path / "tables" / "profiles.csv", index=False)
    monkeypatch.setattr(geometry, "FILE", tmp_path / "kept.npz")
    texts = frame[["prompt", "shuffle"]].drop_duplicates()
    texts = texts.assign(loss=texts.shuffle + 0.5, corpus="of " + texts.prompt)
    texts.to_csv(tmp_path / "tables" / "prompts.csv", index=False)
    geometry.keep(tmp_path)
    with np.load(tmp_path / "kept.npz") as kept:
        for name, x in values.items():
            assert kept[name] == pytest.approx(x, rel=1e-6)
        assert kept["loss"].tolist() == [[0.5, 1.5]] * 3
        assert kept["corpus"].tolist() == ["of a", "of b", "of c"]
