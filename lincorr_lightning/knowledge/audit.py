"""Which answers are labels under a tokenizer: tables, and the command ``lincorr audit``.

jsonargparse runs the imports under `TYPE_CHECKING` of a command's module; here, there are none, so
that ``lincorr audit --help`` does not import transformers.
"""

from collections import Counter
from collections.abc import Iterable
from shutil import get_terminal_size
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lincorr_lightning.knowledge.answer_tokens import Completeness, TokenReader, unknown_words
from lincorr_lightning.knowledge.catalogue import Catalogue
from lincorr_lightning.knowledge.domain import Domain, label_answers
from lincorr_lightning.knowledge.schema import Knowledge
from lincorr_lightning.terminal import printable

_CAPTION = "answers = labels + merged + dropped; paper: size of the domain in the paper"


def audit(
    lm: str = "tiny-world",
    knowledge: list[str] | str = "all",
    knowledge_files: list[str] = [],  # noqa: B006
    revision: str | None = None,
    details: bool = False,
) -> None:
    """Show which answers are labels under an LM's tokenizer, without loading the LM's weights.

    Args:
        lm: A folder (a tokenizer is enough), a .gguf file, a hub id or tiny-world.
        knowledge: Names of kinds of knowledge or families, such as city or [city,math].
        knowledge_files: Your own knowledge files, in addition to the built-in ones.
        revision: Branch, tag or commit of a hub id.
        details: Whether to list every label and every dropped answer as well.
    """
    selected = Catalogue.load(*knowledge_files).select(knowledge)
    # Here, so that a wrong name is refused before torch is imported.
    from lincorr_lightning.lm.config import LMConfig
    from lincorr_lightning.lm.loading import find_checkpoint, read_tokenizer

    with Console(stderr=True).status("Reading the tokenizer"):  # that of a .gguf file takes a while
        checkpoint = find_checkpoint(LMConfig(name_or_path=lm, revision=revision), "the tokenizer")
        tokenizer = read_tokenizer(checkpoint)
    domains = audit_domains(selected, tokenizer)
    console = Console()
    if not console.is_terminal:
        # A pipe or file has room for whole lines, unless COLUMNS says otherwise.
        console = Console(width=get_terminal_size((120, 24)).columns)
    if details:
        for domain in domains:
            console.print(audit_details(domain))
    console.print(audit_table(domains, title=f"Knowledge under the tokenizer of {lm}"))
    for each in selected:
        if unknown := ", ".join(unknown_words(each, tokenizer)):
            message = f"{each.name}: the LM does not know these words of its prompt: {unknown}"
            console.print(_plain(message))


def audit_domains(knowledge: Iterable[Knowledge], tokenizer: Any) -> list[Domain]:
    """Return the domain of each kind of knowledge, also of those without any label."""
    reader = TokenReader(tokenizer)
    return [label_answers(each, reader) for each in knowledge]


def audit_table(domains: Iterable[Domain], title: str) -> Table:
    """Return a table with a row per domain, where answers = labels + merged + dropped."""
    plain: Any = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "show_edge": False}
    table = Table(title=_plain(title, "table.title"), caption=_CAPTION, pad_edge=False, **plain)
    table.add_column("knowledge", no_wrap=True)
    table.add_column("language", no_wrap=True)
    for heading in ("answers", "paper", "labels", "whole", "phrase", "merged"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("dropped, why", overflow="fold")
    for domain in domains:
        knowledge = domain.knowledge
        n_labels = Counter(domain.completeness)
        row = (
            knowledge.name,
            knowledge.language,
            len(knowledge.answers),
            knowledge.paper_size or "",
            len(domain.labels),
            n_labels[Completeness.WHOLE],
            n_labels[Completeness.PHRASE],
            sum(len(label.answers) - 1 for label in domain.labels),
            domain.drop_reasons,
        )
        table.add_row(*map(_plain, row), style=None if domain.labels else "red")
    return table


def audit_details(domain: Domain) -> Table:
    """Return a table with a row per label and its answers, then one per dropped answer."""
    knowledge = domain.knowledge
    title = _plain(f"{knowledge.name}: {knowledge.template}", "table.title")
    table = Table(title=title, title_justify="left")
    for heading in ("label", "id", "is", "answers"):
        table.add_column(heading, justify="right" if heading == "id" else "left")
    for label in domain.labels:
        answers = ", ".join(
            answer.text + (f" ({answer.identity})" if answer.text != answer.identity else "")
            for answer in label.answers
        )
        cells = label.text, str(label.token_id), str(label.completeness), answers
        table.add_row(*map(_plain, cells))
    for dropped in domain.dropped:
        tokens = f"{dropped.answer.text}  ({' + '.join(dropped.tokens)})"
        table.add_row("–", "", dropped.reason, _plain(tokens), style="dim")
    return table


def _plain(text: object, style: str = "") -> Text:
    """Return a text whose brackets, colons and controls mean nothing to rich and the terminal."""
    return Text(printable(text, ""), style)
