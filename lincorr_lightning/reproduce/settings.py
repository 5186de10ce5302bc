"""Settings of a reproduction, from a YAML file and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lincorr_lightning.config import read_config
from lincorr_lightning.errors import ConfigError, require

STUDIES = ("probe", "edits", "ablation", "after")
"""What each size configures: the probes, the edits, the ablations, and the tuned LM."""
EXAMPLE = "configs/reproduce.yaml"


@dataclass(frozen=True)
class StudyConfig:
    """Config of a study, and what is changed in it.

    Attributes:
        config: Packaged config, or a path.
        options: Options of `lincorr`, as ``data.n_subjects``, and their values.
    """

    config: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """Settings of a reproduction, see ``configs/reproduce.yaml``.

    Attributes:
        lm: Folders, .gguf files or hub ids of the LMs.
        after: The same LMs after post-training, one for each or none.
        size: A key of `sizes`.
        only: Tables and figures, such as ``table5``; all if empty.
        top: Number of labels in the files of influences.
        output: Folder of runs and page.
        overlays: Configs that are laid over those of all runs, as ``trainer/gpu.yaml``.
        options: Options of all runs, as ``model.lm.dtype``, and their values.
        sizes: Size -> study -> its config.
    """

    lm: tuple[str, ...]
    after: tuple[str, ...]
    size: str
    only: tuple[str, ...]
    top: int
    output: str
    overlays: tuple[str, ...]
    options: Mapping[str, Any]
    sizes: Mapping[str, Mapping[str, StudyConfig]]

    @property
    def studies(self) -> Mapping[str, StudyConfig]:
        """Configs of the chosen size."""
        return self.sizes[self.size]


def read_settings(path: str | Path, changed: Mapping[str, Any]) -> Settings:
    """Read the settings.

    Args:
        path: The YAML file.
        changed: Settings that replace those of the file; None leaves a setting as it is.

    Raises:
        ConfigError: The file cannot be read, lacks a setting or has an unknown one, or a setting is
            out of range; the message names it.
    """
    content = read_config(str(path)) | {k: v for k, v in changed.items() if v is not None}
    names = {field.name for field in fields(Settings)}
    for name in sorted(names ^ set(content)):
        problem = "lacks" if name in names else "has the unknown setting"
        raise ConfigError(f"{path} {problem} {name}. The settings are {', '.join(sorted(names))}.")
    for name in ("lm", "after", "only", "overlays"):
        if not _is_texts(content[name]):
            raise ConfigError(f"{path}: {name} is {content[name]!r}; it must be a list of texts.")
        content[name] = tuple(content[name])
    if not isinstance(content["top"], int):
        raise ConfigError(f"{path}: top is {content['top']!r}; it must be a whole number.")
    require("top", content["top"], at_least=1)
    if not isinstance(content["output"], str):
        raise ConfigError(f"{path}: output is {content['output']!r}; it must be a folder.")
    if not isinstance(content["options"], Mapping) or not _is_mapping(content["sizes"]):
        raise ConfigError(f"{path}: options and sizes must be mappings, as in {EXAMPLE}.")
    sizes = {
        str(size): {study: _study(path, size, study, one) for study, one in studies.items()}
        for size, studies in content["sizes"].items()
    }
    if content["size"] not in sizes:
        raise ConfigError(f"size is {content['size']!r}; {path} has {', '.join(sizes)}.")
    missing = [study for study in STUDIES if study not in sizes[content["size"]]]
    if missing:
        raise ConfigError(f"{path}: sizes.{content['size']} lacks {missing[0]}.")
    if not content["lm"]:
        raise ConfigError("name an LM, as in: lincorr reproduce --lm MY/CHECKPOINT")
    if content["after"] and len(content["after"]) != len(content["lm"]):
        raise ConfigError(
            f"there are {len(content['after'])} tuned LMs for {len(content['lm'])} LMs. Pass "
            "--after once for each --lm, in the same order, or not at all."
        )
    return Settings(**content | {"sizes": sizes})


def with_options(settings: Settings, options: Mapping[str, Any]) -> Settings:
    """Return the settings with options from the command line, which come before all others.

    Args:
        settings: The settings.
        options: Options of all runs, as ``model.lm.dtype``, or of one study, as
            ``edits.data.n_edits``.
    """
    everywhere = {k: v for k, v in options.items() if k.partition(".")[0] not in STUDIES}
    studies = {
        name: replace(
            study,
            options={
                **study.options,
                **everywhere,
                **{
                    key.removeprefix(f"{name}."): value
                    for key, value in options.items()
                    if key.startswith(f"{name}.")
                },
            },
        )
        for name, study in settings.studies.items()
    }
    return replace(
        settings,
        options={**settings.options, **everywhere},
        sizes={**settings.sizes, settings.size: studies},
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(one, str) for one in value) and (
        not isinstance(value, str)
    )  # fmt: skip


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(one, Mapping) for one in value.values())


def _study(path: str | Path, size: str, study: str, content: Any) -> StudyConfig:
    where = f"{path}: sizes.{size}.{study}"
    if study not in STUDIES:
        raise ConfigError(f"{where} is unknown. A size has {', '.join(STUDIES)}.")
    is_valid = isinstance(content, Mapping) and set(content) == {"config", "options"}
    if not is_valid or not isinstance(content["options"], Mapping):
        raise ConfigError(f"{where} must have config and options, as in {EXAMPLE}.")
    return StudyConfig(str(content["config"]), dict(content["options"]))
