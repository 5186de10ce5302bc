"""Matched pairs and tables of interventions, against counting by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from benchmarks.real_lms import causal
from lincorr_lightning.finetune.interventions import EditStates, TargetSpace


def test_pairs_have_the_same_reference_and_the_nearest_covariates() -> None:
    scores = [4.0, 3.0, 2.0, 1.0, 9.0, 5.0, 5.0, 7.0]
    groups = ["France"] * 4 + ["Italy"] + ["Peru"] * 2 + ["Italy"]
    near = torch.tensor([[0.0], [5.0], [6.0], [1.0], [0.0], [0.0], [0.0], [9.0]])
    # The highest takes the low one next to it, and the second what is left; equal ones are none.
    assert causal.matched_pairs(scores, groups, near) == [(4, 7), (0, 3), (1, 2)]


def test_differences_within_references() -> None:
    rng = np.random.default_rng(0)
    head, before, after = (
        torch.from_numpy(rng.normal(size=size)) for size in ((3, 4), (6, 3), (6, 3))
    )
    right = [0, 0, 1, 1, 2, 2]
    mask = torch.eye(3).bool()[torch.tensor(right)]
    weights = {"W": torch.from_numpy(rng.normal(size=(1, 6, 3)))}
    weights["reference's row"] = mask.double()[None]
    popularity = torch.from_numpy(rng.normal(size=6))
    edits = EditStates(
        TargetSpace(head), before, after, mask, [str(x) for x in right], weights, popularity
    )
    (found,) = causal.matched(edits)
    p = after.softmax(1)
    expected = []
    for i, j in ((0, 1), (2, 3), (4, 5)):
        w = [float(weights["W"][0, k, right[k]]) for k in (i, j)]
        high, low = (i, j) if w[0] > w[1] else (j, i)
        expected.append(
            [
                float(x[high] - x[low])
                for x in (
                    [float(p[k, right[k]]) for k in range(6)],
                    (after.argmax(1) == torch.tensor(right)).double(),
                    popularity / popularity.numpy().std(),
                )
            ]
        )
    for mean, key in zip(np.mean(expected, 0), ("p reference", "generalized"), strict=False):
        assert found[key][0] == pytest.approx(mean)
    assert found["popularity"] == pytest.approx(np.mean(expected, 0)[2])
    assert (found["pairs"], found["n"]) == (3, 3)


def test_residuals_have_nothing_of_the_other_direction() -> None:
    generator = torch.Generator().manual_seed(0)
    space = TargetSpace(torch.randn(5, 3, generator=generator))
    names = "W", "W0", "reference's row"
    weights = {x: torch.randn(1, 4, 5, generator=generator).double() for x in names}
    rows = torch.zeros(4, 5)
    edits = EditStates(space, rows, rows, rows.bool(), [""] * 4, weights, rows[:, 0])
    found = causal.with_residuals(edits).weights
    for arm, other in causal.RESIDUALS:
        shown = (f"{arm} ⊥ {other}", other, arm)
        left, base, whole = (space.directions(found[name])[0] for name in shown)
        assert (left * base).sum(-1).abs().max() < 1e-9
        # What is left lies in the plane of both.
        coordinates = torch.linalg.lstsq(torch.stack([whole, base], -1), left[..., None]).solution
        plane = (torch.stack([whole, base], -1) @ coordinates)[..., 0]
        assert torch.allclose(plane, left)


def test_tables_of_a_run(tmp_path: Path) -> None:
    """The tiny world in a few edits, as the LMs are run."""
    causal.measure("tiny-world", tmp_path / "causal.json", "--data.n_edits=24", keep_states=True)
    found = json.loads((tmp_path / "causal.json").read_text())
    (tmp_path / "lm").mkdir()
    for name in ("causal.json", "causal.npz"):
        (tmp_path / name).rename(tmp_path / "lm" / name)
    alone = causal.tables(tmp_path)["causal_seeds"].splitlines()[2]
    shares = " | ".join(f"{100 * found['edits'][key]:.0f}" for key in causal.RESPONSES)
    assert alone == f"| lm | 1 | no move | {shares} | – | – | – |"
    other = [x | {"effect": x["effect"] - 0.1} for x in found["effects"]]
    (tmp_path / "lm" / "causal_1.json").write_text(json.dumps(found | {"effects": other}))
    made = causal.tables(tmp_path)
    lines = made["causal"].splitlines()
    assert len(lines) == 2 + 9 and lines[2].startswith("| lm | W | ")
    own = made["causal_own"].splitlines()
    assert len(own) == len(lines) + len(causal.RESIDUALS)
    # W's own component is what its arm takes out of the change.
    cells = [x.strip() for x in own[2].split("|")]
    assert cells[3] == "W" and cells[5] == lines[2].split("|")[4].strip()
    own = [x["effect"] for x in found["effects"] if (x["part"], x["arm"]) == ("own", "W")]
    effect = own[0]  # of generalized edits
    mean, half = 100 * (effect - 0.05), 12.706 * 5
    assert cells[7:10] == ["2", f"{mean:.0f} ± {half:.0f}".replace("-", "−"), "0 ± 0"]
    effect = next(x for x in found["effects"] if x["part"] == "change" and x["arm"] == "random")
    shown = causal.points(*(effect[f"effect{end}"] for end in ("", "_low", "_high")))
    assert shown in next(line for line in lines if "| random |" in line)
    of_seeds = next(x for x in made["causal_seeds"].splitlines() if "| 2 | random |" in x)
    # Student's t of one degree of freedom is 12.706 at 97.5 %.
    mean, half = 100 * (effect["effect"] - 0.05), 12.706 * 5
    assert f"| {mean:.0f} ± {half:.0f} |".replace("-", "−") in of_seeds
    pairs = next(x for x in found["matched"] if x["score"] == "random")["generalized"][0]
    of_other = next(
        x
        for x in found["effects"]
        if x["part"] == "change" and (x["arm"], x["response"]) == ("other answer", "generalized")
    )
    more = effect["effect"] - of_other["effect"]
    constant = [f"{100 * x:.0f} ± 0".replace("-0 ", "0 ") for x in (effect["w_minus"], more, pairs)]
    assert of_seeds.endswith(f"| {' | '.join(constant)} |".replace("-", "−"))
    of_w = [x for x in found["effects"] if (x["part"], x["arm"]) == ("change", "W")]
    effect = next(x for x in of_w if x["response"] == "generalized")
    shown = causal.points(*(effect[f"effect{end}"] for end in ("", "_low", "_high")))
    doses = made["causal_doses"].splitlines()
    assert doses[0].split("|")[3:-1] == [" 0.25 ", " 0.5 ", " 0.75 ", " 1 ", " 1.5 ", " 2 "]
    assert doses[2].split("|")[1:3] == [" lm ", " W "] and doses[2].split("|")[6].strip() == shown
    causal.draw(tmp_path / "lm" / "causal.json")
    assert imread(tmp_path / "lm" / "causal.png").shape[1] > 1000
    stored = np.load(tmp_path / "lm" / "causal.npz")
    assert len(stored["before"]) == found["n_learned"] == len(stored["references"])
    hits = stored["mask"][np.arange(len(stored["after"])), stored["after"].argmax(1)]
    groups = stored["references"]
    macro = np.mean([hits[groups == one].mean() for one in np.unique(groups)])
    assert found["edits"]["generalized"] == pytest.approx(macro, rel=1e-3)
    assert causal.points(-0.314, -0.4251, 0.0) == "−31 (−43, +0)"


def test_slopes_are_those_of_least_squares_with_an_intercept_for_each_reference() -> None:
    path = causal.REAL_LMS / "gemma-3-270m" / "causal.npz"
    rows = {row[2]: row for row in causal.slopes("gemma", causal.read_states(path))}
    with np.load(path) as file:
        states = dict(file)
    names, at = np.unique(states["references"], return_inverse=True)
    mask, before = states["mask"], states["before"].astype(float)
    right = states["after"].argmax(1)
    y = mask[np.arange(len(mask)), right].astype(float)
    prior = np.where(mask, before, -np.inf).max(1) - before.max(1)
    for arm in ("W", "W0"):
        score = np.where(mask, states[arm].astype(float), -np.inf).max(1)
        for cell, columns in zip(
            rows[arm][3:], ([score], [score, prior, states["popularity"]]), strict=True
        ):
            x = np.column_stack(
                [*((c - c.mean()) / c.std() for c in columns), np.eye(len(names))[at]]
            )
            slope = np.linalg.lstsq(x, y, rcond=None)[0][0]
            assert int(cell.split(" (")[0].replace("−", "-")) == round(100 * slope)
    assert rows["W"][1] == f"{len(y)} / {len(names)}"
