"""Signals end a run in seconds, with one line and, where possible, a checkpoint to resume from."""

import os
import pkgutil
import signal
from functools import partial, wraps
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from lincorr_lightning import cli
from lincorr_lightning.cli import program
from lincorr_lightning.errors import OutputError
from lincorr_lightning.lightning_workarounds import AtomicCheckpointIO
from tests.launching import run_alone, run_in_two, run_program
from tests.small_runs import SMALL_RUNS, results_of

pytestmark = pytest.mark.slow

CLASSES = {
    "full, joint": "lincorr_lightning.finetune.module:SourceFinetune",
    "ablation": "lincorr_lightning.ablation.module:VocabularyAblation",
    "probe": "lincorr_lightning.probe.module:LinearProbe",
}
AUDIT = "lincorr_lightning.knowledge.audit:audit"


def _send(where: str, call: int, signum: int, again: bool = False) -> None:
    """Let this process receive a signal at a call of ``module:object.function``."""
    owner, _, name = where.replace(":", ".").rpartition(".")
    holder = pkgutil.resolve_name(owner)
    function, calls = getattr(holder, name), []

    @wraps(function)  # with its signature, from which the command line is made
    def signalled(*args: Any, **more: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signum)
            if again:
                sleep(1.1)
                os.kill(os.getpid(), signum)
        return function(*args, **more)

    setattr(holder, name, signalled)


def _program(arguments: list[str], stderr: Path, *signalled: Any) -> None:
    """Run the program, which receives a signal."""
    _send(*signalled)
    run_program(arguments, stderr)


def _send_to_rank(signalled: int, where: str, call: int, signum: int, rank: int) -> None:
    if rank == signalled:
        _send(where, call, signum)


def _program_that_cannot_save(*args: Any) -> None:
    """Run the program, which receives a signal and cannot save a checkpoint."""

    def fail(*args: Any, **more: Any) -> None:
        raise OutputError("cannot write the checkpoint: no space.")

    AtomicCheckpointIO.save_checkpoint = fail  # type: ignore[method-assign]
    _program(*args)


INTERRUPTED, TERMINATED = "lincorr: interrupted", "lincorr: terminated"
STEP = "training_step"


@pytest.mark.parametrize(
    ("program", "study", "signalled", "lines"),
    [
        (_program, "probe", (f"{CLASSES['probe']}.{STEP}", 1, signal.SIGINT), [INTERRUPTED]),
        (_program, "probe", (f"{CLASSES['probe']}.on_train_end", 1, signal.SIGTERM), [TERMINATED]),
        (_program, "audit", (AUDIT, 1, signal.SIGINT), [INTERRUPTED]),
        # The second signal ends the run within a step.
        (
            _program,
            "full, joint",
            (f"{CLASSES['full, joint']}.{STEP}", 3, signal.SIGTERM, True),
            [TERMINATED],
        ),
        (
            _program_that_cannot_save,
            "full, joint",
            (f"{CLASSES['full, joint']}.{STEP}", 2, signal.SIGTERM),
            ["lincorr: error: cannot write the checkpoint: no space.", TERMINATED],
        ),
    ],
)
def test_a_run_that_cannot_be_resumed(
    program: Any, study: str, signalled: Any, lines: list[str], inputs: Path, tmp_path: Path
) -> None:
    stderr = tmp_path / "stderr"
    arguments = ["audit"]
    if study != "audit":
        arguments = SMALL_RUNS[study].command(inputs, tmp_path)
    status = run_alone(program, arguments, stderr, *map(_plain, signalled))
    assert status == (130 if lines == [INTERRUPTED] else 143)
    written = stderr.read_text().splitlines()
    assert written[-len(lines) :] == lines
    assert not any("Traceback" in line or "Interrupt" in line for line in written)
    assert not list(tmp_path.rglob("results.json"))


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, signal.Signals) else value


@pytest.mark.parametrize(
    ("study", "where", "call"),
    [
        ("ablation", f"{CLASSES['ablation']}.training_step", 3),
        ("full, joint", "lincorr_lightning.results.run_folder:write_parts", 1),
    ],
)
def test_a_run_that_a_signal_ends_can_be_resumed(
    study: str, where: str, call: int, inputs: Path, tmp_path: Path
) -> None:
    small = SMALL_RUNS[study]
    cli.main(small.command(inputs, tmp_path / "whole"))
    stderr = tmp_path / "stderr"
    signalled = (where, call, int(signal.SIGTERM))
    assert run_alone(_program, small.command(inputs, tmp_path / "run"), stderr, *signalled) == 143
    assert not list((tmp_path / "run").rglob("results.json"))
    (checkpoint,) = (tmp_path / "run").rglob("*.ckpt")
    *before, line = stderr.read_text().splitlines()
    assert line == f"lincorr: terminated; resume with --ckpt_path {checkpoint}"
    assert not any("Traceback" in other or "lincorr:" in other for other in before)
    cli.main(small.command(inputs, tmp_path / "resumed", f"--ckpt_path={checkpoint}"))
    assert results_of(tmp_path / "resumed") == results_of(tmp_path / "whole")


def test_a_reproduction_goes_on_with_the_same_command(small_lm: str, tmp_path: Path) -> None:
    page, stderr = str(tmp_path / "page"), tmp_path / "stderr"
    option = "--option=probe.data.n_subjects=80"
    arguments = ["reproduce", "--only=figure3", option, "--lm", small_lm, "--output", page]
    signalled = (f"{CLASSES['probe']}.{STEP}", 1, int(signal.SIGTERM))
    assert run_alone(_program, arguments, stderr, *signalled) == 143
    last = stderr.read_text().splitlines()[-1]
    assert last == f"{TERMINATED}; start the same command again to go on"


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_ranks_stop_after_the_same_step(rank: int, inputs: Path, tmp_path: Path) -> None:
    """Only one rank receives the signal."""
    small, two = SMALL_RUNS["full, joint"], ("--config", "trainer/ddp_cpu.yaml")
    signalled = (f"{CLASSES['full, joint']}.training_step", 3, int(signal.SIGTERM))
    done = run_in_two(
        *small.command(inputs, tmp_path / "run", *two),
        prepare=partial(_send_to_rank, rank, *signalled),
    )
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr
    (checkpoint,) = (tmp_path / "run").rglob("*.ckpt")
    assert [line for line in done.stderr.splitlines() if line.startswith("lincorr:")] == [
        f"lincorr: terminated; resume with --ckpt_path {checkpoint}"
    ]
    resumed = f"--ckpt_path={checkpoint}"
    done = run_in_two(*small.command(inputs, tmp_path / "resumed", *two, resumed))
    assert done.returncode == 0, done.stderr
    assert results_of(tmp_path / "resumed")["n_edits"] == 5


def test_another_rank_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer")

    monkeypatch.setattr(program, "main", fail)
    with pytest.raises(SystemExit) as stop:
        cli.console()
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("lincorr: error: another process of this run failed")
