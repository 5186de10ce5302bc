"""Settings of a reproduction, from a YAML file and the command line."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveInt

from lincorr_lightning.config import find_config, read_config
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.option_errors import explain


class StudyConfig(TypedDict):
    """Config of a study, packaged or a path, and options of `lincorr` that are changed in it."""

    config: str
    options: dict[str, Any]


class Size(TypedDict):
    """The studies: the probes, the edits, the ablations, and the probes' maps on the tuned LM."""

    probe: StudyConfig
    edits: StudyConfig
    ablation: StudyConfig
    after: StudyConfig


@dataclass(frozen=True)
class Settings:
    """Settings of a reproduction; ``configs/reproduce.yaml`` explains them."""

    lm: list[str]
    after: list[str]
    size: str
    only: list[str]
    top: PositiveInt
    output: str
    overlays: list[str]
    options: dict[str, Any]
    sizes: dict[str, Size]

    @property
    def studies(self) -> Mapping[str, StudyConfig]:
        """Configs of the chosen size, by study."""
        studies: Any = self.sizes[self.size]
        return dict(studies)

    def option(self, study: str, key: str) -> Any:
        """Return an option of a study, as ``data.n_subjects``; None if it has none."""
        chosen = self.studies[study]
        for options in (chosen["options"], self.options):
            if key in options:
                return options[key]
        part, _, name = key.partition(".")
        config: Any = read_config(find_config(chosen["config"]))
        return config.get(part, {}).get("init_args", {}).get(name)


def read_settings(path: str, changed: Mapping[str, Any], options: Mapping[str, Any]) -> Settings:
    """Read the settings.

    Args:
        path: The YAML file.
        changed: Settings that replace those of the file; None leaves a setting as it is.
        options: Options that come before those of the file: of all runs, as ``model.lm.dtype``,
            or of one study, as ``edits.data.n_edits``.
    """
    content = read_config(path) | {k: v for k, v in changed.items() if v is not None}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Settings)
    try:
        settings = Settings(**parser.parse_object(content).as_dict())
    except ArgumentError as error:
        raise ConfigError(f"{path}: {explain(error, ['--config', path], parser)}") from error
    if settings.size not in settings.sizes:
        raise ConfigError(f"size is {settings.size!r}; {path} has {', '.join(settings.sizes)}.")
    if not settings.lm:
        raise ConfigError("name an LM, as in: lincorr reproduce --lm MY/CHECKPOINT")
    if settings.after and len(settings.after) != len(settings.lm):
        raise ConfigError(
            f"there are {len(settings.after)} tuned LMs for {len(settings.lm)} LMs. Pass "
            "--after once for each --lm, in the same order, or not at all."
        )
    studies = settings.studies
    everywhere = {k: v for k, v in options.items() if k.partition(".")[0] not in studies}
    settings.options.update(everywhere)
    for config in studies.values():
        config["options"].update(everywhere)
    for key in options.keys() - everywhere.keys():
        study, _, name = key.partition(".")
        studies[study]["options"][name] = options[key]
    return settings
