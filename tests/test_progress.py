"""Lines of progress without a terminal, by a clock of the test's own."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel

from lincorr_lightning import progress as module
from lincorr_lightning.cli import main
from lincorr_lightning.progress import Loop, ProgressLines, progress

TRAINER: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


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


@pytest.mark.parametrize(
    ("seconds", "text"), [(20, "0 min"), (90, "2 min"), (3599, "1 h 0 min"), (7500, "2 h 5 min")]
)
def test_minutes(seconds: float, text: str) -> None:
    assert module.minutes(seconds) == text


def test_the_estimate_is_that_of_the_pace_so_far() -> None:
    # 3 of 12 in 15 minutes: 9 more at 5 minutes each.
    assert Loop("batch", 12, 100.0, done=3).text(100.0 + 900) == "batch 3 of 12, about 45 min left"
    assert Loop("batch", 12, 0.0).text(600.0) == "batch 0 of 12"
    assert Loop("batch", 12, 0.0, done=12).text(600.0) == "batch 12 of 12"
    assert Loop("batch", float("inf"), 0.0, done=7).text(600.0) == "batch 7"


class Reading(BoringModel):
    """Each batch takes ten minutes, and the end of training twenty solutions of a minute."""

    def __init__(self, clock: Clock, look: Callable[[], None]) -> None:
        super().__init__()
        self.clock, self.look = clock, look

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 600
        self.look()
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        for i in progress(range(20), "solving"):
            self.clock.now += 60
            if i in (0, 4):
                self.look()


def test_lines_of_a_fit(clock: Clock, tmp_path: Any) -> None:
    lines = ProgressLines(clock=clock, wait=lambda _: True)
    seen: list[str] = []
    trainer = L.Trainer(
        callbacks=[lines],
        limit_train_batches=2,
        limit_val_batches=0,
        max_epochs=2,
        default_root_dir=tmp_path,
        **TRAINER,
    )
    trainer.fit(Reading(clock, lambda: seen.append(lines.line())))
    assert seen == [
        "after 10 min: training, batch 0 of 4",
        "after 20 min: training, batch 1 of 4, about 1 h 0 min left",
        "after 30 min: training, batch 2 of 4, about 30 min left",
        "after 40 min: training, batch 3 of 4, about 13 min left",
        "after 41 min: solving 0 of 20",
        "after 45 min: solving 4 of 20, about 20 min left",
    ]
    assert lines.line().endswith(": computing"), "a loop that has ended is forgotten"


def test_a_line_at_least_once_a_minute_however_long_a_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()

    def wait(seconds: float) -> bool:
        assert seconds <= 60
        clock.now += seconds
        return clock.now > 5 * 60  # when the run ends

    ProgressLines(clock=clock, wait=wait).watch()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"after {i} min: computing" for i in range(1, 6)]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_lines_stand_in_for_a_bar_without_a_terminal(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    cli = main(
        [
            "fit",
            "--config",
            "linear_probe.yaml",
            "--data.n_subjects=40",
            "--model.random_labels=0",
            "--model.pairs=[city->country]",
            f"--trainer.default_root_dir={tmp_path}",
            "--trainer.fast_dev_run=true",
        ]
    )
    assert isinstance(
        cli.trainer.progress_bar_callback, RichProgressBar if is_terminal else ProgressLines
    )
