"""Tables of the card of the built-in knowledge: prompts, answers, sources, labels by tokenizer.

    python -m benchmarks.docs_tables.knowledge_card --tokenizer "[GPT-2=FOLDER, Llama 3=FOLDER]"

puts them between the markers of lincorr_lightning/knowledge/CARD.md. A FOLDER is that of a Hugging
Face tokenizer, and NAME its name in the card. The tiny world's tokenizer is always the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jsonargparse import auto_cli
from pandas import DataFrame
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks.common import ROOT, markdown_frame, markdown_table, placed, write_text
from lincorr_lightning.knowledge import Catalogue, Completeness, Knowledge
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


def audit(name: str, tokenizer: Any, catalogue: Catalogue) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of knowledge: what becomes of its answers under a tokenizer.

    `labels` are whole answers + first words / dropped answers; `fates` counts answers that are
    labelled as a whole, by their first word, and not at all, ``(3,)``.
    """
    for domain in audit_domains(catalogue.values(), tokenizer):
        n_labels, n_answers = Counter(domain.completeness), Counter[Completeness]()
        for label in domain.labels:
            n_answers[label.completeness] += len(label.answers)
        whole, phrase, dropped = Completeness.WHOLE, Completeness.PHRASE, len(domain.dropped)
        yield {
            "tokenizer": name,
            "knowledge": domain.knowledge.name,
            "family": domain.knowledge.family.replace("_", "-"),
            "language": NAMES["languages"][domain.knowledge.language],
            "labels": f"{n_labels[whole]}+{n_labels[phrase]}/{dropped}",
            "fates": np.array([n_answers[whole], n_answers[phrase], dropped]),
        }


def summary_table(audits: DataFrame, group: str) -> str:
    """Return the fates of answers, one row per tokenizer, one column per group of knowledge."""
    fates = audits.groupby(["tokenizer", group], sort=False)["fates"].sum().unstack()
    names = audits["tokenizer"].unique(), audits[group].unique()
    texts = fates.loc[names].map(lambda counts: " / ".join(f"{count:,}" for count in counts))
    return markdown_frame(texts, "tokenizer")


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


def sections(audits: DataFrame, catalogue: Catalogue) -> Iterator[str]:
    """Yield the card's sections; a family in several languages has one for each."""
    for family, members in audits.groupby("family", sort=False):
        for language, group in members.groupby("language", sort=False):
            title = f"{family.capitalize()}: {language}"
            names = group["knowledge"].unique()
            labels = group.pivot(index="knowledge", columns="tokenizer", values="labels")
            labels = labels.loc[names, audits["tokenizer"].unique()]
            yield (
                f"### {title if members['language'].nunique() > 1 else family.capitalize()}\n\n"
                f"{prompt_table(catalogue, [catalogue[name] for name in names])}\n\n"
                f"Labels by tokenizer:\n\n{markdown_frame(labels, 'knowledge')}"
            )


def tables(
    catalogue: Catalogue, tokenizers: Mapping[str, PreTrainedTokenizerBase]
) -> dict[str, str]:
    """Return what stands between the card's markers, for tokenizers by their names in the card."""
    rows = [row for named in tokenizers.items() for row in audit(*named, catalogue)]
    audits = DataFrame(rows).query("family != 'control'")  # which is not the paper's
    files = built_in_files().items()
    sources = [(Path(name).stem, " ".join(file.source.split())) for name, file in files]
    versions = [f"{package} {version(package)}" for package in ("transformers", "tokenizers")]
    return {
        "versions": f"with {', '.join([f'lincorr-lightning {__version__}', *versions])}.",
        "sources": markdown_table(["file", "source"], [*sources, COMPUTED_SOURCE]),
        "tokenizers": tokenizer_table(tokenizers),
        "families": summary_table(audits, "family"),
        "languages": summary_table(audits.query("family == 'cross-language'"), "language"),
        "prompts": "\n\n".join(sections(audits, catalogue)),
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
