"""Every command of README.md and docs/ parses, every link leads somewhere.

`test_documented_runs.py` runs a command of each config and the Python code.
"""

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from benchmarks.common import ROOT, documents
from lincorr_lightning.callbacks import Generalization, GradientCorrelation
from lincorr_lightning.callbacks.periodic_callback import PeriodicCallback
from lincorr_lightning.cli import main
from lincorr_lightning.knowledge import Catalogue
from tests.readme.commands import TEXT, blocks, config_of, lincorr_commands

DOCUMENTS = documents()
COMMANDS = [list(command) for command in dict.fromkeys(map(tuple, lincorr_commands()))]
STUDIES = [command for command in COMMANDS if config_of(command) and command[0] != "reproduce"]


@pytest.mark.parametrize("command", STUDIES, ids=" ".join)
def test_command_of_a_study_parses(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--print_config"])
    assert stop.value.code in (0, None)
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["class_path"].startswith("lincorr_lightning.")
    overlays = {Path(path).stem for path in command if path.endswith(".yaml")}
    assert config["trainer"]["accelerator"] == ("cuda" if "gpu" in overlays else "cpu")


class Parsed(BaseException):
    """A command line has been parsed; nothing is run."""


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in STUDIES], ids=" ".join)
def test_other_command_parses(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kind = jsonargparse.ArgumentParser if command[0] == "audit" else argparse.ArgumentParser
    parse = kind.parse_args

    def stop(*args: Any) -> None:
        parse(*args)
        raise Parsed

    monkeypatch.setattr(kind, "parse_args", stop)
    with pytest.raises(Parsed):
        main(command)


def test_the_knowledge_file_is_valid(tmp_path: Path) -> None:
    (text,) = [block for block in blocks("yaml") if "knowledge:" in block]
    path = tmp_path / "rivers.yaml"
    path.write_text(text, encoding="utf-8")
    assert yaml.safe_load(text)["version"] == 1
    relation = Catalogue.load(path).relation("river->country")
    assert relation.reference is not None
    assert relation.reference["Rhine"] == {"Germany", "Switzerland", "Netherlands"}


def test_callbacks_in_the_yaml_of_another_cli(tmp_path: Path) -> None:
    (text,) = [block for block in blocks("yaml") if "callbacks:" in block]
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    cli = LightningCLI(BoringModel, run=False, args=["--config", str(path)])
    own = [one for one in cli.trainer.callbacks if isinstance(one, PeriodicCallback)]
    assert [type(one) for one in own] == [Generalization, GradientCorrelation]


def test_every_file_named_exists() -> None:
    folders = r"(?<![\w/.-])(?:callbacks|configs|benchmarks|lincorr_lightning|tests|\.ci)"
    for name in re.findall(rf"{folders}/[\w./-]*\w", TEXT):
        assert (ROOT / name).exists(), name
    modules = re.findall(r"python -m\s+(benchmarks[\w.]+\w)", TEXT)
    assert modules
    assert not [name for name in modules if importlib.util.find_spec(name) is None]


def with_included(path: Path) -> str:
    """Text of a page, and of the files that it includes."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"^```\{include\} (\S+)$", text, re.MULTILINE):
        text += (path.parent / name).read_text(encoding="utf-8")
    return text


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)", text):
        target = (path.parent / link).resolve() if link else path
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", with_included(target), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
            assert anchor[1:] in slugs, anchor


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    pages = {path for kind in ("md", "ipynb") for path in docs.rglob(f"*.{kind}")}
    pages = {path for path in pages if docs / "_build" not in path.parents}
    assert pages - {docs / "index.md"} == set(DOCUMENTS) - {ROOT / "README.md"}
