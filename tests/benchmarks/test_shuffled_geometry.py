"""Tables of shuffled texts, against scipy's t-test and the means that the run wrote itself."""

import json

import numpy as np
import pytest
from scipy import stats

from benchmarks.real_lms import shuffled_geometry as geometry


@pytest.fixture(scope="module")
def profiles() -> dict[str, np.ndarray]:
    with np.load(geometry.FILE) as file:
        return {name: file[name].astype(float) for name in file}


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
        x = profiles["dimension n2=2"][:, :, int(row["layer"]) - 1]
        low, high = stats.ttest_rel(x[:, level], x[:, 0]).confidence_interval()
        mean, half = map(float, row["ID, less that of S = 0"].split(" ± "))
        assert (mean, half) == pytest.approx(((low + high) / 2, (high - low) / 2), abs=0.006)


def test_peaks(rows: dict[str, list[dict[str, str]]], profiles: dict[str, np.ndarray]) -> None:
    for row in rows["geometry_scales"]:
        mean = profiles[f"dimension n2={row['n2']}"][:, 0].mean(0)
        assert int(row["peak layer"]) == 1 + max(range(30), key=lambda i: mean[i])
        assert row["ID, by level of shuffling"].startswith(f"{max(mean):.2f} / ")
    assert [row["p \\< .01 in"] for row in rows["geometry_loss"]] == ["29", "29", "29", "30"]
