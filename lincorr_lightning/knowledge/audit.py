"""What a tokenizer leaves of each knowledge: the command `lincorr audit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.knowledge.catalogue import Catalogue
from lincorr_lightning.knowledge.domain import (
    WHOLE_WORDS,
    Completeness,
    Domain,
    Label,
    TokenReader,
    sort_answers,
)
from lincorr_lightning.knowledge.schema import Knowledge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class AuditRow:
    """One knowledge under one tokenizer, counted.

    Attributes:
        domain: The labels and the dropped answers themselves.
        n_identities: Entities that the knowledge can be answered with.
        n_answers: Ways to write them.
        n_labels: Labels kept.
        by_completeness: How many of the labels are whole, of a phrase, or subwords.
        n_merged: Answers that share the label of an earlier one.
        dropped: How many answers were dropped, by reason, the most frequent first.
    """

    domain: Domain
    n_identities: int
    n_answers: int
    n_labels: int
    by_completeness: Mapping[Completeness, int]
    n_merged: int
    dropped: Mapping[str, int]


def audit_rows(
    knowledges: Iterable[Knowledge],
    tokenizer: PreTrainedTokenizerBase,
    keep: Collection[Completeness] = WHOLE_WORDS,
) -> list[AuditRow]:
    """Count what a tokenizer leaves of each knowledge.

    Args:
        knowledges: The knowledges to look at.
        tokenizer: Any Hugging Face tokenizer.
        keep: Which labels to keep, as in `build_domain`.

    Returns:
        A row per knowledge, in their order, also for those without any label.
    """
    reader = TokenReader(tokenizer)
    return [_audit_row(sort_answers(each, tokenizer, keep, reader)) for each in knowledges]


def _audit_row(domain: Domain) -> AuditRow:
    answers = domain.knowledge.answers
    grades = Counter(label.completeness for label in domain.labels)
    return AuditRow(
        domain=domain,
        n_identities=len({answer.identity for answer in answers}),
        n_answers=len(answers),
        n_labels=len(domain.labels),
        by_completeness={grade: grades[grade] for grade in Completeness},
        n_merged=domain.n_merged,
        dropped=dict(Counter(dropped.reason for dropped in domain.dropped).most_common()),
    )


def audit_table(rows: Iterable[AuditRow], title: str) -> Table:
    """Lay audit rows out as a table for the terminal.

    Args:
        rows: What `audit_rows` returned.
        title: The table's title; it should name the tokenizer.

    Returns:
        A table with a line per knowledge. Answers = labels + merged + dropped.
    """
    table = Table(title=escape(title), caption="answers = labels + merged + dropped")
    table.add_column("knowledge", no_wrap=True)
    for heading in ("language", "answers", "labels", "whole", "phrase", "merged", "dropped"):
        table.add_column(heading, justify="left" if heading == "language" else "right")
    table.add_column("why dropped")
    for row in rows:
        table.add_row(
            escape(row.domain.knowledge.name),
            row.domain.knowledge.language,
            str(row.n_answers),
            str(row.n_labels),
            str(row.by_completeness[Completeness.WHOLE]),
            str(row.by_completeness[Completeness.PHRASE]),
            str(row.n_merged),
            str(sum(row.dropped.values())),
            ", ".join(f"{count} {reason}" for reason, count in row.dropped.items()),
            style=None if row.n_labels else "red",
        )
    return table


def audit_details(row: AuditRow) -> Table:
    """List one knowledge's labels and dropped answers by name.

    Args:
        row: One of what `audit_rows` returned.

    Returns:
        A table with a line per label, with the answers it stands for, then one per dropped
        answer, with its tokens.
    """
    knowledge = row.domain.knowledge
    table = Table(title=escape(f"{knowledge.name}: {knowledge.template}"), title_justify="left")
    for heading in ("label", "id", "is", "answers"):
        table.add_column(heading, justify="right" if heading == "id" else "left")
    for label in row.domain.labels:
        text, answers = escape(label.text), escape(_answers(label))
        table.add_row(text, str(label.token_id), str(label.completeness), answers)
    for dropped in row.domain.dropped:
        tokens = f"{dropped.answer.text}  ({' + '.join(dropped.tokens)})"
        table.add_row("–", "", dropped.reason, escape(tokens), style="dim")
    return table


def _answers(label: Label) -> str:
    return ", ".join(
        answer.text if answer.text == answer.identity else f"{answer.text} ({answer.identity})"
        for answer in label.answers
    )


def audit(
    lm: str = "tiny-world",
    knowledges: list[str] = ["all"],  # noqa: B006  read only, and shown as it is by --help
    knowledge_files: list[str] = [],  # noqa: B006
    revision: str | None = None,
    details: bool = False,
) -> None:
    """Show which answers an LM's tokenizer can speak of, without loading the LM's weights.

    Args:
        lm: A folder (a tokenizer alone will do), a hub id or `tiny-world`.
        knowledges: Names of knowledges or families, such as `[city,math]`, or `[all]`.
        knowledge_files: Your own knowledge files, read beside the built-in ones.
        revision: Revision of a hub id.
        details: Also list every label and every dropped answer.

    Raises:
        KnowledgeError: A name is unknown or a file is not valid.
        LanguageModelError: The LM's tokenizer cannot be read.
    """
    chosen = Catalogue.load(*knowledge_files).select(knowledges)
    # Here, because the knowledge room needs no LM for anything else, and names are checked sooner.
    from lincorr_lightning.lm.config import LMConfig
    from lincorr_lightning.lm.language_model import LanguageModel

    tokenizer: PreTrainedTokenizerBase
    folder = Path(lm)
    if folder.is_dir() and not (folder / "config.json").exists():
        # A tokenizer without an LM is all that an audit needs.
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise LanguageModelError(
                f"{folder} holds neither an LM (config.json) nor a tokenizer that can be read "
                f"(tokenizer.json, or tokenizer_config.json with its vocabulary): {error}"
            ) from error
    else:
        tokenizer = LanguageModel(LMConfig(name_or_path=lm, revision=revision)).tokenizer
    rows = audit_rows(chosen, tokenizer)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe or file has room for whole lines
    if details:
        for row in rows:
            console.print(audit_details(row))
    console.print(audit_table(rows, title=f"Knowledge under the tokenizer of {lm}"))
