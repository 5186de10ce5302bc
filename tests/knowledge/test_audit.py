"""The audit: counts that add up, and the command."""

import types

import pytest
from jsonargparse import auto_cli
from rich.console import Console

from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.knowledge import audit, audit_details, audit_domains, audit_table

PLACES = ("Brunei", "Paris", "South Korea", "Rome", "South Africa", ("Rome", "Roma"))


def shown(renderable):
    console = Console(width=160, record=True, file=types.SimpleNamespace(write=str, flush=str))
    console.print(renderable)
    return console.export_text()


def test_every_answer_is_counted_once(byte_level, ask):
    empty = ask("巴黎", template="{}在", space=False, name="nothing")
    places, nothing = audit_domains([ask(*PLACES), empty], byte_level)
    assert places.texts == ["Paris", "South", "Rome"]
    assert places.completeness == ["whole", "phrase", "whole"]
    assert places.n_merged == 1  # South Africa
    assert places.drop_reasons == {"subword": 2}  # Brunei, Roma
    assert len(PLACES) == len(places.labels) + places.n_merged + len(places.dropped)
    assert (nothing.labels, nothing.drop_reasons) == ((), {"part of a character": 1})


def test_the_table_shows_the_counts(byte_level, ask):
    text = shown(audit_table(audit_domains([ask(*PLACES)], byte_level), title="of [this] LM"))
    assert "of [this] LM" in text
    (line,) = [line for line in text.splitlines() if "│ place" in line]
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    assert cells == ["place", "en", "6", "", "3", "2", "1", "1", "2", "2 subword"]


def test_the_details_name_labels_and_dropped_answers(byte_level, ask):
    (row,) = audit_domains([ask(*PLACES, ("Rome", "[Roma]"))], byte_level)
    lines = shown(audit_details(row)).splitlines()
    (south,) = [line for line in lines if "│ South " in line]
    assert "South Korea, South Africa" in south and "phrase" in south
    assert str(byte_level.get_vocab()["ĠSouth"]) in south
    (brunei,) = [line for line in lines if "Brunei" in line]
    assert "subword" in brunei and " + " in brunei
    assert any("[Roma]" in line for line in lines)  # brackets are markup to rich unless escaped


@pytest.fixture
def requested(monkeypatch, byte_level):
    """Stand-in for the LM: a config in, a tokenizer out."""
    requested = []

    class LMConfig:
        def __init__(self, name_or_path, revision):
            requested.append((name_or_path, revision))

    class LanguageModel:
        def __init__(self, config):
            self.tokenizer = byte_level

    monkeypatch.setattr("lincorr_lightning.lm.config.LMConfig", LMConfig)
    monkeypatch.setattr("lincorr_lightning.lm.language_model.LanguageModel", LanguageModel)
    return requested


def test_the_command_prints_the_table(requested, capsys):
    auto_cli(audit, args=["--lm=some-lm", "--knowledge=[math,X+1]", "--revision=main"])
    assert requested == [("some-lm", "main")]
    printed = capsys.readouterr().out
    assert "some-lm" in printed
    assert sum("│ X" in line for line in printed.splitlines()) == 16
    assert "label" not in printed.splitlines()[0]


def test_the_command_reads_users_files_and_shows_details(requested, capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nknowledge:\n"
        "  spot: {family: simile, language: en, template: '{} is in', answers: [Paris, Brunei]}\n"
    )
    auto_cli(audit, args=[f"--knowledge_files=[{path}]", "--knowledge=[spot]", "--details=true"])
    printed = capsys.readouterr().out
    assert "spot: {} is in" in printed
    assert "Brunei" in printed and "Paris" in printed


@pytest.mark.parametrize("names", [["mth"], "mth", "city, mth"])
def test_the_command_refuses_unknown_names(requested, names):
    with pytest.raises(KnowledgeError, match=r"'mth'.*'math'"):
        audit(knowledge=names)
    assert requested == []  # before the tokenizer is read
