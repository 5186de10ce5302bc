"""Statements of a subject's source and target, consistent with the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.knowledge import Knowledge, TokenizedRelation

Facts = Literal["both", "source", "target"]
JOINED_BY = (". ", " and ", ", so ", "; ")
"""How the two facts of a statement are joined."""


def statements(
    relation: TokenizedRelation, edits: Sequence[Edit], facts: Facts = "both"
) -> list[str]:
    """Return a statement about the subject of each edit, as if the edit were true.

    Statements of both facts take turns in wording, and half of them begin with the target.

    Args:
        relation: The relation.
        edits: Subjects and source answers.
        facts: Which facts are stated: ``both``, or one of them alone.

    Example:
        >>> from lincorr_lightning import LanguageModel
        >>> from lincorr_lightning.finetune.edits import resolve_edits
        >>> from lincorr_lightning.knowledge import Catalogue
        >>> lm = LanguageModel.from_pretrained("tiny-world")
        >>> relation = TokenizedRelation.of("city->country", Catalogue.load(), lm.tokenizer)
        >>> edits = resolve_edits([{"subject": "Anna", "answer": "Paris"}], relation, lm)
        >>> statements(relation, edits)
        ['Anna lives in the city of Paris. Anna lives in the country of France.']
    """
    found = []
    for i, edit in enumerate(edits):
        source = _fact(relation.relation.source, edit.subject, edit.answer)
        target = _fact(relation.relation.target, edit.subject, target_answer(relation, edit))
        if facts != "both":
            found.append(f"{source if facts == 'source' else target}.")
            continue
        pair = (source, target) if i // len(JOINED_BY) % 2 == 0 else (target, source)
        found.append(f"{JOINED_BY[i % len(JOINED_BY)].join(pair)}.")
    return found


def target_answer(relation: TokenizedRelation, edit: Edit) -> str:
    """Return the text of the target answer that an edit's reference begins with."""
    reference = relation.relation.reference or {}
    taught = [a for a in relation.source.labels[edit.label].answers if a.text == edit.answer]
    in_reference = {name for answer in taught for name in reference.get(answer.identity, ())}
    answers = relation.target.labels[edit.reference[0]].answers
    # A label may stand for several answers, such as " South" for South Korea and South Africa.
    return next((a.text for a in answers if a.identity in in_reference), answers[0].text)


def _fact(knowledge: Knowledge, subject: str, answer: str) -> str:
    return f"{knowledge.prompt(subject)}{' ' if knowledge.leading_space else ''}{answer}"
