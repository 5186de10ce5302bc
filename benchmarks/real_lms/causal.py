"""Does W cause? Moves of the states of edits on pretrained LMs.

    python -m benchmarks.real_lms.causal FOLDER [--seeds "[0, 1, 2, 3, 4]"]

FOLDER holds a folder for each LM. ``benchmarks/results/real_lms/LM/causal.json`` has what
configs/causal.yaml gives on it, ``causal_SEED.json`` the same with other edits, and ``causal.npz``
the target logits of the first seed's edits and the columns of the maps; an LM that has them is not
run again. The tables and the figure of docs/causal.md follow from these files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jsonargparse import auto_cli
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks import common
from benchmarks.common import Estimate
from benchmarks.real_lms.ripple_runs import RippleRun
from benchmarks.real_lms.ripple_tables import NEAREST
from benchmarks.real_lms.run import REAL_LMS
from lincorr_lightning.callbacks import Intervention
from lincorr_lightning.cli import main as lincorr
from lincorr_lightning.finetune import interventions as moves
from lincorr_lightning.finetune.interventions import EditStates
from lincorr_lightning.functional.significance import mean_interval
from lincorr_lightning.results import plots
from lincorr_lightning.results.table import column

STATES = "causal.npz"
SETTINGS = (
    "fit",
    "--config=configs/causal.yaml",
    "--model.lm.dtype=float32",
    "--matmul_precision=highest",
    "--model.lm.attn_implementation=eager",
    "--trainer.accelerator=auto",
    "--data.n_edits=150",
)
SEEDS = ("seed_everything", "data.seed", "model.adapter.seed")
MAPS = {"W": "W", "W0": "W0", "nearest": NEAREST}
ARM_OF = {"w": "W", "plain": "W, plain", "w0": "W0"}


def measure(lm: Path | str, path: Path, *options: str, keep_states: bool = False) -> None:
    """Move the states of an LM's edits, and write the numbers; also the states, if kept."""
    with tempfile.TemporaryDirectory() as scratch:
        where = f"--model.lm.name_or_path={lm}", f"--trainer.default_root_dir={scratch}"
        trainer = lincorr([*SETTINGS, *options, *where, common.QUIET]).trainer
        (callback,) = [one for one in trainer.callbacks if isinstance(one, Intervention)]
    edits = callback.edits
    if keep_states:
        save_states(edits, path.with_name(STATES))
    shares = edits.by_reference(edits.generalized(edits.after))
    content = {
        "options": [*SETTINGS, *options],
        **callback.results,
        "generalized": float(shares.mean()),
    }
    common.write_numbers(path, content)


def save_states(edits: EditStates, path: Path) -> None:
    """Write target logits before and after each edit, and the maps' columns of its answer."""
    arms = {arm: edits.weights[arm][0] for arm in ARM_OF.values()}
    parts = {"before": edits.before, "after": edits.after, **arms}
    np.savez_compressed(
        path,
        references=np.array(edits.references),
        mask=edits.reference_mask,
        to_logits=edits.space.to_logits,
        **{key: values.float().numpy() for key, values in parts.items()},
    )


def read_states(path: Path, of_logits: bool = False) -> EditStates:
    """Return the edits that `save_states` wrote, or with logits in place of their states.

    Directions of logits are weights themselves. Random directions differ from the run's: the basis
    of the target space is computed anew.
    """
    with np.load(path) as file:
        arrays = dict(file)
    references = arrays.pop("references").tolist()
    parts = {key: torch.from_numpy(values) for key, values in arrays.items()}
    rows, mask = parts["to_logits"], parts["mask"]
    space = moves.TargetSpace(torch.eye(len(rows)) if of_logits else rows)
    columns = {key: parts[arm] for key, arm in ARM_OF.items()}
    weights = moves.weights_of_arms(space, mask, 0, **columns)
    before, after = parts["before"].double(), parts["after"].double()
    return EditStates(space, before, after, mask, references, weights)


def component(vectors: Tensor, directions: Tensor) -> Tensor:
    """Return the components of vectors along unit vectors, ``(..., n)``."""
    return (vectors * directions).sum(-1, keepdim=True) * directions


def along(vectors: Tensor, *directions: Tensor) -> Tensor:
    """Return the parts of vectors in the space of some directions, which are unit vectors."""
    total, chosen = torch.zeros_like(vectors), []
    for direction in directions:
        for other in chosen:
            direction = normalize(direction - component(direction, other), dim=-1)
        chosen.append(direction)
        total = total + component(vectors, direction)
    return total


def removals(edits: EditStates) -> dict[str, str]:
    """Return what it adds to generalized edits to take other parts of the change out, in points."""
    space, states = edits.space, edits.after @ edits.space.to_states
    change = states - edits.before @ space.to_states
    w, w0, row = (space.directions(edits.weights[k][0]) for k in ("W", "W0", "reference's row"))
    beyond_row = normalize(w - component(w, row), dim=-1)

    def share(part: Tensor) -> Tensor:
        return edits.by_reference(edits.generalized((states - part) @ space.to_logits.T))

    nothing, of_w, of_w0 = along(change), along(change, w), along(change, w0)
    both = along(change, w0, w)
    of_row = component(component(change, row), w)
    parts = {
        "W and W0": (both, nothing),
        "W, where W0 is out": (both, of_w0),
        "W0, where W is out": (both, of_w),
        "W without its part along the reference's row": (component(change, beyond_row), nothing),
        "W, of the change along the reference's row": (of_row, nothing),
    }
    return {name: points(share(part) - share(other)) for name, (part, other) in parts.items()}


def points(values: Tensor) -> str:
    """Return the mean in points with its 95 % interval, such as −31 (−43, −20)."""
    numbers = (float(values.mean()), *mean_interval(values))
    mean, low, high = (f"{round(100 * x):+d}".replace("-", "−") for x in numbers)
    return f"{mean} ({low}, {high})"


def edits_at(run: RippleRun, k: int, to_logits: Tensor) -> EditStates:
    """Return the learned edits of a run of ``ripples.py`` after its k-th kept step.

    `to_logits` are those of a `TargetSpace` of the LM.
    """
    chosen = run.shares["learned"][run.steps.index(run.kept[k])] > 0
    of = {key: torch.from_numpy(run.arrays[key][chosen]) for key in ("before", *MAPS, "reference")}
    after = of["before"] + torch.from_numpy(run.arrays["change"][k][chosen])
    weights = {arm: of[key][None].double() for key, arm in MAPS.items()}
    weights["reference's row"] = of["reference"].double()[None]
    space = moves.TargetSpace(to_logits)
    references = [str(number) for number in run.group[chosen]]
    return EditStates(space, of["before"], after, of["reference"], references, weights)


@dataclass(frozen=True)
class TakenOut:
    """What it adds to the share of generalized edits to take a direction out of their change.

    Means over right answers, with 95 % intervals over them (Student's t). In the first row of each
    step nothing is taken out: it has the share itself.
    """

    lm: str = column("LM")
    relation: str = column("edits of")
    step: int = column("", "d")
    taken_out: str = column()
    generalized: Estimate = column("", "+.0%")


NOTHING = "nothing"
PAIRS = (("W0", "W"), ("W", "W0"), (NEAREST, "W"), (NEAREST, "W0"), ("W", NEAREST))
"""Directions that are taken out, and what is taken out after them."""


def taken_out(edits: EditStates) -> dict[str, Estimate]:
    """Return what it adds to generalized edits to take directions out, alone and after another."""
    states = edits.after @ edits.space.to_states
    change = states - edits.before @ edits.space.to_states
    of = {arm: edits.space.directions(edits.weights[arm])[0] for arm in MAPS.values()}

    def share(*arms: str) -> Tensor:
        logits = (states - along(change, *(of[arm] for arm in arms))) @ edits.space.to_logits.T
        return edits.by_reference(edits.generalized(logits))

    base = share()
    alone = {arm: share(arm) for arm in of}
    found = {NOTHING: base} | {arm: values - base for arm, values in alone.items()}
    found |= {f"{b}, where {a} is out": share(a, b) - alone[a] for a, b in PAIRS}
    return {
        name: Estimate(float(values.mean()), *map(float, mean_interval(values)))
        for name, values in found.items()
    }


def taken_out_by_step(run: RippleRun, output: Path) -> Iterator[TakenOut]:
    """Yield `taken_out` of the edits of a run of cities at their peak and at the last kept step."""
    states = output / run.lm / STATES
    if run.relation != "city->country" or not states.exists():
        return
    with np.load(states) as file:
        to_logits = torch.from_numpy(file["to_logits"])
    for k in dict.fromkeys((run.kept_peak, len(run.kept) - 1)):
        for name, estimate in taken_out(edits_at(run, k, to_logits)).items():
            yield TakenOut(run.lm, common.arrow(run.relation), run.kept[k], name, estimate)


def doses(folder: Path) -> pd.DataFrame:
    """Return the effects of all moves on the first seed's edits, of states and of logits."""
    states, of_logits = (read_states(folder / STATES, x) for x in (False, True))
    logit_rows = pd.DataFrame(moves.dose_rows(of_logits)).query("part == 'own'")
    logit_rows["part"] = "own, of logits"
    rows = pd.concat([pd.DataFrame(moves.dose_rows(states)), logit_rows])
    rows = rows.drop(columns="mean")
    rows.insert(0, "lm", folder.name)
    return rows


def effects_by_seed(folder: Path, first: pd.DataFrame) -> pd.DataFrame:
    """Return what moves of strength 1 add, by seed; those of the first one are in `first`.

    Also W's effect minus it, and it minus that of another answer's direction.
    """
    by_seed = {0: first[first["strength"] == 1].set_index(["part", "arm"])["effect"]}
    for seed, path in enumerate(sorted(folder.glob("causal_*.json")), 1):
        run = pd.DataFrame(common.read_numbers(path)["effects"])
        by_seed[seed] = run.set_index(["part", "arm"])["effect"]
    effects = pd.concat(by_seed, names=["seed"]).unstack("arm")
    numbers = {
        "effect": effects,
        "w_minus": -effects.sub(effects["W"], axis=0),
        "minus_other_answer": effects.sub(effects["other answer"], axis=0),
    }
    return pd.concat(numbers, axis=1).stack("arm").reset_index().assign(lm=folder.name)


def figure(first: pd.DataFrame) -> Figure:
    """Draw what it costs to take each direction's component out of the change, by strength."""
    is_drawn = (first["part"] == "own") & ~first["arm"].isin(["W, plain", "W, other labels"])
    return plots.curves(
        first[is_drawn],
        "strength",
        "effect",
        "arm",
        "lm",
        band=("effect_low", "effect_high"),
        title="What W's direction does to edits, that of the vocabulary's map W0 does, too",
        subtitle="added to the share of generalized edits where a direction's component, times "
        "the strength, is taken out of the change by the edit; city→country, mean over countries; "
        "bands: 95 % intervals over countries",
        labels=("strength", "generalized"),
        percent=True,
        share_y=True,
    )


def write_tables(output: Path) -> None:
    """Write the tables of all LMs that are measured, and those and the figure of the document."""
    lms = [path.parent for path in sorted(output.glob(f"*/{STATES}"), reverse=True)]
    first = pd.concat(map(doses, lms))
    by_seed = pd.concat(effects_by_seed(lm, first[first["lm"] == lm.name]) for lm in lms)
    grouped = by_seed.groupby(["lm", "part", "arm"], sort=False)
    numbers = grouped[["effect", "w_minus", "minus_other_answer"]]
    halves = numbers.agg(common.half_interval).add_suffix("_half")
    over_seeds = numbers.mean().join(halves)
    over_seeds["seeds"] = grouped.size()
    common.write_csv(output / "causal_doses.csv", first)
    common.write_csv(output / "causal_seeds.csv", over_seeds.reset_index())
    if output == REAL_LMS:
        own = by_seed[by_seed["part"] == "own"]
        cells = own.pivot_table("effect", "arm", "lm", common.mean_interval)
        cells = cells.loc[first["arm"].unique(), [lm.name for lm in lms]]
        for lm in lms:
            shares = [common.read_numbers(run)["generalized"] for run in lm.glob("causal*.json")]
            cells.loc["none: generalized edits", lm.name] = common.mean_interval(shares)
        given = pd.DataFrame({lm.name: removals(read_states(lm / STATES)) for lm in lms})
        names = {"causal_own": cells, "causal_given": given}
        common.place_tables({k: common.markdown_frame(x, "taken out") for k, x in names.items()})
        (output / "causal.png").write_bytes(plots.to_png(figure(first)))


def main(
    folder: Path | None = None, output: Path = REAL_LMS, seeds: tuple[int, ...] = (0,)
) -> None:
    """Measure the LMs that are not measured, and write the tables of all that are.

    Args:
        folder: Folder that holds a folder for each LM; none measures nothing.
        output: Folder of the results.
        seeds: Seeds of the edits.
    """
    for seed, lm in product(seeds, [] if folder is None else common.lms_in(folder)):
        path = output / lm.name / f"causal{f'_{seed}' if seed else ''}.json"
        if not path.exists():
            options = [f"--{key}={seed}" for key in SEEDS if seed]
            measure(lm, path, *options, keep_states=not seed)
    write_tables(output)


if __name__ == "__main__":
    auto_cli(main)
