"""Does W cause? Moves of the states of edits, and matched pairs of edits, on pretrained LMs.

    python -m benchmarks.real_lms.causal FOLDER [--seeds "[0, 1, 2]"]

FOLDER holds a folder for each LM. Of each, ``benchmarks/results/real_lms/LM/causal.json`` has the
numbers whose tables are put into docs/causal.md, and ``causal.npz`` the target logits before and
after each edit and the columns of the maps, from which doses and figures are made; an LM that has
them is not run again. Another seed has other edits and writes only ``causal_SEED.json``; maps are
fitted on nearly the same subjects.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonargparse import auto_cli
from pandas import DataFrame, Series
from torch import Tensor

from benchmarks import common
from benchmarks.real_lms.tables import REAL_LMS
from lincorr_lightning.callbacks import Intervention
from lincorr_lightning.cli import main as lincorr
from lincorr_lightning.finetune import interventions as moves
from lincorr_lightning.finetune.interventions import EditStates
from lincorr_lightning.functional.significance import bootstrap_interval
from lincorr_lightning.results.results import Results

SETTINGS = (
    "fit",
    "--config",
    "configs/causal.yaml",
    "--model.lm.dtype=float32",
    "--matmul_precision=highest",
    "--model.lm.attn_implementation=eager",
    "--trainer.accelerator=auto",
)
SEEDS = "seed_everything", "data.seed", "model.adapter.seed"
RESPONSES = ("generalized", "hallucinated", "p reference")
ARM_OF = {"w": "W", "plain": "W, plain", "w0": "W0"}
ENDS = "", "_low", "_high"
UNSCORED_ARMS = ("reference's row", "W, shuffled")  # the same of all edits, and W's own
RESIDUALS = ("W", "reference's row"), ("W0", "reference's row"), ("W", "W0"), ("W0", "W")


def measure(lm: Path | str, path: Path, *options: str, keep_states: bool = False) -> None:
    """Move the states of an LM's edits, and write the numbers; also the states, if kept."""
    with tempfile.TemporaryDirectory() as scratch:
        where = f"--model.lm.name_or_path={lm}", f"--trainer.default_root_dir={scratch}"
        trainer = lincorr([*SETTINGS, *options, *where, common.QUIET]).trainer
        (found,) = [one for one in trainer.callbacks if isinstance(one, Intervention)]
        if keep_states:
            save_states(found.edits, path.with_suffix(".npz"))
    now = found.edits.answers(found.edits.after)
    content = {
        "options": [*SETTINGS, *options],
        **found.results,
        "matched": list(matched(found.edits)),
        "edits": {k: float(found.edits.by_reference(now[k]).mean()) for k in RESPONSES},
    }
    common.write_numbers(path, content)


def save_states(edits: EditStates, path: Path) -> None:
    """Write target logits before and after each edit, and the maps' columns of its answer."""
    arms = {arm: edits.weights[arm][0] for arm in ARM_OF.values()}
    parts = {"before": edits.before, "after": edits.after, "popularity": edits.popularity, **arms}
    np.savez_compressed(
        path,
        references=np.array(edits.references),
        mask=edits.reference_mask,
        to_logits=edits.space.to_logits,
        **{k: x.float().numpy() for k, x in parts.items()},
    )


def read_states(path: Path, of_logits: bool = False) -> EditStates:
    """Return the edits that `save_states` wrote, or with logits in place of their states.

    Directions of logits are weights themselves. Random directions differ from the run's: the basis
    of the target space is computed anew.
    """
    with np.load(path) as file:
        arrays = dict(file)
    references = arrays.pop("references").tolist()
    parts = {k: torch.from_numpy(x) for k, x in arrays.items()}
    rows, mask = parts["to_logits"], parts["mask"]
    space = moves.TargetSpace(torch.eye(len(rows)) if of_logits else rows)
    columns = {k: parts[arm] for k, arm in ARM_OF.items()}
    weights = moves.weights_of_arms(space, mask, 0, **columns)
    before, after = parts["before"].double(), parts["after"].double()
    return EditStates(space, before, after, mask, references, weights, parts["popularity"])


def matched_pairs(
    scores: Sequence[float], groups: Sequence[str], covariates: Tensor
) -> list[tuple[int, int]]:
    """Pair edits of high and of low score in the same group that are alike in what else matters.

    The upper half of a group's scores, from the highest on, is paired with the nearest by the
    `covariates`, ``(n, n_covariates)``, of the lower half that is left; equal scores are no pair.
    """
    pairs, members = [], defaultdict(list)
    for i in sorted(range(len(scores)), key=lambda i: -scores[i]):
        members[groups[i]].append(i)
    for own in members.values():
        low = own[(len(own) + 1) // 2 :]
        for high in own[: len(own) // 2]:
            left = [i for i in low if scores[i] < scores[high]]
            if left:
                nearest = (covariates[left] - covariates[high]).norm(dim=1).argmin()
                pairs.append((high, left[int(nearest)]))
                low.remove(left[int(nearest)])
    return pairs


def matched(edits: EditStates) -> Iterator[dict[str, Any]]:
    """Yield what edits with a high weight of the reference have over their partners, by arm.

    Partners have the same reference. What remains between them in the reference's logit before the
    edit, less the leading one, and in the answer's popularity, is in standard deviations.
    """
    scaled = covariates_of(edits)
    now, near = edits.answers(edits.after), torch.stack([*scaled.values()], 1)
    for arm, weights in edits.weights.items():
        scores = of_reference(edits, weights)
        pairs = [p for x in scores for p in matched_pairs(x.tolist(), edits.references, near)]
        if pairs and arm not in UNSCORED_ARMS:
            high, low = torch.tensor(pairs).T
            own = replace(edits, references=[edits.references[i] for i, _ in pairs])
            differ = {k: own.by_reference(x[high] - x[low]) for k, x in (now | scaled).items()}
            yield {
                "score": arm,
                "pairs": len(pairs) / len(scores),
                "n": len(set(own.references)),
                **{k: [float(differ[k].mean()), *bootstrap_interval(differ[k])] for k in RESPONSES},
                **{k: float(differ[k].mean()) for k in scaled},
            }


def of_reference(edits: EditStates, values: Tensor) -> Tensor:
    """Return the largest of the values of an edit's references, ``(..., n_edits)``."""
    return values.masked_fill(~edits.reference_mask, -torch.inf).amax(-1)


def covariates_of(edits: EditStates) -> dict[str, Tensor]:
    """Return the covariates of each edit, prior and popularity, in standard deviations."""
    prior = of_reference(edits, edits.before)
    found = {"prior": prior - edits.before.amax(1), "popularity": edits.popularity.double()}
    return {k: x / x.std(correction=0).clamp(min=1e-12) for k, x in found.items()}


def slopes(lm: str, edits: EditStates) -> Iterator[list[str]]:
    """Yield by score what a standard deviation of it adds to generalization within a reference.

    By least squares, first of the score alone, then beside the covariates; with intervals by a
    bootstrap over references.
    """
    names, of = np.unique(edits.references, return_inverse=True)
    own = np.eye(len(names))[of]

    def within(x: Any) -> Any:
        return x - own @ (own.T @ x / own.sum(0)[:, None])

    y = within(edits.answers(edits.after)["generalized"].double().numpy()[:, None])
    others = torch.stack([*covariates_of(edits).values()], 1).numpy()
    counts = common.drawn(of, 2000, np.random.default_rng(0))
    for arm in ("W", "W, plain", "W0", "W - W0"):
        weight = of_reference(edits, edits.weights[arm][0]).double()
        score, cells = (weight / weight.std(correction=0)).numpy()[:, None], []
        for x in (within(score), within(np.hstack([score, others]))):
            grams = np.einsum("er,ei,ej->rij", own, x, np.hstack([x, y]))
            sums = np.tensordot(counts, grams, 1)
            found = (np.linalg.pinv(sums[..., :-1]) @ sums[..., -1:])[:, 0, 0]
            cells.append(points(*common.interval(found)))
        yield [lm, f"{len(of)} / {len(names)}", arm, *cells]


def points(*values: float) -> str:
    """Return points with their interval, such as −31 (−43, −20)."""
    mean, low, high = (f"{round(100 * value):+d}".replace("-", "−") for value in values)
    return f"{mean} ({low}, {high})"


def over_seeds(lm: str, runs: Sequence[Any]) -> Iterator[list[str]]:
    """Yield shares without a move; by direction, effects, differences, and matched pairs."""
    shares = DataFrame(run["edits"] for run in runs)[[*RESPONSES]]
    yield [lm, f"{len(runs)}", "no move", *shares.agg(common.mean_interval), *["–"] * 3]
    every = DataFrame(x | {"seed": i} for i, run in enumerate(runs) for x in run["effects"])
    effect = every[every["part"] == "change"].pivot_table("effect", "seed", ["arm", "response"])
    first = RESPONSES[0]

    def lead(one: str, other: str) -> Series:  # of an arm over itself, nothing
        return effect[one][first] - effect[other][first] if one != other else Series(dtype=float)

    for arm in every["arm"].unique():
        own, scored = effect[arm], {arm} - {*UNSCORED_ARMS}
        matched_of = [x for run in runs for x in run["matched"] if x["score"] in scored]
        numbers = [
            *(own[response] for response in RESPONSES),
            lead("W", arm),
            lead(arm, "other answer"),
            Series([x[first][0] for x in matched_of], dtype=float),
        ]
        yield [lm, f"{own[first].count()}", arm, *map(common.mean_interval, numbers)]


def with_residuals(edits: EditStates) -> EditStates:
    """Add directions without their part along another one, such as W's without W₀'s."""
    weights = dict(edits.weights)
    for arm, other in RESIDUALS:
        first, second = (edits.weights[name].double() for name in (arm, other))
        x, y = (one @ edits.space.to_logits for one in (first, second))
        part = (x * y).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True)
        weights[f"{arm} ⊥ {other}"] = first - part * second
    return replace(edits, weights=weights)


@cache
def results_of(path: Path, of_logits: bool = False, residuals: bool = False) -> Results:
    """Return the results of the states beside a file of numbers, as those of a run."""
    edits = read_states(path.with_suffix(".npz"), of_logits)
    edits = with_residuals(edits) if residuals else edits
    return moves.intervention_results("causal", common.read_numbers(path)["relation"], edits)


def own_rows(path: Path, others: Sequence[Any]) -> Iterator[list[str]]:
    """Yield by direction what it does to take its own component out, of states and of logits.

    The last cells are of all seeds, with the runs of `others`: the effect, W's minus it, and it
    minus that of another answer.
    """
    where = f"part == 'own' and strength == 1 and response == '{RESPONSES[0]}'"
    of_states, of_logits = (
        results_of(path, x, True).table("causal_doses").frame.query(where).set_index("arm")
        for x in (False, True)
    )
    lm, n = path.parent.name, results_of(path).values["n_references"]
    effects = DataFrame({0: of_states["effect"]})
    for i, run in enumerate(others, 1):
        effects[i] = DataFrame(run["effects"]).query(where).set_index("arm")["effect"]
    for arm, seeds in effects.iterrows():
        pair = (x.loc[arm, [f"effect{end}" for end in ENDS]] for x in (of_states, of_logits))
        cells = (points(*ends) for ends in pair)
        leads = [effects.loc["W"] - seeds, seeds - effects.loc["other answer"]]
        over = [f"{seeds.count()}", *map(common.mean_interval, (seeds, *leads))]
        yield [lm, f"{n}", str(arm), f"{of_states.loc[arm, 'share']:.1%}", *cells, *over]


def draw(path: Path) -> None:
    """Draw dose and response beside a file of numbers."""
    (figure,) = results_of(path).figures
    path.with_suffix(".png").write_bytes(figure.png)


def tables(results: Path) -> dict[str, str]:
    """Return the tables of docs/causal.md, of the LMs that are measured."""
    rows: dict[str, list[list[str]]] = defaultdict(list)
    for path in sorted(results.glob("*/causal.json"), reverse=True):
        found, lm = common.read_numbers(path), path.parent.name
        effects = {(x["part"], x["arm"], x["response"]): x for x in found["effects"]}
        for arm in dict.fromkeys(arm for _, arm, _ in effects):

            def shown(part: str, response: str, kind: str = "effect", arm: str = arm) -> str:
                row = effects[part, arm, response]  # noqa: B023 (used at once)
                return points(*(row[f"{kind}{end}"] for end in ENDS))

            share = f"{effects['change', arm, RESPONSES[0]]['share']:.0%}"
            rest = "" if arm == "W" else shown("change", RESPONSES[0], "w_minus")
            rows["causal"].append([lm, arm, share, *(shown("change", k) for k in RESPONSES), rest])
            others = [shown(part, k) for part in ("state", "only") for k in RESPONSES[:2]]
            rows["causal_parts"].append([lm, arm, *others])
        doses = results_of(path).table("causal_doses").frame
        changes = doses.query("part == 'change' and strength > 0 and response == 'generalized'")
        for arm, own in changes.groupby("arm", sort=False):
            cells = own[["effect", "effect_low", "effect_high"]].to_numpy()
            rows["causal_doses"].append([lm, arm, *(points(*cell) for cell in cells)])
        runs = [found, *map(common.read_numbers, sorted(path.parent.glob("causal_*.json")))]
        rows["causal_seeds"] += over_seeds(lm, runs)
        rows["causal_own"] += own_rows(path, runs[1:])
        rows["causal_slopes"] += slopes(lm, read_states(path.with_suffix(".npz")))
        for row in found["matched"]:
            left = [f"{row[key]:+.2f}".replace("-", "−") for key in ("prior", "popularity")]
            own = [points(*row[k]) for k in RESPONSES]
            count = f"{row['pairs']:.0f} / {row['n']}"
            rows["causal_matched"].append([lm, row["score"], count, *own, *left])
    columns = {
        "causal": ["direction", "share of the change", *RESPONSES, "generalized: W minus it"],
        "causal_own": [
            "references",
            "direction",
            "share of the change",
            "generalized",
            "of logits",
            "seeds",
            "generalized, over seeds",
            "W minus it",
            "it minus another answer's",
        ],
        "causal_doses": ["direction", *map("{:g}".format, moves.STRENGTHS[1:])],
        "causal_parts": [
            "direction",
            *(f"{x}: {k}" for x in ("state", "only") for k in RESPONSES[:2]),
        ],
        "causal_seeds": [
            "seeds",
            "direction",
            *RESPONSES,
            "generalized: W minus it",
            "it minus another answer's",
            "generalized: matched pairs",
        ],
        "causal_matched": ["score", "pairs / references", *RESPONSES, "prior", "popularity"],
        "causal_slopes": [
            "edits / references",
            "score",
            "generalized, per standard deviation",
            "prior and popularity held fixed",
        ],
    }
    return {name: common.markdown_table(["LM", *own], rows[name]) for name, own in columns.items()}


def main(folder: str, output: str = str(REAL_LMS), seeds: tuple[int, ...] = (0,)) -> None:
    """Measure the LMs that are not measured, and put the tables into the documents.

    Args:
        folder: Folder that holds a folder for each LM.
        output: Folder of the results.
        seeds: Seeds of the edits.
    """
    for seed, lm in product(seeds, common.lms_in(folder)):
        path = Path(output) / lm.name / f"causal{f'_{seed}' if seed else ''}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            own = "--data.n_edits=150", *(f"--{key}={seed}" for key in SEEDS if seed)
            measure(lm, path, *own, keep_states=not seed)
    for path in Path(output).glob("*/causal.json"):
        draw(path)
    common.place_tables(tables(Path(output)) if output == str(REAL_LMS) else {})


if __name__ == "__main__":
    auto_cli(main)
