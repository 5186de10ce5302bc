"""A callback that ends a run where its first batch would begin."""

import os
from typing import Any

import lightning as L


class StopAtFirstBatch(L.Callback):
    """Ends the process, without an error, before the first training batch."""

    def on_train_batch_start(self, *args: Any) -> None:
        """Leave at once; nothing is written."""
        del args
        os._exit(0)
