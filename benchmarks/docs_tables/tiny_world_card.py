"""Write the card of the tiny world: its size, its data, its training, and what it recalls.

    python -m benchmarks.docs_tables.tiny_world_card

writes lincorr_lightning/lm/tiny_world/CARD.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import yaml

from benchmarks.common import ROOT, markdown_table, write_text
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.data.tiny_world.world import SECOND_HOME, WORLD_FILE, World
from lincorr_lightning.knowledge import Knowledge
from lincorr_lightning.pretraining.corpus import Corpus
from lincorr_lightning.pretraining.datamodule import recall_prompts

FOLDER = Path(str(files("lincorr_lightning.lm") / "tiny_world"))
CONFIG = ROOT / "configs" / "pretraining.yaml"
CARD = FOLDER / "CARD.md"

COLUMNS = ("knowledge", "kinds", "facts", "recalled", "least recalled")

_TEXT = """\
# Card of the tiny world

`tiny-world` is a Llama of {n_parameters:.1f} million parameters ({n_layers} layers, width {width},
{n_heads} attention heads, tied embeddings, a context of {context} tokens) with a word-level
vocabulary of {n_tokens:,}. It was trained from random weights for this package. Its weights are
float16; the folder has {megabytes:.1f} MB.

## Intended use

To try every study of the package at once, without network and GPU, and to test it: which kinds of
knowledge are related is known by construction.

## Limits

It is a test bed. No claim about language models rests on it, and no default should be chosen on it
alone: unrelated kinds of knowledge correlate less here, and more edits generalize than in
pretrained LMs. It answers the built-in prompts about the subjects of its vocabulary and is good for
nothing else: every other word is unknown to it, it writes no text, and what it says about people
and customs is invented.

## Data

{n_people:,} invented people live in {n_cities} cities of {n_countries} real countries. Their
relations are: city → country → continent and language, landmark; CEO → company; parents' names by
continent; customs by country (food, drink, flower, vacation), language (music) and company (job,
vehicle), hobby and gender by sport, personality by color; and color, pet and sport independent of
all else. Each person is also linked to an object (for similes of its color, size, heat, price and
genre) and to a number (for sums). Every person also has a second home, in one of {n_towns}
other cities where nobody has a first one. If the country of the first home has such cities, half
of the second homes are drawn from them, the others from all. The training text states second homes
less often than first ones, so that these cities are nobody's most likely answer, like most labels
of a pretrained LM; they make W of plain least squares imprecise. The other words of the
vocabulary are nicknames of these people, so that every word can be a subject; with them there are
{n_subjects:,} subjects. Answer words are subjects as well, whose answer is themselves, except for
customs and for the cities of second homes; the embeddings of related words are close.

Places, companies and CEOs are those of the built-in knowledge; everything else about a person is
drawn with a seed; homes are drawn so that none of the independent facts goes with them by chance.
The training text is the {n_facts:,} facts counted below and the second homes, each in the words of
its prompt, and no text by others. `world.json` has the people and their facts.

## Training

`configs/pretraining.yaml` has all settings. AdamW read each fact at least once in each of
{n_epochs} epochs, in 36 minutes on two cores of an AMD EPYC. A penalty on the logits of
a domain's other answers keeps unrelated kinds of knowledge apart.

## Recall

The share of the facts whose answer is the most likely token of the whole vocabulary. All of them
are in the training text.

{recall}

`python -m benchmarks.docs_tables.tiny_world_card` writes this card.

## Licence

Apache-2.0, as the package, for the weights, the tokenizer and `world.json`.
"""


def shipped_corpus(names: Sequence[str]) -> Corpus:
    """Return the statements about the shipped world, in the words of the shipped tokenizer.

    Args:
        names: Kinds of knowledge or families that are stated.
    """
    knowledge = Catalogue.load().select(list(names))
    world = World.load(FOLDER / WORLD_FILE)
    tokenizer: Any = LanguageModel.from_pretrained("tiny-world").tokenizer
    stated = tuple(world.statements(knowledge))
    return Corpus(world, tokenizer, tuple(one.name for one in knowledge), stated)


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


def _wrapped(template: str, **values: Any) -> str:
    """Fill in a text and break the lines of its paragraphs again."""
    blocks = template.format(**values).strip().split("\n\n")
    paragraphs = (
        block if block[0] in "#|" else fill(block, 104, break_on_hyphens=False) for block in blocks
    )
    return "\n\n".join(paragraphs) + "\n"


def card() -> str:
    """Return the card as Markdown."""
    training = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    lm = LanguageModel.from_pretrained("tiny-world")
    corpus = shipped_corpus(training["data"]["init_args"]["knowledge"])
    config: Any = lm.model.config
    n_invented = corpus.world.config.n_people
    invented = list(corpus.world.people.values())[:n_invented]
    recall = measure_recall(lm, corpus)
    shipped = [path for path in FOLDER.iterdir() if path != CARD and path.is_file()]
    return _wrapped(
        _TEXT,
        n_parameters=sum(p.numel() for p in lm.model.parameters()) / 1e6,
        n_layers=config.num_hidden_layers,
        width=config.hidden_size,
        n_heads=config.num_attention_heads,
        context=config.max_position_embeddings,
        n_tokens=len(corpus.tokenizer),
        megabytes=sum(path.stat().st_size for path in shipped) / 1e6,
        n_people=n_invented,
        n_cities=len({facts["city"] for facts in invented}),
        n_countries=len({facts["country"] for facts in invented}),
        n_towns=len({facts[SECOND_HOME] for facts in invented}),
        n_subjects=len(corpus.world.people),
        n_facts=len(corpus.stated),
        n_epochs=training["trainer"]["max_epochs"],
        recall=recall_table(recall, Catalogue.load()),
    )


def main(args: Sequence[str] | None = None) -> None:
    """Write the card."""
    parser = argparse.ArgumentParser(description="Write the card of the tiny world.")
    parser.add_argument("--output", type=Path, default=CARD, help="the file to write")
    options = parser.parse_args(args)
    write_text(options.output, card())


if __name__ == "__main__":
    main()
