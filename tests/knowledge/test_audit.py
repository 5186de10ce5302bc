"""The audit: counts that add up, and the command."""

import io
import re
import types

import pytest
from jsonargparse import auto_cli
from rich.console import Console

from lincorr_lightning.errors import KnowledgeError, LanguageModelError
from lincorr_lightning.knowledge.audit import audit, audit_details, audit_domains, audit_table

PLACES = ("Brunei", "Paris", "South Korea", "Rome", "South Africa", ("Rome", "Roma"))


def shown(renderable):
    console = Console(width=160, record=True, file=types.SimpleNamespace(write=str, flush=str))
    console.print(renderable)
    return console.export_text()


def test_tables_show_the_counts_and_their_answers(byte_level, ask):
    empty = ask("巴黎", template="{}在", space=False, name="nothing")
    row, nothing = audit_domains([ask(*PLACES, ("Rome", "[Roma]")), empty], byte_level)
    assert (nothing.labels, nothing.drop_reasons) == ((), "1 part of a character")
    text = shown(audit_table([row], title="of [this] LM"))
    assert "of [this] LM" in text  # brackets are markup to rich unless escaped
    (line,) = [line for line in text.splitlines() if line.strip().startswith("place ")]
    assert line.split(None, 7)[2:7] == ["7", "3", "2", "1", "1"]  # no size in the paper
    assert "2 subword, 1 bare space" in line
    lines = shown(audit_details(row)).splitlines()
    (south,) = [line for line in lines if "│ South " in line]
    assert "South Korea, South Africa" in south and "phrase" in south
    assert str(byte_level.get_vocab()["ĠSouth"]) in south
    (brunei,) = [line for line in lines if "Brunei" in line]
    assert "subword" in brunei and " + " in brunei
    assert any("[Roma]" in line for line in lines)


def test_texts_keep_their_signs_and_the_tables_their_colors(byte_level, ask):
    hostile = "\x1b[31mred\n[bold]:smile:[/x]\\"
    (domain,) = audit_domains([ask(hostile, name=hostile)], byte_level)  # which knows no such word
    console = Console(width=200, color_system="standard", force_terminal=True, file=io.StringIO())
    console.print(audit_table([domain], hostile), audit_details(domain))
    printed = console.file.getvalue()
    assert printed.count(r"\x1b[31mred\n[bold]:smile:[/x]" + "\\") == 4
    assert "\x1b[31mred" not in printed
    assert "\x1b[31m\\x1b[31mred" in printed  # the row of a kind without labels is red


def test_the_command_reads_a_folder_with_a_tokenizer_alone(byte_level, tmp_path, capsys):
    byte_level.save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nknowledge:\n"
        "  spot: {family: simile, language: en, template: '{} zz in', answers: [Paris, Brunei]}\n"
    )
    lm, mine = f"--lm={tmp_path / 'tokenizer'}", f"--knowledge_files=[{path}]"
    auto_cli(audit, args=[lm, mine, "--knowledge=[math,spot]", "--details=true"])
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'tokenizer'}" in "".join(printed.split())
    assert len(re.findall(r"^ *X\S* +en +\d", printed, re.MULTILINE)) == 16
    assert "spot: {} zz in" in printed and "Brunei" in printed and "Paris" in printed


def test_the_command_refuses_unknown_names_and_lms(tmp_path):
    with pytest.raises(KnowledgeError, match=r"'mth'.*'math'"):
        audit(lm="no such LM", knowledge="city, mth")  # before the tokenizer is read
    with pytest.raises(LanguageModelError, match="the tokenizer of the folder"):
        audit(lm=str(tmp_path))
