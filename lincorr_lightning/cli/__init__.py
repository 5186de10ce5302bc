"""The program `lincorr`: the Trainer commands of LightningCLI, and a few commands beside them."""

from lincorr_lightning.cli.entry_point import console
from lincorr_lightning.cli.program import (
    COMMANDS,
    TRAINER_COMMANDS,
    main,
    overview,
    study_commands,
)

__all__ = ["COMMANDS", "TRAINER_COMMANDS", "console", "main", "overview", "study_commands"]
