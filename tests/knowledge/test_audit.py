"""The audit: counts that add up, and the command."""

import sys
import types

import pytest
from jsonargparse import auto_cli
from rich.console import Console

from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.knowledge import audit, audit_details, audit_rows, audit_table

PLACES = ("Brunei", "Paris", "South Korea", "Rome", "South Africa", ("Rome", "Roma"))


def shown(renderable):
    console = Console(width=160, record=True, file=types.SimpleNamespace(write=str, flush=str))
    console.print(renderable)
    return console.export_text()


def test_rows_count_every_answer_once(byte_level, ask):
    empty = ask("巴黎", template="{}在", space=False, name="nothing")
    places, nothing = audit_rows([ask(*PLACES), empty], byte_level)
    assert (places.n_answers, places.n_identities) == (6, 5)
    assert places.n_labels == 3  # Paris, South, Rome
    assert places.by_completeness == {"whole": 2, "phrase": 1, "subword": 0}
    assert places.n_merged == 1  # South Africa
    assert places.dropped == {"subword": 2}  # Brunei, Roma
    assert places.n_answers == places.n_labels + places.n_merged + sum(places.dropped.values())
    assert (nothing.n_labels, nothing.dropped) == (0, {"part of a character": 1})


def test_the_table_shows_the_counts(byte_level, ask):
    text = shown(audit_table(audit_rows([ask(*PLACES)], byte_level), title="of [this] LM"))
    assert "of [this] LM" in text
    (line,) = [line for line in text.splitlines() if "│ place" in line]
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    assert cells == ["place", "en", "6", "3", "2", "1", "1", "2", "2 subword"]


def test_the_details_name_labels_and_dropped_answers(byte_level, ask):
    (row,) = audit_rows([ask(*PLACES, ("Rome", "[Roma]"))], byte_level)
    lines = shown(audit_details(row)).splitlines()
    (south,) = [line for line in lines if "│ South " in line]
    assert "South Korea, South Africa" in south and "phrase" in south
    assert str(byte_level.get_vocab()["ĠSouth"]) in south
    (brunei,) = [line for line in lines if "Brunei" in line]
    assert "subword" in brunei and " + " in brunei
    assert any("[Roma]" in line for line in lines)  # brackets are markup to rich unless escaped


@pytest.fixture
def lm_room(monkeypatch, byte_level):
    """The LM room, as far as the audit asks for it: a config in, a tokenizer out."""
    asked = []

    class LMConfig:
        def __init__(self, name_or_path, revision):
            asked.append((name_or_path, revision))

    class LanguageModel:
        def __init__(self, config):
            self.tokenizer = byte_level

    room = types.ModuleType("lincorr_lightning.lm")
    room.LMConfig, room.LanguageModel = LMConfig, LanguageModel
    monkeypatch.setitem(sys.modules, "lincorr_lightning.lm", room)
    return asked


def test_the_command_prints_the_table(lm_room, capsys):
    auto_cli(audit, args=["--lm=some-lm", "--knowledges=[math,X+1]", "--revision=main"])
    assert lm_room == [("some-lm", "main")]
    printed = capsys.readouterr().out
    assert "some-lm" in printed
    assert sum("│ X" in line for line in printed.splitlines()) == 16
    assert "label" not in printed.splitlines()[0]


def test_the_command_reads_users_files_and_shows_details(lm_room, capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nknowledge:\n"
        "  spot: {family: simile, language: en, template: '{} is in', answers: [Paris, Brunei]}\n"
    )
    auto_cli(audit, args=[f"--knowledge_files=[{path}]", "--knowledges=[spot]", "--details=true"])
    printed = capsys.readouterr().out
    assert "spot: {} is in" in printed
    assert "Brunei" in printed and "Paris" in printed


def test_the_command_refuses_unknown_names(lm_room):
    with pytest.raises(KnowledgeError, match=r"'mth'.*'math'"):
        audit(knowledges=["mth"])
    assert lm_room == []  # before anything of an LM is read
