"""The command ``lincorr audit``.

jsonargparse runs the imports under `TYPE_CHECKING` of a command's module; here, there are none, so
that ``lincorr audit --help`` does not import transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.knowledge.audit import audit_details, audit_domains, audit_table
from lincorr_lightning.knowledge.catalogue import Catalogue, split_names


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

    Raises:
        KnowledgeError: A name is unknown or a file is not valid.
        LanguageModelError: The LM's tokenizer cannot be read.
    """
    selected = Catalogue.load(*knowledge_files).select(split_names(knowledge))
    domains = audit_domains(selected, _load_tokenizer(lm, revision))
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe or file has room for whole lines
    if details:
        for domain in domains:
            console.print(audit_details(domain))
    console.print(audit_table(domains, title=f"Knowledge under the tokenizer of {lm}"))


def _load_tokenizer(lm: str, revision: str | None) -> Any:
    # Imported here: nothing else of this package needs transformers.
    from lincorr_lightning.lm.config import LMConfig
    from lincorr_lightning.lm.language_model import LanguageModel

    folder = Path(lm)
    if not folder.is_dir() or (folder / "config.json").exists():
        return LanguageModel(LMConfig(name_or_path=lm, revision=revision)).tokenizer
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise LanguageModelError(
            f"{folder} has neither an LM (config.json) nor a tokenizer that can be read "
            f"(tokenizer.json, or tokenizer_config.json with its vocabulary): {error}"
        ) from error
