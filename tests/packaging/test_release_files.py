"""Files of a release agree with the package."""

from __future__ import annotations

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
