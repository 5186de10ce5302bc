"""What a probe leaves on the disk, and takes back from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn

from lincorr_lightning.data.subjects import SubjectsDataModule
from lincorr_lightning.errors import ConfigError, LinearMapError, SubjectsError
from lincorr_lightning.io import write_csv
from lincorr_lightning.linear_map.affine_map import AffineMap
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.solver import split_targets
from lincorr_lightning.results.run_folder import run_folder

if TYPE_CHECKING:
    from lincorr_lightning.probe.module import LinearProbe


def write_inputs(probe: LinearProbe) -> None:
    """Write which X is in which half, when the X's are ours."""
    datamodule = getattr(probe.trainer, "datamodule", None)
    if isinstance(datamodule, SubjectsDataModule):
        path = run_folder(probe.trainer) / "tables" / "inputs.csv"
        write_csv(path, ("x", "half"), datamodule.table())


def write_report(probe: LinearProbe) -> None:
    """Write maps, scores, tables and figures, and log them to TensorBoard."""
    folder = run_folder(probe.trainer)
    # The maps first: they are what took the time.
    to_linear_map(probe).save(folder / "linear_map")
    if probe.report is None:
        rank_zero_warn(f"nothing was scored, so {folder} holds the maps alone")
        return
    probe.report.write(folder)
    for logger in probe.trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            probe.report.log_to_tensorboard(logger.experiment, probe.global_step)


def to_linear_map(probe: LinearProbe) -> LinearMap:
    """The fitted maps as an artifact of their own."""
    weights, biases = {}, {}
    for source in probe.layout.sources:
        module = cast(AffineMap, probe.maps[source]).cpu_copy()
        for target, weight in split_targets(probe.layout, source, module.weight, dim=0):
            weights[f"{source}->{target}"] = weight
        for target, bias in split_targets(probe.layout, source, module.bias):
            biases[f"{source}->{target}"] = bias
    domains = probe.layout.domains
    return LinearMap(
        weights=weights,
        biases=biases,
        token_ids={name: domain.token_ids for name, domain in domains.items()},
        labels={name: domain.texts for name, domain in domains.items()},
        templates={name: domain.knowledge.template for name, domain in domains.items()},
        ridge={f"{s}->{t}": ridge for (s, t), ridge in probe.ridges.items()},
        lm=probe.lm.config.name_or_path,
        fingerprint=probe.lm.fingerprint,
    )


def checkpoint_entry(probe: LinearProbe) -> dict[str, Any]:
    """What a checkpoint says of the maps in it."""
    return {
        "token_ids": {name: d.token_ids for name, d in probe.layout.domains.items()},
        "prompts": _prompts(probe),
        "ridge": probe.hparams["ridge"],
        "fit_subjects": probe.fit_subjects,
        "ridges": {f"{s}->{t}": ridge for (s, t), ridge in probe.ridges.items()},
        "fitted_on": probe.fitted_on,
    }


def _prompts(probe: LinearProbe) -> dict[str, str | None]:
    templates = {name: d.knowledge.template for name, d in probe.layout.domains.items()}
    return {**templates, "control": probe.hparams["control"]}


def check_fitted(probe: LinearProbe) -> None:
    """Refuse maps of zeros.

    Raises:
        ConfigError: The run neither fits nor has a checkpoint.
    """
    doing = probe.trainer.state.fn
    if not probe.fitted_on and doing is not None and doing != "fit":
        raise ConfigError(
            f"there is no map to {doing.value} yet. Run `lincorr fit` first and pass its "
            "checkpoint with --ckpt_path."
        )


def check_held_out(probe: LinearProbe) -> None:
    """Refuse to score maps on X's that they were fitted on.

    Raises:
        SubjectsError: X's that the checkpoint was fitted on are among those held out.
    """
    datamodule = getattr(probe.trainer, "datamodule", None)
    if not isinstance(datamodule, SubjectsDataModule):
        return
    held_out = datamodule.halves["test"]
    seen = set(probe.fit_subjects) & set(held_out)
    if seen:
        raise SubjectsError(
            f"{len(seen)} of the {len(held_out)} held-out X's, such as {min(seen)!r}, are among "
            "those that the checkpoint was fitted on. Use the data settings of the run that wrote "
            "it (its config.yaml), or other X's."
        )


def restore_entry(probe: LinearProbe, stored: dict[str, Any]) -> None:
    """Take over what a checkpoint says, if it is of the same labels and pairs.

    Raises:
        LinearMapError: It is not; the message says what differs.
    """
    ours = {f"{s}->{t}" for s, t in probe.layout.pairs}
    if set(stored["ridges"]) != ours:
        raise LinearMapError(
            f"the checkpoint fits {sorted(stored['ridges'])}, this run {sorted(ours)}. "
            "Ask for the same knowledges and pairs, or fit again."
        )
    for name, domain in probe.layout.domains.items():
        if stored["token_ids"][name] != domain.token_ids:
            raise LinearMapError(
                f"the labels of {name} are not those the checkpoint was fitted on. "
                "Use the same model.knowledge_files, or fit again."
            )
    for name, template in _prompts(probe).items():
        if stored["prompts"].get(name) != template:
            raise LinearMapError(
                f"the checkpoint was fitted with the {name} prompt "
                f"{stored['prompts'].get(name)!r}, this run has {template!r}. Use the settings of "
                "the run that wrote it (its config.yaml), or fit again."
            )
    # What only a fit can set is the checkpoint's.
    probe.hparams["ridge"] = stored["ridge"]
    probe.fit_subjects = stored["fit_subjects"]
    probe.ridges = {(s, t): stored["ridges"][f"{s}->{t}"] for s, t in probe.layout.pairs}
    probe.fitted_on = stored["fitted_on"]
