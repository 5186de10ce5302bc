"""`lincorr` on two processes, as torchrun starts it, without importing the libraries each time."""

import multiprocessing
import os
import socket
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

# Its server has imported everything and done nothing: what it forks begins as a new Python does.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lincorr_lightning.lightning_cli"])
_PATIENCE_S = 240


def run_in_two(*arguments: str) -> SimpleNamespace:
    """Run `lincorr` in two processes of one run.

    Args:
        arguments: Of the command line; the Trainer's must ask for two devices.

    Returns:
        `returncode`, the first that is not 0; `stderr` of both processes, one after the other.
    """
    with socket.socket() as free, TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        told = [Path(folder) / str(rank) for rank in range(2)]
        ranks = [
            _CONTEXT.Process(target=_rank, args=(rank, port, arguments, str(path)))
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


def _rank(rank: int, port: int, arguments: tuple[str, ...], told: str) -> None:
    """One of the processes."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with Path(told).open("w") as stderr, Path(os.devnull).open("w") as stdout:
        os.dup2(stderr.fileno(), 2)
        os.dup2(stdout.fileno(), 1)
        sys.argv = ["lincorr", *arguments]
        import torch

        from lincorr_lightning.cli import console

        torch.set_num_threads(1)
        console()
