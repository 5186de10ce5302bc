"""Interventions on pretrained LMs: the tiny world in a few edits, and removals by plain algebra."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks import common
from benchmarks.real_lms import causal
from benchmarks.real_lms.run import REAL_LMS

GEMMA = REAL_LMS / "gemma-3-270m" / causal.STATES


@pytest.mark.slow
def test_a_run_leaves_states_and_tables(tmp_path: Path) -> None:
    lm = tmp_path / "lm"
    lm.mkdir()
    causal.measure("tiny-world", lm / "causal.json", "--data.n_edits=16", keep_states=True)
    run = common.read_numbers(lm / "causal.json")
    with np.load(lm / causal.STATES) as file:
        states = dict(file)
    hits = states["mask"][np.arange(run["n_learned"]), states["after"].argmax(1)]
    by_country = pd.Series(hits).groupby(states["references"]).mean()
    assert run["generalized"] == pytest.approx(by_country.mean(), rel=1e-3)
    other = [row | {"effect": row["effect"] - 0.1} for row in run["effects"]]
    common.write_numbers(lm / "causal_1.json", run | {"effects": other})
    causal.write_tables(tmp_path)
    (effect,) = [
        row["effect"] for row in run["effects"] if (row["part"], row["arm"]) == ("own", "W")
    ]
    seeds = pd.read_csv(tmp_path / "causal_seeds.csv").set_index(["part", "arm"])
    of_w = seeds.loc[("own", "W")]
    # Student's t of one degree of freedom is 12.706 at 97.5 %.
    assert of_w["effect"] == pytest.approx(effect - 0.05, abs=1e-3)
    assert of_w["effect_half"] == pytest.approx(12.706 * 0.05, rel=0.02)
    doses = pd.read_csv(tmp_path / "causal_doses.csv")
    assert set(doses["part"]) == {"own", "own, of logits", "change", "state", "only"}
    assert len(causal.figure(doses).axes) == 1


def test_removals_are_projections() -> None:
    """On stored edits: both directions together by least squares, country by country."""
    with np.load(GEMMA) as file:
        states = {key: file[key] for key in file.files}
    head = states["to_logits"].astype(float)
    before, after = (
        np.linalg.lstsq(head, (x - x.mean(1, keepdims=True)).T.astype(float), rcond=None)[0].T
        for x in (states["before"], states["after"])
    )
    hits = {"both": [], "W0": []}
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        directions = np.stack([states[arm][i].astype(float) @ head for arm in ("W0", "W")], 1)
        for name, n in (("both", 2), ("W0", 1)):
            some = directions[:, :n]
            part = some @ np.linalg.lstsq(some, new - old, rcond=None)[0]
            hits[name].append(states["mask"][i, (head @ (new - part)).argmax()])
    shares = {key: pd.Series(x).groupby(states["references"]).mean() for key, x in hits.items()}
    expected = 100 * (shares["both"].mean() - shares["W0"].mean())
    found = causal.removals(causal.read_states(GEMMA))["W, where W0 is out"]
    assert float(found.split(" (")[0].replace("−", "-")) == pytest.approx(expected, abs=0.51)


@pytest.mark.nightly
@pytest.mark.nightly
def test_documents_have_the_committed_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """All committed files are made again, and are the same."""
    written: dict[str, pd.DataFrame] = {}
    placed: dict[str, str] = {}
    monkeypatch.setattr(common, "write_csv", lambda path, table: written.update({path: table}))
    monkeypatch.setattr(common, "place_tables", placed.update)
    monkeypatch.setattr(Path, "write_bytes", lambda path, content: len(content))
    causal.write_tables(REAL_LMS)
    text = common.all_text()
    assert placed and common.placed(text, placed) == text
    for path, table in written.items():
        table = table.reset_index(drop=True)
        pd.testing.assert_frame_equal(common.read_csv(path), table, rtol=1e-3, check_dtype=False)
