"""Writing what `SparseAutoencoders` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lincorr_lightning.io import write_json
from lincorr_lightning.metrics import Reconstruction
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.provenance import versions
from lincorr_lightning.results.style import save_figure, short_name
from lincorr_lightning.results.training_curves import (
    MOST_CURVES,
    History,
    training_curves,
)
from lincorr_lightning.sae import KINDS, HookPoint
from lincorr_lightning.sae.results import SAEReport, SAEScore, densities
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lincorr_lightning.sae.module import SparseAutoencoders

SAE_FOLDER = "sparse_autoencoders"


def report_of(
    lm: str, saes: Mapping[HookPoint, SparseAutoencoder], found: Reconstruction
) -> SAEReport:
    """Put what a metric found in words.

    Args:
        lm: Name of the LM.
        saes: In the metric's order.
        found: By the metric.
    """
    sizes = [sae.n_features for sae in saes.values()]
    frequency = found.frequency.cpu()
    recovered = found.loss_recovered
    scores = [
        SAEScore(
            kind=hook_point.kind,
            layer=hook_point.layer,
            n_features=sizes[i],
            explained_variance=number(float(found.explained_variance[i])),
            l0=float(found.l0[i]),
            dead=float((frequency[i, : sizes[i]] == 0).double().mean()),
            loss_recovered=number(float(recovered[i])),
            loss_spliced=float(found.spliced[i]),
            loss_ablated=float(found.ablated[i]),
        )
        for i, hook_point in enumerate(saes)
    ]
    return SAEReport(lm, found.n_tokens, found.clean, scores, densities(frequency.numpy(), sizes))


def training_figure(history: History, lm: str) -> Figure:
    """Curves of all SAEs: in one panel, or of each kind of place where one cannot hold them.

    Args:
        history: (step, value) pairs by tag, as ``dead/residual.3``.
        lm: Name of the LM.
    """
    title = f"Training of {short_name(lm)}'s SAEs"
    names = {name for tag in history if (name := tag.partition("/")[2])}
    if len(names) <= MOST_CURVES:
        return training_curves(history, title)
    layers: dict[str, list[int]] = {}
    for kind, _, counted in (name.rpartition(".") for name in names):
        layers.setdefault(kind, []).append(int(counted))
    panels: dict[str, Sequence[tuple[int, float]]] = {}
    for what in dict.fromkeys(tag.partition("/")[0] for tag in history):
        for kind, own in sorted(layers.items(), key=lambda each: KINDS.index(each[0])):  # type: ignore[arg-type]
            own.sort()
            n = min(len(own), MOST_CURVES)
            # From the first to the last, evenly.
            shown = [own[round(i * (len(own) - 1) / max(n - 1, 1))] for i in range(n)]
            some = f" ({n} of {len(own)})" if n < len(own) else ""
            for layer in shown:
                points = history.get(f"{what}/{kind}.{layer}")
                if points is not None:
                    panels[f"{what}, {kind}{some}/layer {layer}"] = points
    alone = {tag: points for tag, points in history.items() if "/" not in tag}
    return training_curves(panels | alone, title, most_panels=len(panels | alone))


def write_results(module: SparseAutoencoders, folder: Path, seconds: float | None) -> None:
    """Write SAEs, numbers, tables and figures.

    Args:
        module: The study after its run.
        folder: The run's.
        seconds: Of training; None for a run that only scores.

    Raises:
        OutputError: It cannot be written.
    """
    data = module.trainer.datamodule  # type: ignore[attr-defined]
    if seconds is not None:
        for hook_point, sae in module.trained().items():
            sae.save(folder / SAE_FOLDER / hook_point.id)
    report = module.report
    results = {
        **({"study": "sparse_autoencoders"} if report is None else report.results()),
        "n_texts": data.n_texts,
        "n_steps": module.trainer.global_step,
        "n_tokens": module.n_tokens,
        "seconds": None if seconds is None else round(seconds, 1),
        "settings": {**module.hparams, "data": dict(data.hparams)},
        "versions": versions(),
    }
    write_json(folder / "results.json", results)
    if module.history:
        figure = training_figure(module.history, module.lm.config.name_or_path)
        save_figure(figure, folder / "figures" / "training.png")
    if report is not None:
        report.write(folder)
        report.show(module.trainer)
