"""Tables of which answers are labels under a tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from lincorr_lightning.knowledge.answer_tokens import Completeness, TokenReader
from lincorr_lightning.knowledge.domain import Domain, Label, label_answers
from lincorr_lightning.knowledge.schema import Knowledge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CAPTION = "answers = labels + merged + dropped; paper: size of the domain in the paper"


def audit_domains(
    knowledge: Iterable[Knowledge], tokenizer: PreTrainedTokenizerBase
) -> list[Domain]:
    """Return the domain of each kind of knowledge, also of those without any label."""
    reader = TokenReader(tokenizer)
    return [label_answers(each, reader) for each in knowledge]


def audit_table(domains: Iterable[Domain], title: str) -> Table:
    """Return a table with a row per domain, where answers = labels + merged + dropped."""
    table = Table(title=escape(title), caption=_CAPTION)
    table.add_column("knowledge", no_wrap=True)
    table.add_column("language")
    for heading in ("answers", "paper", "labels", "whole", "phrase", "merged", "dropped"):
        table.add_column(heading, justify="right")
    table.add_column("why dropped")
    for domain in domains:
        n_labels = Counter(domain.completeness)
        table.add_row(
            escape(domain.knowledge.name),
            domain.knowledge.language,
            str(len(domain.knowledge.answers)),
            str(domain.knowledge.paper_size or ""),
            str(len(domain.labels)),
            str(n_labels[Completeness.WHOLE]),
            str(n_labels[Completeness.PHRASE]),
            str(domain.n_merged),
            str(len(domain.dropped)),
            ", ".join(f"{count} {reason}" for reason, count in domain.drop_reasons.items()),
            style=None if domain.labels else "red",
        )
    return table


def audit_details(domain: Domain) -> Table:
    """Return a table with a row per label and its answers, then one per dropped answer."""
    knowledge = domain.knowledge
    table = Table(title=escape(f"{knowledge.name}: {knowledge.template}"), title_justify="left")
    for heading in ("label", "id", "is", "answers"):
        table.add_column(heading, justify="right" if heading == "id" else "left")
    for label in domain.labels:
        text, answers = escape(label.text), escape(_answers(label))
        table.add_row(text, str(label.token_id), str(label.completeness), answers)
    for dropped in domain.dropped:
        tokens = f"{dropped.answer.text}  ({' + '.join(dropped.tokens)})"
        table.add_row("–", "", dropped.reason, escape(tokens), style="dim")
    return table


def _answers(label: Label) -> str:
    return ", ".join(
        answer.text if answer.text == answer.identity else f"{answer.text} ({answer.identity})"
        for answer in label.answers
    )
