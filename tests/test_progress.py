"""Lines of progress without a terminal, by a clock of the test's own."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero_only

from lincorr_lightning import progress as module
from lincorr_lightning.progress import LoopLines, ProgressLines, progress
from tests.toys import NO_FILES, quiet_trainer


class Clock:
    """Passes when something takes time, never by itself."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def test_the_estimate_is_that_of_the_pace_so_far(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = LoopLines("batch", 12)
    for _ in range(12):
        clock.now += 300
        loop.advance()
    lines = capsys.readouterr().err.splitlines()
    # 3 of 12 in 15 minutes: 9 more at 5 minutes each.
    assert lines[2] == "batch 3 of 12, about 45 min left"
    assert lines[-1] == "batch 12 of 12" and len(lines) == 12
    loop = LoopLines("batch", float("inf"))
    for _ in range(5):  # in 50 seconds: none; then one line a minute
        clock.now += 25
        loop.advance()
    assert capsys.readouterr().err.splitlines() == ["batch 3"]


class Reading(BoringModel):
    """Each batch takes ten minutes, and the end of training twenty solutions of a minute."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 600
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        for _ in progress(range(20), "solving"):
            self.clock.now += 60


def lines_of_a_fit(clock: Clock, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    options = {"limit_train_batches": 2, "limit_val_batches": 0, "enable_progress_bar": True}
    trainer = quiet_trainer(folder, callbacks=[ProgressLines()], max_epochs=2, **NO_FILES | options)
    trainer.fit(Reading(clock))
    return [line for line in capsys.readouterr().err.splitlines() if " of " in line]


def test_lines_of_a_fit(clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of_a_fit(clock, tmp_path, capsys)
    assert lines[:4] == [
        "training, batch 1 of 4, about 30 min left",
        "training, batch 2 of 4, about 20 min left",
        "training, batch 3 of 4, about 10 min left",
        "training, batch 4 of 4",
    ]
    assert lines[4] == "solving 1 of 20, about 19 min left"
    assert lines[-1] == "solving 20 of 20"


def test_other_ranks_print_nothing(
    clock: Clock,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(L.Trainer, "is_global_zero", False)
    assert lines_of_a_fit(clock, tmp_path, capsys) == []
