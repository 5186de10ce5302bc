"""What a source fine-tune leaves behind: its callbacks' numbers in one file, and its curves."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.io import write_json
from lincorr_lightning.results.callback_results import collect_callback_results
from lincorr_lightning.results.loggers import add_picture, tensorboard_writers
from lincorr_lightning.results.style import write_picture
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from lincorr_lightning.callbacks import Generalization
    from lincorr_lightning.finetune.module import SourceFinetune
    from lincorr_lightning.finetune.results import EditReport

_VERSIONS = ("torch", "lightning", "transformers", "peft")


def write_results(
    module: SourceFinetune, data: EditsDataModule, folder: Path, seconds: float, n_steps: int
) -> None:
    """Write ``results.json``, the edits, the curves, and how good the forecasts were.

    Args:
        module: After training.
        data: Its edits.
        folder: The run's.
        seconds: How long training took.
        n_steps: Optimizer steps of all processes.
    """
    from lincorr_lightning.callbacks import Generalization, GradientCorrelation, Resilience

    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    name = data.relation.name
    settings = dict(module.hparams)
    results: dict[str, Any] = {
        "study": "source_finetune",
        "relation": name,
        "n_edits": len(data.edits),
        "protocol": settings["protocol"],
        "method": settings["method"],
    }
    own: Generalization | None = None
    gradients: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, Generalization):
            if own is None and callback.results.get("relation") == name:
                own = callback
            else:
                results.setdefault("generalizations", {})[callback.tag] = callback.results
        elif isinstance(callback, GradientCorrelation):
            gradients[callback.tag] = callback.results
        elif isinstance(callback, Resilience):
            results.setdefault("resilience", {})[callback.tag] = callback.results
    if own is not None:  # fewer than planned, if training was cut short
        results["n_edits"] = own.results["n_edits"]
    for key in ("source_learned", "generalized", "hallucinated", "unchanged", "random"):
        results[key] = None if own is None else own.results[key]
    for key in ("gradient_correlation", "logit_correlation"):
        results[key] = gradients.get(name, {}).get(key)
    results["gradients"] = gradients
    if own is not None:
        results |= {key: value for key, value in own.results.items() if key not in results}
    results |= collect_callback_results(
        module.trainer, but=(Generalization, GradientCorrelation, Resilience)
    )
    if module.forecasts is not None:
        known = None if own is None else own.report
        results["forecast"] = module.forecasts.write(folder, known)
    results |= {
        "seconds": round(seconds, 2),
        "n_steps": n_steps,
        "lm": module.lm.config.name_or_path,
        "settings": settings,
        "versions": {
            "lincorr_lightning": __version__,
            **{name: importlib.metadata.version(name) for name in _VERSIONS},
        },
    }
    write_json(folder / "results.json", results)
    data.write_edits(folder / "tables" / "edits.csv")
    _draw(module, name, folder, callbacks, None if own is None else own.report)


def _panel(tag: str, relation: str) -> str:
    """Give each relation's correlations a panel of their own, and the outcomes one."""
    group, _, name = tag.removeprefix("edit_step/").rpartition("/")
    if group in ("probability", "control_unchanged"):
        return f"{group.replace('_', ' ')}/{name}"
    if "correlation" in group:
        return f"{name}/{group.replace('_', ' ')}"
    return f"target of {relation}/{name}" if tag.startswith("edit_step/") else tag


def _draw(
    module: SourceFinetune,
    relation: str,
    folder: Path,
    callbacks: list[Any],
    report: EditReport | None,
) -> None:
    from lincorr_lightning.results.style import to_picture
    from lincorr_lightning.results.training_curves import training_curves

    history: dict[str, list[tuple[int, float]]] = {}
    for callback in callbacks:
        for tag, points in getattr(callback, "history", {}).items():
            history.setdefault(_panel(tag, relation), []).extend(points)
    if not history:
        return
    what = f"{module.hparams['protocol']}, {module.hparams['method']}"
    figure = training_curves(
        history,
        f"{relation}: what {module.lm.config.name_or_path} comes to believe",
        f"{what}, learning rate {module.hparams['learning_rate']:g}",
    )
    pictures = {"training": to_picture(figure)}
    write_picture(pictures["training"], folder / "figures" / "training.png")
    if module.forecasts is not None:
        pictures |= module.forecasts.told(report).pictures
    for writer in tensorboard_writers(module.trainer):
        for title, picture in pictures.items():
            add_picture(writer, f"figures/{title}", picture, module.global_step)
