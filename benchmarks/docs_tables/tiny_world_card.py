"""Tables of the card of the tiny world: the sizes of all its parts, and what it recalls.

    python -m benchmarks.docs_tables.tiny_world_card

puts them between the markers of lincorr_lightning/lm/tiny_world/CARD.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.common import ROOT, markdown_table, placed, write_text
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.data.tiny_world.world import SECOND_HOME, WORLD_FILE, World
from lincorr_lightning.knowledge import Knowledge
from lincorr_lightning.pretraining.corpus import Corpus
from lincorr_lightning.pretraining.datamodule import recall_prompts

FOLDER = Path(str(files("lincorr_lightning.lm") / "tiny_world"))
CONFIG = ROOT / "configs" / "pretraining.yaml"
CARD = FOLDER / "CARD.md"

COLUMNS = ("knowledge", "kinds", "facts", "recalled", "least recalled")


def shipped_corpus(names: Sequence[str]) -> Corpus:
    """Return the statements about the shipped world, in the words of the shipped tokenizer."""
    knowledge = Catalogue.load().select(list(names))
    world = World.load(FOLDER / WORLD_FILE)
    tokenizer: Any = LanguageModel.from_pretrained("tiny-world").tokenizer
    return Corpus.of(world, knowledge, tokenizer)


@torch.no_grad()
def measure_recall(lm: LanguageModel, corpus: Corpus) -> dict[str, tuple[int, int]]:
    """Return the numbers of facts and of those that are recalled, by kind of knowledge."""
    found = {}
    for batch in recall_prompts(corpus):
        logits = lm.model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=1).logits
        n_right = int((logits[:, -1].argmax(-1) == batch.answers).sum())
        found[batch.knowledge] = (len(batch.answers), n_right)
    return found


def group_of(knowledge: Knowledge) -> str:
    """Return the row of the table that a kind of knowledge belongs to."""
    if knowledge.family == "cross_language":
        return {"es": "in Spanish", "zh": "in Chinese"}[knowledge.language]
    return {"attribute": "attributes", "simile": "objects and similes"}.get(
        knowledge.family, knowledge.family
    )


def recall_table(recall: Mapping[str, tuple[int, int]], catalogue: Catalogue) -> str:
    """Return a row per group of knowledge."""
    groups: dict[str, list[str]] = {}
    for name in recall:
        groups.setdefault(group_of(catalogue[name]), []).append(name)
    rows = []
    for group, names in groups.items():
        shares = {name: recall[name][1] / recall[name][0] for name in names}
        n_facts, n_right = (sum(recall[name][i] for name in names) for i in (0, 1))
        worst = min(names, key=lambda name: shares[name])
        cells = [group, str(len(names)), f"{n_facts:,}", f"{n_right / n_facts:.1%}"]
        rows.append([*cells, f"{worst}, {shares[worst]:.1%}"])
    return markdown_table(COLUMNS, rows)


def size_table(lm: LanguageModel, corpus: Corpus, n_epochs: int) -> str:
    """Return the size of the LM, of its folder, of its world and of its training."""
    config: Any = lm.model.config
    n_invented = corpus.world.n_invented
    invented = list(corpus.world.people.values())[:n_invented]
    shipped = [path for path in FOLDER.iterdir() if path != CARD and path.is_file()]
    cities, countries, towns = (
        len({facts[name] for facts in invented}) for name in ("city", "country", SECOND_HOME)
    )
    numbers = {
        "parameters": sum(p.numel() for p in lm.model.parameters()),
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "attention heads": config.num_attention_heads,
        "context": config.max_position_embeddings,
        "vocabulary": len(corpus.tokenizer),
        "bytes of the folder": sum(path.stat().st_size for path in shipped),
        "invented people": n_invented,
        "cities": cities,
        "countries": countries,
        "cities of second homes": towns,
        "subjects": len(corpus.world.people),
        "facts": len(corpus.encoded),
        "epochs": n_epochs,
    }
    return markdown_table(("of", "number"), ((name, f"{n:,}") for name, n in numbers.items()))


def tables() -> dict[str, str]:
    """Return the card's tables by their markers."""
    training = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    lm = LanguageModel.from_pretrained("tiny-world")
    corpus = shipped_corpus(training["data"]["init_args"]["knowledge"])
    return {
        "size": size_table(lm, corpus, training["trainer"]["max_epochs"]),
        "recall": recall_table(measure_recall(lm, corpus), Catalogue.load()),
    }


if __name__ == "__main__":
    write_text(CARD, placed(CARD.read_text(encoding="utf-8"), tables()))
