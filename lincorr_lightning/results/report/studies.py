"""Each study's place on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lincorr_lightning.results.report import edits, others, probe
from lincorr_lightning.results.report.beside import Numbers
from lincorr_lightning.results.report.document import Part, Picture
from lincorr_lightning.results.report.runs import Run


def _nothing(_: object) -> list[Part]:
    return []


def _no_facts(_: Run) -> list[tuple[str, str]]:
    return []


def _no_numbers(_: Run) -> Iterator[tuple[str, str, float | None]]:
    return iter(())


@dataclass(frozen=True)
class Study:
    """How a study is told.

    Attributes:
        title: Its heading.
        told: What it asks, in a sentence or two.
        facts: What a run was of.
        overview: Tables over all its runs.
        details: Tables of one run.
        numbers: What the paper may have too.
    """

    title: str
    told: str
    facts: Callable[[Run], list[tuple[str, str]]] = _no_facts
    overview: Callable[[Sequence[Run]], list[Part]] = _nothing
    details: Callable[[Run], list[Part]] = _nothing
    numbers: Numbers = _no_numbers


STUDIES = {
    "linear_probe": Study(
        "Linear probe",
        "Are the logits of one knowledge a linear map of another's, for arbitrary X, and does the "
        "map know the world (paper, section 3)? What counts is r above its control.",
        probe.facts,
        probe.overview,
        probe.details,
        probe.numbers,
    ),
    "resilience": Study(
        "Resilience",
        "Does a map fitted on one LM hold on another that was trained on (paper, section 4.2)?",
        others.resilience_facts,
        details=others.resilience_details,
        numbers=others.resilience_numbers,
    ),
    "source_finetune": Study(
        "Source fine-tune",
        "The LM is taught one knowledge only: where does the other go (paper, sections 4.1 and 5)?",
        edits.facts,
        edits.overview,
        edits.details,
        edits.numbers,
    ),
    "forecast": Study(
        "Forecast of edits",
        "What will become of the target, told before anything is trained.",
        edits.facts,
        edits.forecast_overview,
    ),
    "vocabulary_ablation": Study(
        "Vocabulary ablation",
        "Does the tie need the LM's layers, or will its vocabulary do (paper, section 6)?",
        others.ablation_facts,
        others.ablation_overview,
        others.ablation_details,
        others.ablation_numbers,
    ),
    "pretraining": Study(
        "Pre-training",
        "An LM trained from scratch on a world that is known.",
        others.pretraining_facts,
        others.pretraining_overview,
    ),
    "token_geometry": Study(
        "Token geometry",
        "How does the cloud of a prompt's tokens change from layer to layer and with shuffling "
        "(Viswanathan et al., 2025)?",
        details=others.plain_details,
    ),
    "knowledge_geometry": Study(
        "Knowledge geometry",
        "Are knowledges that are linearly tied closer in geometry too? The wording of their "
        "prompts is the null.",
        details=others.plain_details,
    ),
}
"""In the order in which they stand on a page; studies that are not here come last."""


def study_of(name: str) -> Study:
    """A study, or a plain one for a name that is not known.

    Args:
        name: As ``results.json`` has it.
    """
    plain = Study(
        name.replace("_", " ").capitalize() or "Study without a name",
        "This version has no page of its own for this study: its results as they are.",
        details=others.plain_details,
    )
    return STUDIES.get(name, plain)


_CAPTIONS = {
    "correlation_matrix": "Label-wise r of all pairs, source row → target column.",
    "instance_matrix": "Instance-wise r of all pairs; it flatters pairs that are not tied.",
    "nulls": "r of each pair beside its nulls, permuted targets and the control prompt.",
    "formation": "Ties, precision and recall while the LM was trained.",
    "ties": "r above its control with 95 % intervals, the highest first.",
    "transitivity": "Two maps end to end beside the pair’s own map.",
    "clusters": "Label-wise r with what belongs together side by side.",
    "std_matrix": "How far labels differ: standard deviation of label-wise r.",
    "permuted_matrix": "r of maps fitted on permuted targets: chance.",
    "ridge_path": "r and Hit@1 along the strength of the ridge.",
    "outcomes": "What became of the edits' targets.",
    "reference_weights": "W of the reference where edits generalized and where they did not.",
    "training": "What was measured step by step in training.",
    "forecast": "Risk that was foreseen, by what became of the edit.",
    "generalization": "Generalized by mapping, with and without the compose phase, beside chance.",
    "before_matrix": "r of the old maps on the LM they were fitted on.",
    "after_matrix": "r of the old maps on the new LM.",
    "difference_matrix": "What the new LM took from r.",
    "refitted_matrix": "r of maps fitted on the new LM itself.",
    "kept_matrix": "Share of the refitted maps' r that the old ones keep.",
    "recall": "Recall by knowledge.",
    "profiles": "Tokens of a prompt by layer, as written and shuffled.",
    "range_scalings": "Intrinsic dimension of the tokens by layer and range scaling.",
    "overlap_sizes": "Overlap of the tokens' neighborhoods with the next layer.",
    "dimension_loss": "Intrinsic dimension against loss over prompts.",
    "said": "Contextual entropy against the dimension of the LM's probabilities, and its loss.",
    "token_geometry": "Tokens of the watch texts by layer and step of training.",
    "closeness": "Closeness of two knowledges' prompts against what maps between them reach.",
    "overlap_matrix": "Overlap of the neighborhoods of X under two prompts.",
    "dimension": "Intrinsic dimension of each knowledge's prompts.",
    "rho_by_layer": "Closeness against ties, layer by layer.",
}
_KINDS = {"matrix": "Heat map", "weights": "Heat map", "nulls": "Bars"}


def pictures(run: Run) -> list[Picture]:
    """A run's figures, the known ones first.

    Args:
        run: The run.

    Raises:
        ReportError: One is no PNG or cut short.
    """
    order = list(_CAPTIONS)
    paths = sorted(
        (run.folder / "figures").glob("*.png"),
        key=lambda path: (order.index(path.stem) if path.stem in order else len(order), path.stem),
    )
    return [Picture.read(path, *_caption(path, run)) for path in paths]


def _caption(path: Path, run: Run) -> tuple[str, str]:
    """Caption and alternative text."""
    stem = path.stem
    words = stem.replace("_", " ")
    if stem in _CAPTIONS:
        caption = _CAPTIONS[stem]
    elif stem.startswith("weights_"):
        pair = stem.removeprefix("weights_").replace("-", "→", 1)
        caption = f"W of {pair}: what each source label moves."
    else:
        caption = f"{words.capitalize()}."
    kind = next((k for word, k in _KINDS.items() if word in stem), "Figure")
    table = run.folder / "tables" / f"{stem}.csv"
    where = f" Its numbers are in {table}." if table.is_file() else ""
    return caption, f"{kind}, {run.lm.label}: {caption}{where}"
