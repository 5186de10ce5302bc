"""Maps of all pairs on another LM: what is kept of a run, and the table's means."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.real_lms import resilience_pairs
from lincorr_lightning.lm import tiny_world


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Of the tiny world on itself, with few kinds of knowledge."""
    folder, lm = tmp_path_factory.mktemp("results"), Path(*tiny_world.__path__)
    after = tmp_path_factory.mktemp("kept") / "questions_1" / "8"
    after.parent.mkdir()
    after.symlink_to(lm)
    pairs = '--model.pairs=["name_country->country"]'
    studies = {
        "all": ["--model.knowledge=[city,country,pet,X+1,X+2]"],
        "similes": ["--model.knowledge=[name_country,country]", pairs],
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resilience_pairs, "STUDIES", studies)
        for _ in range(2):  # what is there is not measured again
            resilience_pairs.main(lm, (after,), folder / "pairs.csv")
    return pd.read_csv(folder / "pairs.csv")


def test_an_lm_keeps_all_of_its_own_maps(found: pd.DataFrame) -> None:
    assert len(found) == 5 * 4 + 1
    assert set(map(tuple, found[["lm", "text", "steps"]].to_numpy())) == {
        ("tiny_world", "questions", 8)
    }
    assert found.after.tolist() == found.before.tolist() == found.refitted.tolist()
    assert found.kept.dropna().tolist() == [1.0] * found.kept.notna().sum()
    axes, *_ = resilience_pairs.figure(found).axes
    drawn = axes.get_images() or axes.collections
    cells = np.ma.filled(drawn[0].get_array().astype(float), np.nan).reshape(5, 5)
    names = ["city", "country", "pet", "X+1", "X+2"]
    for row in found[found.study == "all"].itertuples():
        assert cells[names.index(row.source), names.index(row.target)] == row.after


def test_means_are_those_of_a_group(found: pd.DataFrame) -> None:
    """With numbers of two LMs in place of its own."""
    found = found.assign(
        kept=[i / 20 for i in range(21)], random_kept=0.52, after=[0.3 + i / 100 for i in range(21)]
    )
    lines = [line.split(" | ") for line in resilience_pairs.table(found).splitlines()]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    assert {row["pairs"]: int(row["n"]) for row in rows} == {
        "with references": 1,
        "other": 17,
        "numbers (figure 9)": 2,
        "similes (table 9)": 1,
    }
    for row in rows:
        if row["pairs"] == "similes (table 9)":
            own = found[found.study == "similes"]
        elif row["pairs"] == "numbers (figure 9)":
            own = found[found.source.isin(["X+1", "X+2"]) & found.target.isin(["X+1", "X+2"])]
        elif row["pairs"] == "with references":  # a country has many cities
            own = found[(found.source == "city") & (found.target == "country")]
        else:
            continue
        more = [100 * (kept - 0.52) for kept in own.kept]
        mean = float(
            row["kept: W − random words, points (10th to 90th percentile)"]
            .split(" (")[0]
            .replace("−", "-")
        )
        assert mean == pytest.approx(sum(more) / len(more), abs=0.51)
        assert row["W keeps more"] == f"{sum(x > 0 for x in more)} of {len(more)}"
        assert row["r: before / after / refitted"].split(" / ")[1] == f"{own.after.mean():.2f}"
