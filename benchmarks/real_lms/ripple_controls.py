"""Edits that separate what an LM knows from what its vocabulary says, for ``ripples.py``.

*Words*: random words are taught in place of cities; right is the country that is nearest to the
word. *Fictitious*: an LM is first taught that cities lie in other countries than they do, with its
token embeddings and its head as they are; right is what it was taught, while the nearest word is
still the true country.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import yaml
from torch.nn.functional import cross_entropy

from lincorr_lightning.finetune.edits import nearness
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm import LanguageModel, LMConfig
from lincorr_lightning.lm.vocabulary import sample_up_to

N_WORDS = 400
N_CITIES = 60
N_PEOPLE = 40  # who live in each city in the texts that teach its country
STATEMENTS = (
    "{city} is a city in the country of {country}",
    "The city of {city} lies in {country}",
    "{who} lives in the city of {city}, which is in {country}",
    "{who} lives in the city of {city}. {who} lives in the country of {country}",
)
LEARNING_RATE = 5e-5
BATCH_SIZE = 16
ENOUGH = 0.95  # share of answers in context that are as taught, where teaching ends
MAX_STEPS = 1500


def nearest_targets(lm: LanguageModel, relation: TokenizedRelation) -> list[int]:
    """Return the target label that is nearest to each source label in the head."""
    weights = nearness(lm.nearest_words(), relation)
    assert weights is not None
    return list(weights.argmax(0).tolist())


def write_edits(path: Path, rows: Sequence[tuple[str, str, str]]) -> None:
    """Write a file of edits: subjects, answers and references."""
    keys = ("subject", "answer", "reference")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def words(folder: Path, seed: int, scratch: Path) -> tuple[str, ...]:
    """Write edits that teach random words of the vocabulary, and return options of a run."""
    lm = LanguageModel(LMConfig(str(folder)))
    catalogue = Catalogue.load()
    known = {
        word
        for kind in catalogue.values()
        for answer in kind.answers
        for word in answer.text.split()
    }
    drawn = sample_up_to(lm.tokenizer, 3 * N_WORDS, seed=seed, kind="words")
    chosen = [word for word in drawn if word.islower() and len(word) > 3 and word not in known]
    prompt = {"family": "control", "language": "en", "template": catalogue["city"].template}
    knowledge = {
        "version": 1,
        "source": "random words",
        "entities": {"word": {word: {} for word in chosen[:N_WORDS]}},
        "knowledge": {"word": {**prompt, "answers": "word"}},
    }
    file = scratch / "words.yaml"
    file.write_text(yaml.safe_dump(knowledge, allow_unicode=True), encoding="utf-8")
    relation = TokenizedRelation.of("word->country", Catalogue.load(str(file)), lm.tokenizer)
    best = nearest_targets(lm, relation)
    people = sample_up_to(lm.tokenizer, N_WORDS, seed=seed, kind="names")
    texts = [label.answers[0].text for label in relation.source.labels]
    countries = [relation.target.labels[label].answers[0].text for label in best]
    edits = scratch / "edits.jsonl"
    write_edits(edits, list(zip(people, texts, countries, strict=False)))
    return (
        f"--model.lm.name_or_path={folder}",
        f"--data.edits_file={edits}",
        f"--data.knowledge_files=[{file}]",
    )


def fictitious(folder: Path, seed: int, scratch: Path) -> tuple[str, ...]:
    """Teach an LM false countries of cities, write edits of these, and return options of a run."""
    lm = LanguageModel(LMConfig(str(folder), dtype="float32"))
    relation = TokenizedRelation.of("city->country", Catalogue.load(), lm.tokenizer)
    best = nearest_targets(lm, relation)
    facts = relation.relation.reference or {}
    right = {}  # cities whose nearest word is their country
    for label, country in zip(relation.source.labels, best, strict=True):
        texts = {answer.identity for answer in relation.target.labels[country].answers}
        if len(label.answers) == 1 and texts & facts.get(label.answers[0].identity, frozenset()):
            right[label.answers[0].text] = relation.target.labels[country].answers[0].text
    rng = np.random.default_rng(seed)
    by_country: dict[str, list[str]] = {}
    for city in rng.permutation(sorted(right)):
        by_country.setdefault(right[city], []).append(str(city))
    cities = [city for group in by_country.values() for city in group[:2]][:N_CITIES]
    countries = [right[city] for city in cities]
    # Each city gets the country of another one, so that no country is more frequent than before.
    shift = next(
        n
        for n in range(1, len(cities))
        if all(a != b for a, b in zip(countries, np.roll(countries, n), strict=True))
    )
    taught = np.roll(countries, shift).tolist()
    people = sample_up_to(lm.tokenizer, N_PEOPLE + len(cities) + 20, seed=seed, kind="names")
    teach(lm, list(zip(cities, taught, strict=True)), people[:N_PEOPLE], people[N_PEOPLE], rng)
    path = scratch / "taught"
    lm.model.save_pretrained(path)
    lm.tokenizer.save_pretrained(path)
    edits = scratch / "edits.jsonl"
    write_edits(edits, list(zip(people[-len(cities) :], cities, taught, strict=True)))
    return f"--model.lm.name_or_path={path}", f"--data.edits_file={edits}"


def teach(
    lm: LanguageModel,
    pairs: Sequence[tuple[str, str]],
    shown: Sequence[str],
    asked: str,
    rng: np.random.Generator,
) -> None:
    """Train the layers on statements of cities' countries, until they are known in context.

    They are known if the LM gives them after a statement of the city about a person `asked`, who is
    none of those `shown` in the texts. Token embeddings and the head do not change.
    """
    model = lm.load().model
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for frozen in (model.get_input_embeddings(), model.get_output_embeddings()):
        frozen.weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(MAX_STEPS):
        if step % 50 == 0 and known_in_context(lm, pairs, asked) >= ENOUGH:
            break
        chosen = [pairs[i] for i in rng.integers(len(pairs), size=BATCH_SIZE)]
        texts, starts = [], []
        for city, country in chosen:
            statement = STATEMENTS[rng.integers(len(STATEMENTS))]
            who = shown[rng.integers(len(shown))]
            texts.append(statement.format(city=city, country=country, who=who))
            starts.append(statement.format(city=city, country="", who=who).rstrip())
        rows, prompts = lm.rows(texts), lm.rows(starts)
        longest = max(map(len, rows))
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        labels = torch.full((len(rows), longest), -100)
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            tokens[i, : len(row)] = torch.tensor(row)
            labels[i, len(prompt) - 1 : len(row) - 1] = torch.tensor(row[len(prompt) :])
        logits = model(input_ids=tokens).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"taught after {step} steps", flush=True)


@torch.no_grad()
def known_in_context(lm: LanguageModel, pairs: Sequence[tuple[str, str]], who: str) -> float:
    """Return the share of cities whose country, as taught, follows a statement of the city."""
    city, country = (Catalogue.load()[name].template for name in ("city", "country"))
    prompts = [f"{city.format(who)} {one}. {country.format(who)}" for one, _ in pairs]
    firsts = [
        lm.rows([f"{p} {c}"])[0][len(lm.rows([p])[0])]
        for p, (_, c) in zip(prompts, pairs, strict=True)
    ]
    candidates = sorted({*firsts})
    logits = lm.domain_logits(prompts, candidates)
    hits = [candidates[i] for i in logits.argmax(1).tolist()]
    return float(np.mean([a == b for a, b in zip(hits, firsts, strict=True)]))


MAKERS = {"words": words, "fictitious": fictitious}
