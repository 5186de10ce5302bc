"""What the networks of a vocabulary ablation answer, and the shares of right answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.ablation.networks import StackedNetworks
from lincorr_lightning.ablation.pooled_texts import PooledTexts, Side

_SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class RunScores:
    """Shares of the new subjects for one network.

    Attributes:
        mapping: Mapping that it was trained under.
        seed: Seed of its subjects, permutation and weights.
        source_learned: Source text completed as taught, among all candidates.
        generalized: Target text completed with a right answer, among the target domain.
        unrestricted: The same among all candidates.
        says_source: Target text completed with the source answer.
    """

    mapping: str
    seed: int
    source_learned: float
    generalized: float
    unrestricted: float
    says_source: float


@dataclass(frozen=True)
class NewSubjectAnswers:
    """Candidates that the networks answer for the new subjects.

    All tensors have the shape ``(n_seeds, n_mappings, n_new)``.

    Attributes:
        source: Most likely candidate after the source text.
        target: Most likely candidate after the target text.
        target_in_domain: Most likely candidate of the target domain.
        is_right: Whether that one is right.
        taught_source: Source answer that is taught.
        mapped_target: Target answer under the mapping.
    """

    source: Tensor
    target: Tensor
    target_in_domain: Tensor
    is_right: Tensor
    taught_source: Tensor
    mapped_target: Tensor


@torch.no_grad()
def answer_new_subjects(texts: PooledTexts, networks: StackedNetworks) -> NewSubjectAnswers:
    """Let every network complete the texts of its new subjects."""
    rows = [texts.rows_of("new", side) for side in _SIDES]
    shape = (texts.n_seeds, texts.n_mappings, texts.corpus.n_new)
    source, target = (
        texts.logits(networks(texts.inputs(one))).view(*shape, texts.head.shape[-1]) for one in rows
    )
    domain = texts.domain[:, :, None].expand(-1, -1, texts.corpus.n_new, -1)
    among = target.gather(-1, domain.clamp(min=0)).masked_fill(domain < 0, -torch.inf)
    best = among.argmax(-1, keepdim=True)
    return NewSubjectAnswers(
        source.argmax(-1),
        target.argmax(-1),
        domain.gather(-1, best)[..., 0],
        texts.reference_mask.gather(-1, best)[..., 0],
        *(texts.answers_to(one) for one in rows),
    )


def score(texts: PooledTexts, networks: StackedNetworks) -> list[RunScores]:
    """Score every network on its new subjects.

    Returns:
        The mappings of the first seed, then those of the next.
    """
    found = answer_new_subjects(texts, networks)
    hits = {
        "source_learned": found.source == found.taught_source,
        "generalized": found.is_right,
        # The best of all candidates must be right, not only the best of the domain.
        "unrestricted": found.is_right & (found.target == found.target_in_domain),
        "says_source": found.target == found.taught_source,
    }
    shares = {name: values.double().mean(-1).tolist() for name, values in hits.items()}
    return [
        RunScores(mapping, seed, **{name: rows[s][m] for name, rows in shares.items()})
        for s, seed in enumerate(texts.corpus.seeds)
        for m, mapping in enumerate(texts.corpus.mappings)
    ]


@torch.no_grad()
def score_paired(texts: PooledTexts, networks: StackedNetworks) -> dict[str, list[float]]:
    """Return the shares of paired texts completed as taught, by side and mapping."""
    found = {}
    for side in _SIDES:
        rows = texts.rows_of("paired", side)
        logits = texts.logits(networks(texts.inputs(rows)))
        answers = texts.answers_to(rows)
        hits = logits.argmax(-1).view_as(answers) == answers
        found[f"{side}_learned"] = hits.double().mean((0, 2)).tolist()
    return found


@dataclass(frozen=True)
class Baselines:
    """Shares of the new subjects that are right without any network, by mapping.

    Attributes:
        random: An answer drawn from the target domain.
        majority: The most frequent right answer.
    """

    random: tuple[float, ...]
    majority: tuple[float, ...]


def baselines(texts: PooledTexts) -> Baselines:
    """Return the means of the baselines over seeds."""
    n_domain = (texts.domain >= 0).sum(-1)
    per_answer = texts.reference_mask.double().mean(2)
    random, majority = per_answer.sum(-1) / n_domain, per_answer.amax(-1)
    return Baselines(tuple(random.mean(0).tolist()), tuple(majority.mean(0).tolist()))


CASE_COLUMNS = (
    "mapping", "subject", "source_answer", "source_said", "reference", "target_in_domain",
    "target_said", "generalized",
)  # fmt: skip


def cases(
    texts: PooledTexts, networks: StackedNetworks, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[object]]:
    """Yield a row of `CASE_COLUMNS` for each mapping and new subject of the first seed."""
    found = answer_new_subjects(texts, networks)
    candidates = texts.candidate_tokens[0]

    def word(candidate: Tensor) -> str:
        token = candidates[int(candidate)]
        return str(tokenizer.decode([token], clean_up_tokenization_spaces=False)).strip()

    columns = (
        found.taught_source, found.source, found.mapped_target, found.target_in_domain, found.target
    )  # fmt: skip
    for m, mapping in enumerate(texts.corpus.mappings):
        for i, subject in enumerate(texts.corpus.texts[0].subjects[texts.corpus.n_paired :]):
            words = [word(column[0, m, i]) for column in columns]
            yield [mapping, subject, *words, bool(found.is_right[0, m, i])]
