"""What the program does before it begins to work: imports, and the help texts."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lincorr_lightning.cli import main

HEAVY = {"torch", "lightning", "lightning_utilities", "transformers", "torchmetrics", "scipy"}
HEAVY |= {"peft", "tensorboard"}


def imported(*command: str) -> set[str]:
    """Modules that a Python process imports, and their top-level packages."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    found = {line.rpartition("|")[2].strip() for line in lines}
    assert "lincorr_lightning" in found, done.stderr
    return found | {name.partition(".")[0] for name in found}


@pytest.mark.parametrize(
    "arguments",
    ["--help", "--version", "nonsense", "report nowhere", "cache .", "audit --knowledge [mth]"],
)
def test_commands_that_need_no_lm_import_no_torch(arguments: str) -> None:
    assert not imported("-m", "lincorr_lightning", *arguments.split()) & HEAVY


@pytest.mark.slow
def test_lightning_is_imported_without_what_it_does_not_use() -> None:
    """A placeholder that torchmetrics asks for one name; what asks for others gets the module."""
    found = imported("-m", "lincorr_lightning", "fit", "--help")
    assert "lightning" in found and not found & {"scipy.signal", "scipy.stats"}
    use = "import scipy.signal, scipy.stats; print(scipy.signal.hilbert([0, 1]).real)"
    code = f"from lincorr_lightning.cli import program; program._import_lightning_cli(); {use}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "[0. 1.]\n", ran.stderr


def test_a_generic_tokenizer_is_read_without_torch() -> None:
    found = imported("-m", "lincorr_lightning", "audit", "--knowledge", "[city]")
    assert "tokenizers" in found
    assert not found & (HEAVY - {"transformers"})


@pytest.mark.parametrize(
    "names",
    [
        "lincorr_lightning",
        "lincorr_lightning.knowledge",
        "lincorr_lightning.results",
        "lincorr_lightning.results.report",
    ],
)
def test_packages_without_tensors_import_no_torch(names: str) -> None:
    assert not imported("-c", f"import {names}") & HEAVY


@pytest.mark.parametrize("package", ["lincorr_lightning", "lincorr_lightning.lm"])
def test_names_that_are_imported_on_first_use_are_listed(package: str) -> None:
    module = importlib.import_module(package)
    assert set(dir(module)) >= set(module.__all__) == {n for n in dir(module) if hasattr(module, n)}
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.slow
def test_finished_runs_are_read_without_torch_or_figures(tmp_path: Path) -> None:
    """A page has the figures of its run; they are not drawn again."""
    small = "fit --config linear_probe.yaml --model.knowledge=[city,country] --data.n_subjects=60"
    main([*small.split(), f"--trainer.default_root_dir={tmp_path}"])
    run = tmp_path / "linear_probe" / "version_0"
    shutil.copytree(run, run.with_name("version_1"))
    lincorr, other = ("-m", "lincorr_lightning"), f"{run.with_name('version_1')}"
    found = imported(*lincorr, "compare", f"{run}", other)
    assert "lincorr_lightning.results.differences" in found
    assert not found & (HEAVY - {"scipy"} | {"scipy.stats", "matplotlib"})
    page = str(tmp_path / "comparison")
    assert not imported(*lincorr, "compare", f"{run}", other, "--output", page) & (
        HEAVY - {"scipy"}
    )
    found = imported(*lincorr, "report", f"{run}", "--output", f"{tmp_path / 'page'}")
    assert not found & (HEAVY | {"matplotlib"})
    assert (tmp_path / "page" / "report.html").read_text().count("data:image/png") >= 3


def test_help_of_settings_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of an LM stand below the fields of `LMConfig`."""
    with pytest.raises(SystemExit):
        main(["fit", "--model.help", "LinearProbe"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "One of eager, sdpa and flash_attention_2; null lets transformers choose." in printed


def test_a_pipeline_that_is_closed() -> None:
    """A reader that has seen enough, as with `| head`, gets no traceback."""
    program = subprocess.Popen(
        [sys.executable, "-m", "lincorr_lightning", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == ""
    assert program.wait() == 1
