"""Which target belongs to which source answer: the reference, and controls that break it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from lincorr_lightning.errors import ConfigError, DomainError, SubjectsError
from lincorr_lightning.knowledge import Answer, Knowledge, TokenizedRelation
from lincorr_lightning.knowledge.domain import answer_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MappingName = Literal["reference", "permuted", "letters"]
MAPPINGS: tuple[MappingName, ...] = get_args(MappingName)
_SHOWN = 8


@dataclass(frozen=True)
class PairedLabels:
    """The source answers that take part, and what belongs to each in the world.

    Attributes:
        asked: The relation under a tokenizer.
        sources: Index of each source label, in `asked.source`.
        targets: Index of the target label that is told of each, in `asked.target`.
    """

    asked: TokenizedRelation
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def target_domain(self) -> list[int]:
        """The target labels that take part, each once."""
        return sorted(set(self.targets))

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        """Which targets of the domain are true of which source, ``(n_sources, n_domain)``."""
        chosen: npt.NDArray[np.bool_] = self.asked.right[np.ix_(self.target_domain, self.sources)].T
        return chosen

    def source_text(self, index: int) -> str:
        """The text of one source answer."""
        return self.asked.source.texts[self.sources[index]]

    def target_text(self, index: int) -> str:
        """The text of one source answer's target."""
        return self.asked.target.texts[self.targets[index]]


@dataclass(frozen=True)
class MappedLabels:
    """Tokens of the answers under one mapping.

    Attributes:
        name: The mapping.
        source_tokens: Token of each source answer.
        target_tokens: Token of the target that is taught with it.
        domain_tokens: The targets' tokens, each once: chance is one of so many.
        right: Which of them are right for which source, ``(n_sources, n_domain)``.
    """

    name: MappingName
    source_tokens: tuple[int, ...]
    target_tokens: tuple[int, ...]
    domain_tokens: tuple[int, ...]
    right: npt.NDArray[np.bool_]


def pair_labels(
    asked: TokenizedRelation,
    most: int | None = None,
    only: Sequence[str] | None = None,
    seed: int = 0,
) -> PairedLabels:
    """Choose the source answers that take part, and the target that is told of each.

    Each has a target of its own as far as there are enough; of several right targets the one that
    comes first in the domain is told.

    Args:
        asked: A relation with a reference.
        most: How many; None takes all.
        only: Texts of the source labels to choose from; None: all that have a target.
        seed: Of the choice.

    Raises:
        KnowledgeError: The relation has no reference.
        SubjectsError: A label of `only` is none of this vocabulary or has no target, or fewer are
            usable than asked for; the message says which or how many.
    """
    asked.require_reference()
    told = {
        int(source): int(np.flatnonzero(asked.right[:, source])[0])
        for source in np.flatnonzero(asked.right.any(0))
    }
    if only is not None:
        told = {source: told[source] for source in _indices(only, asked, told)}
    if len(told) < max(most or 0, 2):
        raise SubjectsError(
            f"{asked.name} has {len(told)} usable pairs among this vocabulary's labels; "
            f"{most or 2} are asked for. Lower data.max_source_labels (null takes all), or choose "
            "another relation or LM."
        )
    rng = np.random.default_rng([seed, 1])
    shuffled = [int(source) for source in rng.permutation(sorted(told))]
    seen: set[int] = set()
    own: list[int] = []
    others: list[int] = []
    for source in shuffled:
        (others if told[source] in seen else own).append(source)
        seen.add(told[source])
    chosen = sorted((own + others)[:most])
    return PairedLabels(asked, tuple(chosen), tuple(told[source] for source in chosen))


def _indices(only: Sequence[str], asked: TokenizedRelation, told: dict[int, int]) -> list[int]:
    position = {text: index for index, text in enumerate(asked.source.texts)}
    # As it is written, or as the tokenizer writes it.
    position |= {a.text: i for i, l in enumerate(asked.source.labels) for a in l.answers}  # noqa: E741
    unknown = [text for text in only if text not in position]
    if unknown:
        raise SubjectsError(
            f"data.source_labels: no single token of this vocabulary stands for "
            f"{_listed(unknown)} as an answer of {asked.relation.source.name!r}. Remove them; "
            "`lincorr audit --details true` shows the labels there are."
        )
    without = [text for text in only if position[text] not in told]
    if without:
        raise SubjectsError(
            f"data.source_labels: {asked.name} has no target among the labels for "
            f"{_listed(without)}. Remove them."
        )
    return sorted({position[text] for text in only})


def map_labels(
    pairs: PairedLabels, name: MappingName, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> MappedLabels:
    """Say what is taught under a mapping.

    ``reference`` is what is true. ``permuted`` gives each source the target of another one, never a
    right one. ``letters`` cuts both answers to their first letters (paper, table 7).

    Args:
        pairs: Who takes part.
        name: The mapping.
        tokenizer: The vocabulary's.
        seed: Of the permutation.

    Raises:
        DomainError: A first letter is no single token of this vocabulary; they are listed.
        ConfigError: No permutation gives every source a wrong target.
    """
    source, target, domain = pairs.asked.source, pairs.asked.target, pairs.target_domain
    if name == "letters":
        return _cut_to_letters(pairs, tokenizer)
    source_tokens = tuple(source.token_ids[i] for i in pairs.sources)
    order = np.arange(len(pairs.sources))
    if name == "permuted":
        order = _without_fixed_points(pairs, seed)
    return MappedLabels(
        name,
        source_tokens,
        tuple(target.token_ids[pairs.targets[i]] for i in order),
        tuple(target.token_ids[i] for i in domain),
        pairs.right[order],
    )


def tokens_of_answers(pairs: PairedLabels, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that are an answer under any mapping, whichever of them is run.

    Args:
        pairs: Who takes part.
        tokenizer: The vocabulary's.
    """
    tokens: set[int] = set()
    names: tuple[MappingName, ...] = ("reference", "letters")
    for name in names:
        with suppress(DomainError):  # a vocabulary that does not spell
            mapped = map_labels(pairs, name, tokenizer)
            tokens.update(mapped.source_tokens, mapped.domain_tokens)
    return tokens


def _without_fixed_points(pairs: PairedLabels, seed: int) -> npt.NDArray[np.int64]:
    """For each source another one, whose target is wrong for it."""
    n = len(pairs.sources)
    cost = np.random.default_rng([seed, 2]).random((n, n))
    columns = [pairs.target_domain.index(target) for target in pairs.targets]
    forbidden = pairs.right[:, columns]
    cost[forbidden] = 2.0 * n  # more than all the others together
    _, order = linear_sum_assignment(cost)
    if forbidden[np.arange(n), order].any():
        raise ConfigError(
            f"the targets of {pairs.asked.name} cannot be permuted so that each is wrong: one of "
            "them is right for more than half of the sources. Raise data.max_source_labels, or "
            "choose another relation or mapping."
        )
    return np.asarray(order, dtype=np.int64)


def _cut_to_letters(pairs: PairedLabels, tokenizer: PreTrainedTokenizerBase) -> MappedLabels:
    source, target = pairs.asked.relation.source, pairs.asked.relation.target
    firsts = [pairs.source_text(i)[0] for i in range(len(pairs.sources))]
    domain = [pairs.asked.target.texts[i][0] for i in pairs.target_domain]
    source_ids = _letter_tokens(source, firsts, tokenizer)
    target_ids = _letter_tokens(target, domain, tokenizer)
    tokens = sorted(set(target_ids.values()))
    right = np.zeros((len(firsts), len(tokens)), dtype=np.bool_)
    for column, letter in enumerate(domain):
        right[:, tokens.index(target_ids[letter])] |= pairs.right[:, column]
    return MappedLabels(
        "letters",
        tuple(source_ids[letter] for letter in firsts),
        tuple(target_ids[pairs.target_text(i)[0]] for i in range(len(firsts))),
        tuple(tokens),
        right,
    )


def _letter_tokens(
    knowledge: Knowledge, letters: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, int]:
    """The token of each letter where the knowledge's answer stands."""
    wanted = list(dict.fromkeys(letters))
    cut = replace(knowledge, answers=tuple(Answer(letter, letter) for letter in wanted))
    tokens = dict(zip(wanted, answer_tokens(cut, tokenizer), strict=True))
    bad = [
        letter
        for letter, ids in tokens.items()
        if ids is None or len(ids) != 1 or ids[0] == tokenizer.unk_token_id
    ]
    if bad:
        raise DomainError(
            f"mapping letters: {_listed(bad)} of the answers of {knowledge.name!r} are no single "
            "tokens of this vocabulary. Leave letters out of model.mapping, or take an LM that "
            "spells."
        )
    return {letter: ids[0] for letter, ids in tokens.items() if ids}


def _listed(texts: Sequence[str]) -> str:
    shown = ", ".join(map(repr, texts[:_SHOWN]))
    return shown + (f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else "")
