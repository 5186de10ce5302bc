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


def test_the_changelog_has_this_version() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_pre_commit_runs_what_ci_runs() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in ci if line.startswith(("ruff", "mypy"))]
    for command in commands:
        words = set(command.replace("--check .", "").replace(" .", "").split())
        assert any(words <= set(entry.split()) for entry in entries), command
