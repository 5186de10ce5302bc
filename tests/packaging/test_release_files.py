"""Files of a release agree with the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from lincorr_lightning.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["preferred-citation"]["title"] in (ROOT / "README.md").read_text("utf-8")


def test_the_changelog_has_this_version_and_its_date() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    heading = f"## [{__version__}] - {citation['date-released']}\n"
    assert heading in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_ci_installs_the_tools_of_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {name for extra in project["optional-dependencies"].values() for name in extra}
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    installed = re.findall(r'"([\w-]+[<>=][^"]*)"', ci)
    assert len(installed) >= 5
    assert set(installed) <= known
