"""Writing what `SparseAutoencoders` found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lincorr_lightning.metrics import Reconstruction
from lincorr_lightning.modules.provenance import versions
from lincorr_lightning.reporting import save_figure, write_json
from lincorr_lightning.reporting.numbers import number
from lincorr_lightning.reporting.sae_report import SAEReport, SAEScore, densities
from lincorr_lightning.reporting.training_curves import training_curves
from lincorr_lightning.sae import Place, SparseAutoencoder

if TYPE_CHECKING:
    from lincorr_lightning.modules.sparse_autoencoders import SparseAutoencoders

SAE_FOLDER = "sparse_autoencoders"


def report_of(lm: str, saes: Mapping[Place, SparseAutoencoder], found: Reconstruction) -> SAEReport:
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
            kind=place.kind,
            layer=place.layer,
            n_features=sizes[i],
            explained_variance=number(float(found.explained_variance[i])),
            l0=float(found.l0[i]),
            dead=float((frequency[i, : sizes[i]] == 0).double().mean()),
            loss_recovered=number(float(recovered[i])),
            loss_spliced=float(found.spliced[i]),
            loss_ablated=float(found.ablated[i]),
        )
        for i, place in enumerate(saes)
    ]
    return SAEReport(lm, found.n_tokens, found.clean, scores, densities(frequency.numpy(), sizes))


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
        for place, sae in module.trained().items():
            sae.save(folder / SAE_FOLDER / place.id)
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
        figure = training_curves(
            module.history, f"Training of {module.lm.config.name_or_path}'s SAEs"
        )
        save_figure(figure, folder / "figures" / "training.png")
    if report is not None:
        report.write(folder)
        report.show(module.trainer)
