"""A run whose output nobody can show ends as any other: its results are in files."""

import os
import sys
from pathlib import Path

import pytest

from lincorr_lightning import cli
from tests.launching import run_alone

PROBE = [
    "fit",
    "--config",
    "linear_probe.yaml",
    "--data.n_subjects=40",
    "--model.knowledge=[city,country]",
]
WARNING = "lincorr: warning: the run goes on without output: No space left on device."


def _program(arguments: list[str], streams: str, stderr: Path) -> None:
    """Run the program with standard streams that are closed, full, or read by nobody."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    if streams == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif streams.startswith("pipe"):
        reader, writer = os.pipe()
        os.close(reader)
        for number in range(1, 3 if streams == "pipes" else 2):
            os.dup2(writer, number)
    else:  # Python has no stream for what is closed when it starts
        for number, name in enumerate(["stdin", "stdout", "stderr"]):
            os.close(number)
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
    sys.argv = ["lincorr", *arguments]
    cli.console()


@pytest.mark.parametrize("streams", ["full", "pipe", "pipes", "closed"])
@pytest.mark.parametrize("command", ["fit", "audit"])
def test_the_command_ends_well(command: str, streams: str, small_lm: str, tmp_path: Path) -> None:
    root, stderr = tmp_path / "runs", tmp_path / "stderr"
    arguments = {
        "fit": [
            *PROBE,
            f"--model.lm.name_or_path={small_lm}",
            f"--trainer.default_root_dir={root}",
        ],
        "audit": ["audit", f"--lm={small_lm}"],
    }[command]
    assert run_alone(_program, arguments, streams, stderr) == 0
    told = stderr.read_text()
    assert "Traceback" not in told and "Exception ignored" not in told
    assert told.count("lincorr: ") == told.count(WARNING) == (streams == "full")
    if command == "fit":
        assert len(list(root.rglob("results.json"))) == 1
        assert not [path for path in root.rglob("*") if path.name.startswith(".part-")]


@pytest.mark.nightly
def test_a_pipeline_that_reads_one_line(small_lm: str, tmp_path: Path) -> None:
    """With streams as a shell makes them."""
    root = tmp_path / "runs"
    program = f"{sys.executable} -m lincorr_lightning {' '.join(PROBE)}"
    program += f" --model.lm.name_or_path={small_lm} --trainer.default_root_dir={root}"
    for i, ending in enumerate(["2>&1 | head -1", "| head -1", ">&-", "<&- >&- 2>&-"]):
        command = f"({program} --name=run{i}; echo $? >{tmp_path}/status) {ending}"
        assert os.system(command) == 0
        assert (tmp_path / "status").read_text().strip() == "0"
        assert len(list((root / f"run{i}").rglob("results.json"))) == 1
