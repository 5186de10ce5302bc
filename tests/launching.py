"""Processes of one run, as torchrun starts them but without new imports; a quiet Trainer."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import multiprocessing
from torch.distributed import TCPStore

# Its server has imported everything: what it forks begins almost as a new Python does.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
_PATIENCE_S = 240


def run_in_two(*arguments: str, prepare: Callable[[int], None] | None = None) -> SimpleNamespace:
    """Run `lincorr` in two processes of one run, in each of which `prepare` is called first.

    Returns `returncode`, the first that is not 0, and `stderr` of both processes.
    """
    store = serve_store()
    with TemporaryDirectory() as folder:
        told = [Path(folder) / str(rank) for rank in range(2)]
        ranks = [
            CONTEXT.Process(target=_rank, args=(rank, store.port, arguments, str(path), prepare))
            for rank, path in enumerate(told)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(_PATIENCE_S)
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode for process in ranks]
        stderr = "\n".join(path.read_text() for path in told if path.exists())
    return SimpleNamespace(returncode=codes[0] or codes[1], stderr=stderr)


def _rank(
    rank: int,
    port: int,
    arguments: tuple[str, ...],
    told: str,
    prepare: Callable[[int], None] | None,
) -> None:
    """One of the processes."""
    join_run(rank, 2, port)
    if prepare is not None:
        prepare(rank)
    run_program(arguments, Path(told))


def run_program(arguments: Sequence[str], stderr: Path) -> None:
    """Run `lincorr` in this process, with its errors in a file and what it prints nowhere."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run with `&`
    for stream, path in ((1, os.devnull), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.argv = ["lincorr", *arguments]
    from lincorr_lightning.cli import console

    console()


def run_alone(work: Callable[..., None], *args: Any) -> int:
    """Run a function in a process of its own, with as many threads as this one.

    Returns the exit code; of a process that was killed, the signal's number below 0.
    """
    start_server()
    process = CONTEXT.Process(target=_alone, args=(torch.get_num_threads(), work, args))
    process.start()
    process.join(_PATIENCE_S)
    if process.exitcode is None:
        process.kill()
        process.join()
    return int(process.exitcode or 0)


def _alone(n_threads: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(n_threads)
    work(*args)


def launch(n: int, work: Callable[..., None], *args: Any) -> None:
    """Run a function of the rank in several processes; what one of them raises is raised here."""
    store = serve_store()
    multiprocessing.start_processes(
        _work, (n, store.port, work, args), nprocs=n, start_method="forkserver"
    )


def _work(rank: int, n: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    join_run(rank, n, port)
    work(rank, *args)


@contextmanager
def starting_processes() -> Iterator[None]:
    """Let a Trainer start processes from the server; it leaves their port in the environment."""
    start_server()
    try:
        yield
    finally:
        os.environ.pop("MASTER_PORT", None)


def start_server() -> None:
    """Start the server of processes, if it has not been started, where it finds `tests`."""
    with chdir(Path(__file__).parents[1]):
        forkserver.ensure_running()


def serve_store() -> TCPStore:
    """Serve the store at which the ranks meet, as torchrun does, on a port of its own."""
    start_server()
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join_run(rank: int, n: int, port: int) -> None:
    """Set the environment that torchrun sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
