"""Tables of the card of the built-in knowledge: prompts, answers, sources, labels by tokenizer.

    python -m benchmarks.docs_tables.knowledge_card --tokenizer "[GPT-2=FOLDER, Llama 3=FOLDER]"

puts them between the markers of lincorr_lightning/knowledge/CARD.md. A FOLDER is that of a Hugging
Face tokenizer, and NAME its name in the card. The tiny world's tokenizer is always the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import auto_cli
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.common import ROOT, markdown_table, placed, write_text
from lincorr_lightning.knowledge import FAMILIES, Catalogue, Completeness, Domain, Knowledge
from lincorr_lightning.knowledge.audit import audit_domains
from lincorr_lightning.knowledge.catalogue import built_in_files
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.version import __version__

CARD = ROOT / "lincorr_lightning" / "knowledge" / "CARD.md"
TINY_WORLD = "tiny-world"

NAMES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
"""Types and sources of the committed card's tokenizers, by their names in it, and languages."""

COMPUTED = "computed"
COMPUTED_SOURCE = (COMPUTED, "Arithmetic, on the numbers from 0 to 10.")

Audits = Mapping[str, Mapping[str, Domain]]  #: Domains by tokenizer and kind of knowledge.


def origin(knowledge: Knowledge) -> str:
    """Return the file of the prompt and, where it is another, those of its answers."""
    files = built_in_files()
    prompts = [Path(name).stem for name, file in files.items() if knowledge.name in file.knowledge]
    answers = [Path(name).stem for name, file in files.items() if knowledge.kind in file.entities]
    return " + ".join(dict.fromkeys([*prompts, *answers])) or COMPUTED


def references(catalogue: Catalogue, knowledge: Knowledge) -> str:
    """Return the targets with a reference from this source, translations counted together."""
    targets = [
        catalogue[name]
        for name in catalogue
        if name != knowledge.name and catalogue.relation(f"{knowledge.name}->{name}").reference
    ]
    if knowledge.family == "math":
        return f"all {len(targets)} others"
    counts = Counter(target.name.removesuffix(f"_{target.language}") for target in targets)
    return ", ".join(name if n == 1 else f"{name} ×{n}" for name, n in counts.items())


def load_tokenizers(named_folders: Sequence[str]) -> dict[str, PreTrainedTokenizerBase]:
    """Load the tiny world's tokenizer, then those of `NAME=FOLDER`."""
    tokenizers = {TINY_WORLD: LanguageModel(LMConfig(name_or_path=TINY_WORLD)).tokenizer}
    for named in named_folders:
        name, equals, folder = named.partition("=")
        if not equals or not Path(folder).is_dir():
            raise SystemExit(f"--tokenizer {named}: write NAME=FOLDER, with a folder that is there")
        tokenizers[name.strip()] = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizers


def cell(domain: Domain) -> str:
    """Return labels that are whole answers + labels that are first words / dropped answers."""
    whole, phrase = (
        domain.completeness.count(c) for c in (Completeness.WHOLE, Completeness.PHRASE)
    )
    return f"{whole}+{phrase}/{len(domain.dropped)}"


def fates(domains: Iterable[Domain]) -> str:
    """Return the answers labelled as a whole / by their first word / not at all."""
    counts = [0, 0, 0]
    for domain in domains:
        for label in domain.labels:
            counts[label.completeness is Completeness.PHRASE] += len(label.answers)
        counts[2] += len(domain.dropped)
    return " / ".join(f"{count:,}" for count in counts)


def summary_table(groups: Mapping[str, Sequence[Knowledge]], audits: Audits) -> str:
    """Return the counts of answers, one row per tokenizer, one column per group of knowledge."""
    rows = [
        [name, *(fates(audit[member.name] for member in group) for group in groups.values())]
        for name, audit in audits.items()
    ]
    return markdown_table(["tokenizer", *groups], rows)


def tokenizer_table(tokenizers: Mapping[str, PreTrainedTokenizerBase]) -> str:
    """Return the types of the tokenizers and the sources of their vocabularies."""
    rows = []
    for name, tokenizer in tokenizers.items():
        tokenizer_type, source = NAMES["tokenizers"].get(name, ("unknown", "a folder"))
        rows.append([name, tokenizer_type, f"{len(tokenizer):,}", source])
    return markdown_table(["tokenizer", "type", "vocabulary", "from"], rows)


def prompt_table(catalogue: Catalogue, kinds: Sequence[Knowledge]) -> str:
    """Return the prompts, their numbers of answers, their sources and their references."""
    printed = any(knowledge.printed_template for knowledge in kinds)
    columns = ["knowledge", "prompt", *(["as printed"] if printed else [])]
    rows = []
    for each in kinds:
        identities = {answer.identity for answer in each.answers}
        rows.append(
            [
                each.name,
                " · ".join((each.template, *each.paraphrases)),
                *([each.printed_template] if printed else []),
                f"{len(identities)} ({len(each.answers)})",
                each.paper_size,
                origin(each),
                references(catalogue, each),
            ]
        )
    return markdown_table([*columns, "answers", "paper", "from", "reference to"], rows)


def audit_table(kinds: Sequence[Knowledge], audits: Audits) -> str:
    """Return the counts of labels, one row per prompt, one column per tokenizer."""
    rows = [[each.name, *(cell(audits[name][each.name]) for name in audits)] for each in kinds]
    return markdown_table(["knowledge", *audits], rows)


def by_language(kinds: Iterable[Knowledge]) -> dict[str, list[Knowledge]]:
    """Group kinds of knowledge by the name of their language."""
    groups: dict[str, list[Knowledge]] = {}
    for knowledge in kinds:
        groups.setdefault(NAMES["languages"][knowledge.language], []).append(knowledge)
    return groups


def sections(families: Mapping[str, Sequence[Knowledge]]) -> dict[str, list[Knowledge]]:
    """Return kinds of knowledge by section; a family in several languages has one for each."""
    found = {}
    for family, members in families.items():
        languages = by_language(members)
        for language, group in languages.items():
            found[family.capitalize() + (f": {language}" if len(languages) > 1 else "")] = group
    return found


def tables(
    catalogue: Catalogue, tokenizers: Mapping[str, PreTrainedTokenizerBase]
) -> dict[str, str]:
    """Return what stands between the card's markers, for tokenizers by their names in the card."""
    audits = {
        name: dict(zip(catalogue, audit_domains(catalogue.values(), tokenizer), strict=True))
        for name, tokenizer in tokenizers.items()
    }
    families = {
        family.replace("_", "-"): catalogue.select([family])
        for family in FAMILIES
        if family != "control"  # which is not the paper's
    }
    files = built_in_files().items()
    sources = [(Path(name).stem, " ".join(file.source.split())) for name, file in files]
    prompts = [
        f"### {title}\n\n{prompt_table(catalogue, kinds)}\n\nLabels by tokenizer:\n\n"
        + audit_table(kinds, audits)
        for title, kinds in sections(families).items()
    ]
    versions = [f"{package} {version(package)}" for package in ("transformers", "tokenizers")]
    return {
        "versions": f"with {', '.join([f'lincorr-lightning {__version__}', *versions])}.",
        "sources": markdown_table(["file", "source"], [*sources, COMPUTED_SOURCE]),
        "tokenizers": tokenizer_table(tokenizers),
        "families": summary_table(families, audits),
        "languages": summary_table(by_language(families["cross-language"]), audits),
        "prompts": "\n\n".join(prompts),
    }


def main(tokenizer: tuple[str, ...] = (), output: Path = CARD) -> None:
    """Write the card.

    Args:
        tokenizer: NAME=FOLDER of each tokenizer beside that of the tiny world.
        output: File to write.
    """
    found = tables(Catalogue.load(), load_tokenizers(tokenizer))
    write_text(output, placed(CARD.read_text(encoding="utf-8"), found))


if __name__ == "__main__":
    auto_cli(main)
