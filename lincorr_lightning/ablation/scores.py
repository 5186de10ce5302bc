"""What the networks of a vocabulary ablation answer, and the shares of right answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.ablation.networks import StackedNetworks
from lincorr_lightning.ablation.pooled_texts import SIDES, PooledTexts
from lincorr_lightning.results.table import column


@dataclass(frozen=True)
class RunScores:
    """Shares of the new subjects for one network."""

    mapping: str
    seed: int
    composed: bool
    """Whether it has read paired texts before; False in the phase ``uncomposed``."""

    source_learned: float = column(format=".1%")
    """Source text completed as taught, among all candidates."""

    generalized: float = column(format=".1%")
    """Target text completed with a right answer, among the target domain."""

    unrestricted: float = column(format=".1%")
    """The same among all candidates."""

    says_source: float = column(format=".1%")
    """Target text completed with the source answer."""


@dataclass(frozen=True)
class Case:
    """What a network answers for a new subject."""

    mapping: str
    subject: str
    source_answer: str
    source_said: str
    reference: str
    target_in_domain: str
    target_said: str
    generalized: bool


class _Answers(NamedTuple):
    """Candidates for the new subjects, ``(n_seeds, n_mappings, n_new)`` each."""

    taught_source: Tensor
    source: Tensor  # the most likely one after the source text
    mapped_target: Tensor
    target_in_domain: Tensor  # the most likely one of the target domain
    target: Tensor
    is_right: Tensor  # whether `target_in_domain` is


@torch.no_grad()
def _answer_new_subjects(texts: PooledTexts, networks: StackedNetworks) -> _Answers:
    """Let every network complete the texts of its new subjects."""
    rows = [texts.rows_of("new", side) for side in SIDES]
    taught, mapped = (texts.answers_to(one) for one in rows)
    source, target = (
        texts.logits(networks(texts.inputs(one))).view(*taught.shape, -1) for one in rows
    )
    domain = texts.domain[:, :, None].expand(-1, -1, texts.corpus.n_new, -1)
    among = target.gather(-1, domain.clamp(min=0)).masked_fill(domain < 0, -torch.inf)
    best = among.argmax(-1, keepdim=True)
    return _Answers(
        taught,
        source.argmax(-1),
        mapped,
        domain.gather(-1, best)[..., 0],
        target.argmax(-1),
        texts.reference_mask.gather(-1, best)[..., 0],
    )


def score(texts: PooledTexts, networks: StackedNetworks, composed: bool) -> list[RunScores]:
    """Score every network on its new subjects: the mappings of the first seed, then of the next."""
    answers = _answer_new_subjects(texts, networks)
    hits = {
        "source_learned": answers.source == answers.taught_source,
        "generalized": answers.is_right,
        # The best of all candidates must be right, not only the best of the domain.
        "unrestricted": answers.is_right & (answers.target == answers.target_in_domain),
        "says_source": answers.target == answers.taught_source,
    }
    shares = {name: values.double().mean(-1).tolist() for name, values in hits.items()}
    return [
        RunScores(mapping, seed, composed, **{name: rows[s][m] for name, rows in shares.items()})
        for s, seed in enumerate(texts.corpus.seeds)
        for m, mapping in enumerate(texts.corpus.mappings)
    ]


@torch.no_grad()
def score_paired(texts: PooledTexts, networks: StackedNetworks) -> dict[str, list[float]]:
    """Return the shares of paired texts completed as taught, by side and mapping."""
    shares = {}
    for side in SIDES:
        rows = texts.rows_of("paired", side)
        logits = texts.logits(networks(texts.inputs(rows)))
        answers = texts.answers_to(rows)
        hits = logits.argmax(-1).view_as(answers) == answers
        shares[f"{side}_learned"] = hits.double().mean((0, 2)).tolist()
    return shares


def baselines(texts: PooledTexts) -> dict[str, list[float]]:
    """Return the shares of the new subjects that are right without any network, by mapping.

    Means over seeds: ``random``, an answer drawn from the target domain, and ``majority``, the most
    frequent right answer.
    """
    n_domain = (texts.domain >= 0).sum(-1)
    per_answer = texts.reference_mask.double().mean(2)
    random, majority = per_answer.sum(-1) / n_domain, per_answer.amax(-1)
    return {"random": random.mean(0).tolist(), "majority": majority.mean(0).tolist()}


def cases(
    texts: PooledTexts, networks: StackedNetworks, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Case]:
    """Yield a case for each mapping and new subject of the first seed."""
    answers = _answer_new_subjects(texts, networks)
    candidates = texts.candidate_tokens[0]

    def word(candidate: Tensor) -> str:
        token = candidates[int(candidate)]
        return str(tokenizer.decode([token], clean_up_tokenization_spaces=False)).strip()

    for m, mapping in enumerate(texts.corpus.mappings):
        for i, subject in enumerate(texts.corpus.texts[0].subjects[texts.corpus.n_paired :]):
            taught, source, mapped, in_domain, target = (word(p[0, m, i]) for p in answers[:-1])
            is_right = bool(answers.is_right[0, m, i])
            yield Case(mapping, subject, taught, source, mapped, in_domain, target, is_right)
