"""The card of the knowledge: what it says is what the data and the audit say."""

import re
from pathlib import Path

import pytest
from jsonargparse import auto_cli

from benchmarks.docs_tables import knowledge_card as script

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "lincorr_lightning" / "knowledge" / "CARD.md"
REGENERATE = "write the card again, as its head says"


def tables(markdown):
    """Heading and number of each table -> its rows by their first cells."""
    found, heading = {}, ""
    for block in re.sub(r"^<!--.*-->\n", "", markdown, flags=re.MULTILINE).split("\n\n"):
        if block.startswith("#"):
            heading = block.splitlines()[0]
        if not block.startswith("|"):
            continue
        lines = [
            [cell.replace("\\", "").strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in block.splitlines()
        ]
        columns, _, *rows = lines
        place = (heading, sum(known == heading for known, _ in found))
        found[place] = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
        assert len(found[place]) == len(rows)
    return found


@pytest.mark.nightly
def test_the_committed_card_is_that_of_the_data(tmp_path, byte_level):
    """As it is written now, with one tokenizer more than the tiny world's."""
    byte_level.save_pretrained(tmp_path / "mine")
    mine, card = f"[A name={tmp_path / 'mine'}]", tmp_path / "CARD.md"
    auto_cli(script.main, args=["--tokenizer", mine, "--output", str(card)])
    text = card.read_text(encoding="utf-8")
    assert str(tmp_path) not in text and "<!-- prompts: end -->" in text
    fresh, committed = tables(text), tables(COMMITTED.read_text(encoding="utf-8"))
    assert list(fresh) == list(committed), REGENERATE
    for place, rows in fresh.items():
        stands = committed[place]
        if "tokenizer" not in next(iter(rows.values())):  # there, each tokenizer is a row
            assert list(stands) == list(rows), (place, REGENERATE)
        rows.pop("A name", None)  # of the table of tokenizers
        for name, row in rows.items():
            own = {column: cell for column, cell in row.items() if column != "A name"}
            assert {column: stands[name][column] for column in own} == own, (place, REGENERATE)
