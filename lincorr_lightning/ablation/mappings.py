"""Which target label belongs to which source label: the reference, and controls that break it."""

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import scipy
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.errors import ConfigError, DomainError, SubjectsError
from lincorr_lightning.knowledge import Answer, Knowledge, TokenizedRelation, answer_tokens

MappingName = Literal["reference", "permuted", "permuted_targets", "letters"]
MAPPINGS: tuple[MappingName, ...] = get_args(MappingName)


@dataclass(frozen=True)
class PairedLabels:
    """The source labels of a run, each with the target label that is taught with it."""

    relation: TokenizedRelation
    sources: tuple[int, ...]  #: Index of each source label in ``relation.source``.
    targets: tuple[int, ...]  #: Index of its target label in ``relation.target``.

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def target_domain(self) -> list[int]:
        """The distinct target labels."""
        return sorted(set(self.targets))

    @property
    def reference(self) -> npt.NDArray[np.bool_]:
        """Whether each target label is right for each source, ``(n_sources, n_domain)``."""
        mask: npt.NDArray[np.bool_] = self.relation.reference_mask.T
        return mask[np.ix_(self.sources, self.target_domain)]


@dataclass(frozen=True)
class MappedLabels:
    """The tokens of the labels under a mapping."""

    source_tokens: tuple[int, ...]
    target_tokens: tuple[int, ...]  #: Target token that is taught with each source token.
    domain_tokens: tuple[int, ...]  #: Distinct target tokens.
    reference: npt.NDArray[np.bool_]
    """Whether each domain token is right for each source, ``(n_sources, n_domain)``."""


def pair_labels(
    relation: TokenizedRelation,
    n: int | None = None,
    seed: int = 0,
    n_per_target: int | None = None,
) -> PairedLabels:
    """Choose source labels, and for each the target label that is taught with it.

    `n` labels with a target are chosen (None: all). Targets are distinct as far as there are
    enough, and each has at most `n_per_target` sources (None: any number); of several right targets
    the first one in the domain is taught.
    """
    relation.require_reference()
    target_of = {
        int(source): int(np.flatnonzero(relation.reference_mask[:, source])[0])
        for source in np.flatnonzero(relation.reference_mask.any(0))
    }
    by_target = defaultdict[int, list[int]](list)
    rng = np.random.default_rng([seed, 1])
    shuffled = [int(source) for source in rng.permutation(sorted(target_of))]
    for source in shuffled:
        by_target[target_of[source]].append(source)
    rank = {source: i for sources in by_target.values() for i, source in enumerate(sources)}
    # Those with a target of their own first; sorting keeps the shuffled order otherwise.
    shuffled.sort(key=lambda source: rank[source] > 0)
    shuffled = [source for source in shuffled if rank[source] < (n_per_target or len(rank))]
    if len(shuffled) < max(n or 0, 2):
        raise SubjectsError(
            f"{relation.name} has {len(shuffled)} usable pairs among the labels of this "
            f"vocabulary; {n or 2} are needed. Lower data.max_source_labels or raise "
            "data.max_sources_per_target (null takes all), or choose another relation or LM."
        )
    chosen = sorted(shuffled[:n])
    return PairedLabels(relation, tuple(chosen), tuple(target_of[source] for source in chosen))


def map_labels(
    labels: PairedLabels, name: MappingName, tokenizer: PreTrainedTokenizerBase, seed: int = 0
) -> MappedLabels:
    """Apply a mapping: decide which target is taught with which source (paper, table 7).

    ``reference``: the right target; ``permuted``: the target of another source, never a right one,
    drawn by `seed`; ``permuted_targets``: another target that is right for no source of the right
    one, the same for all of them, so that what has one target still has; ``letters``: the
    reference, with both answers cut to their first letters.
    """
    source = labels.relation.source
    target = labels.relation.target
    domain = labels.target_domain
    taught = np.array(labels.targets)[:, None] == np.array(domain)  # (n_sources, n_domain)
    order = list(range(len(labels)))
    renamed = domain
    if name == "permuted":
        order = _permutation(labels, labels.reference @ taught.T, seed)
    elif name == "permuted_targets":
        renamed = [domain[i] for i in _permutation(labels, taught.T @ labels.reference, seed)]
    source_tokens = [source.token_ids[i] for i in labels.sources]
    token_of = {i: target.token_ids[k] for i, k in zip(domain, renamed, strict=True)}
    if name == "letters":
        texts = (source.texts[i] for i in labels.sources)
        source_tokens = _letters(source.knowledge, texts, tokenizer)
        letters = _letters(target.knowledge, (target.texts[i] for i in domain), tokenizer)
        token_of = dict(zip(domain, letters, strict=True))
    domain_tokens = list(dict.fromkeys(token_of.values()))
    reference = np.zeros((len(labels), len(domain_tokens)), dtype=np.bool_)
    for i, is_right in zip(domain, labels.reference.T, strict=True):
        reference[:, domain_tokens.index(token_of[i])] |= is_right
    return MappedLabels(
        tuple(source_tokens),
        tuple(token_of[labels.targets[i]] for i in order),
        tuple(domain_tokens),
        reference[order],
    )


def _permutation(labels: PairedLabels, forbidden: npt.NDArray[np.bool_], seed: int) -> list[int]:
    """Return for each row another one, such that none of the pairs is `forbidden`, ``(n, n)``."""
    n = len(forbidden)
    cost = np.random.default_rng([seed, 2]).random((n, n))
    cost[forbidden] = 2.0 * n  # more than all the others together
    _, order = scipy.optimize.linear_sum_assignment(cost)
    if forbidden[np.arange(n), order].any():
        raise ConfigError(
            f"the targets of {labels.relation.name} cannot be permuted so that each is wrong: one "
            "of them is right for more than half of the sources. Raise data.max_source_labels, or "
            "choose another relation or mapping."
        )
    return [int(i) for i in order]


def _letters(
    knowledge: Knowledge, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return the token of each text's first letter in the position of an answer."""
    letters = [text[0] for text in texts]
    distinct = list(dict.fromkeys(letters))
    cut = replace(knowledge, answers=tuple(Answer(letter, letter) for letter in distinct))
    tokens = zip(distinct, answer_tokens(cut, tokenizer), strict=True)
    single = {letter: ids[0] for letter, ids in tokens if ids and len(ids) == 1}
    bad = [letter for letter in distinct if single.get(letter) in (None, tokenizer.unk_token_id)]
    if bad:
        raise DomainError(
            f"mapping letters: {', '.join(map(repr, bad))} of the answers of {knowledge.name!r} "
            "are not single tokens of this vocabulary. Remove letters from model.mapping, or "
            "choose an LM that has tokens for letters."
        )
    return [single[letter] for letter in letters]


def answer_token_ids(labels: PairedLabels, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokens that are an answer under any mapping, whichever of them is run."""
    mapped = [map_labels(labels, "reference", tokenizer)]
    with suppress(DomainError):  # the vocabulary has no tokens for letters
        mapped.append(map_labels(labels, "letters", tokenizer))
    return {token for each in mapped for token in (*each.source_tokens, *each.domain_tokens)}
