"""Signals end a run in seconds, with one line and, where possible, a checkpoint to resume from."""

import ctypes
import json
import os
import pkgutil
import signal
import sys
from functools import partial, wraps
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from lincorr_lightning import cli
from lincorr_lightning.checkpoints import AtomicCheckpointIO
from lincorr_lightning.errors import OutputError
from tests.launching import run_alone, run_in_two

QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
FINETUNE = [
    "fit", "--config", "source_finetune.yaml", "--model.protocol=joint", "--model.forecast=false",
    "--trainer.max_epochs=4", "--model.edits_per_step=4", "--data.n_edits=11",
]  # fmt: skip
ABLATION = [
    "fit", "--config", "vocabulary_ablation.yaml", "--data.n_paired=40", "--data.n_new=13",
    "--data.max_source_labels=null", "--model.compose.epochs=3", "--model.learn.epochs=5",
    "--model.mapping=[reference,permuted]",
]  # fmt: skip
PROBE = [
    "fit", "--config", "linear_probe.yaml", "--data.n_subjects=100",
    "--model.knowledge=[city,country]",
]  # fmt: skip
STUDIES = {"finetune": FINETUNE, "ablation": ABLATION, "probe": PROBE}
CLASSES = {
    "finetune": "lincorr_lightning.finetune.module:SourceFinetune",
    "ablation": "lincorr_lightning.ablation.module:VocabularyAblation",
    "probe": "lincorr_lightning.probe.module:LinearProbe",
}
# Ends with the process only: a mutex that is locked twice, without Python's own lock.
_MUTEX = ctypes.create_string_buffer(64)


def _block() -> None:
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(_MUTEX)
    libc.pthread_mutex_lock(_MUTEX)


def _send(where: str, call: int, signum: int, blocks: bool = False) -> None:
    """Let this process receive a signal at a call of ``module:object.function``."""
    owner, _, name = where.replace(":", ".").rpartition(".")
    holder = pkgutil.resolve_name(owner)
    function, calls = getattr(holder, name), []

    @wraps(function)  # with its signature, from which the command line is made
    def signalled(*args: Any, **more: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signum)
            if blocks:
                _block()
        return function(*args, **more)

    setattr(holder, name, signalled)


def _program(arguments: list[str], stderr: Path, *signalled: Any) -> None:
    """Run the program, which receives a signal."""
    with stderr.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = ["lincorr", *arguments]
    _send(*signalled)
    cli.console()


def _send_to_rank(signalled: int, where: str, call: int, signum: int, rank: int) -> None:
    if rank == signalled:
        _send(where, call, signum)


def _audit_with_a_finalizer(arguments: list[str], stderr: Path) -> None:
    """Run ``lincorr audit``, which receives a signal in a finalizer and goes on."""

    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            monotonic()

    def audit(lm: str = "any") -> None:
        Finalized()
        while True:
            monotonic()

    pkgutil.resolve_name("lincorr_lightning.knowledge.audit").audit = audit
    _program(arguments, stderr, "time:monotonic", 0, 0)


def _program_on_a_full_disk(*args: Any) -> None:
    """Run the program, which receives a signal and cannot save a checkpoint."""

    def fail(*args: Any, **more: Any) -> None:
        raise OutputError("cannot write the checkpoint: the disk is full.")

    AtomicCheckpointIO.save_checkpoint = fail  # type: ignore[method-assign]
    _program(*args)


@pytest.fixture
def command(small_lm: str, tmp_path: Path) -> Any:
    """Function that returns the command line of a study and its folder."""

    def made(study: str, name: str, *more: str) -> list[str]:
        root = f"--trainer.default_root_dir={tmp_path / name}"
        return [*STUDIES[study], f"--model.lm.name_or_path={small_lm}", root, *QUIET, *more]

    return made


def results(folder: Path) -> dict[str, Any]:
    """The numbers of the only run in a folder."""
    (path,) = folder.rglob("results.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    return {k: v for k, v in found.items() if k not in ("seconds", "settings", "versions")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "where", "call"),
    [
        ("ablation", f"{CLASSES['ablation']}.training_step", 3),
        ("finetune", "lincorr_lightning.study:write_results", 1),
    ],
)
def test_a_run_that_a_signal_ends_can_be_resumed(
    study: str, where: str, call: int, command: Any, tmp_path: Path
) -> None:
    cli.main(command(study, "whole"))
    stderr = tmp_path / "stderr"
    signalled = (where, call, int(signal.SIGTERM))
    assert run_alone(_program, command(study, "run"), stderr, *signalled) == 143
    assert not list((tmp_path / "run").rglob("results.json"))
    (checkpoint,) = (tmp_path / "run").rglob("*.ckpt")
    *before, line = stderr.read_text().splitlines()
    assert line == f"lincorr: terminated; resume with --ckpt_path {checkpoint}"
    assert not any("Traceback" in other or "lincorr:" in other for other in before)
    cli.main(command(study, "resumed", "--ckpt_path", str(checkpoint)))
    assert results(tmp_path / "resumed") == results(tmp_path / "whole")


@pytest.mark.parametrize(
    ("where", "signum", "status", "line"),
    [
        ("training_step", signal.SIGINT, 130, "lincorr: interrupted"),
        ("setup", signal.SIGTERM, 143, "lincorr: terminated"),
        ("on_fit_end", signal.SIGTERM, 143, "lincorr: terminated"),
    ],
)
def test_a_run_that_cannot_be_resumed(
    where: str, signum: int, status: int, line: str, command: Any, tmp_path: Path
) -> None:
    stderr = tmp_path / "stderr"
    signalled = (f"{CLASSES['probe']}.{where}", 1, int(signum))
    assert run_alone(_program, command("probe", "run"), stderr, *signalled) == status
    lines = stderr.read_text().splitlines()
    assert lines[-1] == line
    assert not any("Traceback" in other or "Interrupt" in other for other in lines)
    assert not list((tmp_path / "run").rglob("results.json"))


@pytest.mark.parametrize("command_name", ["audit", "report"])
def test_commands_without_a_trainer(command_name: str, small_lm: str, tmp_path: Path) -> None:
    module, function, _ = cli.COMMANDS[command_name]
    arguments = {"audit": ["--lm", small_lm], "report": [str(tmp_path)]}[command_name]
    stderr = tmp_path / "stderr"
    signalled = (f"{module}:{function}", 1, int(signal.SIGINT))
    assert run_alone(_program, [command_name, *arguments], stderr, *signalled) == 130
    assert stderr.read_text() == "lincorr: interrupted\n"


@pytest.mark.slow
def test_a_reproduction_goes_on_with_the_same_command(small_lm: str, tmp_path: Path) -> None:
    arguments = [
        "reproduce", "--only=figure3", "--lm", small_lm, "--output", str(tmp_path / "page"),
    ]  # fmt: skip
    stderr = tmp_path / "stderr"
    signalled = (f"{CLASSES['probe']}.training_step", 1, int(signal.SIGTERM))
    assert run_alone(_program, arguments, stderr, *signalled) == 143
    line = "lincorr: terminated; start the same command again to go on"
    assert stderr.read_text().splitlines()[-1] == line


def test_a_signal_in_a_finalizer(tmp_path: Path) -> None:
    """Python ignores what is raised there, and reports it."""
    stderr = tmp_path / "stderr"
    assert run_alone(_audit_with_a_finalizer, ["audit"], stderr) == 130
    assert stderr.read_text() == "lincorr: interrupted\n"


def test_an_operation_that_does_not_return(command: Any, tmp_path: Path) -> None:
    stderr, started = tmp_path / "stderr", monotonic()
    signalled = (f"{CLASSES['finetune']}.training_step", 3, int(signal.SIGTERM), True)
    assert run_alone(_program, command("finetune", "run"), stderr, *signalled) == 143
    assert stderr.read_text().splitlines()[-1] == "lincorr: terminated"
    assert monotonic() - started < 60


def test_a_checkpoint_that_cannot_be_saved_is_reported(command: Any, tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    signalled = (f"{CLASSES['finetune']}.training_step", 2, int(signal.SIGTERM))
    status = run_alone(_program_on_a_full_disk, command("finetune", "run"), stderr, *signalled)
    assert status == 143
    assert stderr.read_text().splitlines()[-2:] == [
        "lincorr: error: cannot write the checkpoint: the disk is full.",
        "lincorr: terminated",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_stop_after_the_same_step(rank: int, command: Any, tmp_path: Path) -> None:
    """Only one rank receives the signal."""
    two = ["--config", "trainer/ddp_cpu.yaml"]
    signalled = (f"{CLASSES['finetune']}.training_step", 3, int(signal.SIGTERM))
    done = run_in_two(
        *command("finetune", "run", *two), prepare=partial(_send_to_rank, rank, *signalled)
    )
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr
    (checkpoint,) = (tmp_path / "run").rglob("*.ckpt")
    assert [line for line in done.stderr.splitlines() if line.startswith("lincorr:")] == [
        f"lincorr: terminated; resume with --ckpt_path {checkpoint}"
    ]
    done = run_in_two(*command("finetune", "resumed", *two, "--ckpt_path", str(checkpoint)))
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "resumed")["n_edits"] == 11


@pytest.mark.parametrize("sign", ["Connection closed by peer", "Connection reset by peer"])
def test_another_rank_that_failed(
    sign: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError(f"[../gloo/transport/tcp/pair.cc:547] {sign} [127.0.0.1]:4711")

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as stop:
        cli.console()
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("lincorr: error: another process of this run failed")
