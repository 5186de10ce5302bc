"""The program `lincorr`: the Trainer commands of LightningCLI, and a few commands beside them."""

from lincorr_lightning.cli.program import (
    COMMANDS,
    TRAINER_COMMANDS,
    console,
    main,
    overview,
    study_commands,
)

__all__ = ["COMMANDS", "TRAINER_COMMANDS", "console", "main", "overview", "study_commands"]
