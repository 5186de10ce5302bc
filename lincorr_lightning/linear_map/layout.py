"""Joint rows: the domain logits of all kinds of knowledge side by side, and the pairs to fit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from tqdm import tqdm

from lincorr_lightning.errors import ConfigError, DomainError, KnowledgeError
from lincorr_lightning.knowledge import (
    WHOLE_WORDS,
    Catalogue,
    Completeness,
    Domain,
    Knowledge,
    build_domain,
    reference_matrix,
    unknown_words,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lincorr_lightning.lm.language_model import LanguageModel

_log = logging.getLogger(__name__)
# Subjects that are read between two steps of a progress bar.
_CHUNK = 256

T = TypeVar("T")

Pair = tuple[str, str]
"""Names of a source and a target."""

_Prompt = tuple[str, tuple[int, ...]]  # template and token ids


@dataclass(frozen=True)
class JointLayout:
    """Columns of the joint rows: the domains of all kinds of knowledge, then the control prompt's.

    A joint row holds the domain logits of every knowledge prompt for one subject, side by side. The
    control prompt is about no kind of knowledge; its columns are the tokens of all source domains.

    Attributes:
        domains: Domain of each kind of knowledge, in the order of the columns.
        pairs: Ordered pairs of names.
        control: The control prompt, with ``{}`` for the subject; None without one.
        references: Which label pairs the reference has, ``(n_target, n_source)`` bool; None where
            there is no reference.
        left_out: Kinds of knowledge of a family that this LM lacks words for, and which.
    """

    domains: dict[str, Domain]
    pairs: tuple[Pair, ...]
    control: str | None = None
    references: dict[Pair, np.ndarray | None] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    # Cached: each is used once per pair and more.

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of labels of each kind of knowledge."""
        return {name: len(domain.labels) for name, domain in self.domains.items()}

    @cached_property
    def _starts(self) -> dict[str, int]:
        """First column of each kind of knowledge."""
        ends = accumulate(self.sizes.values(), initial=0)
        return dict(zip(self.sizes, ends, strict=False))

    @cached_property
    def _targets(self) -> dict[str, list[str]]:
        """Targets of each source, in the order of the columns."""
        chosen: dict[str, set[str]] = {}
        for source, target in self.pairs:
            chosen.setdefault(source, set()).add(target)
        return {
            source: [name for name in self.domains if name in targets]
            for source, targets in chosen.items()
        }

    @cached_property
    def control_token_ids(self) -> list[int]:
        """Tokens read off the control prompt; empty without one."""
        if self.control is None:
            return []
        sources = dict.fromkeys(source for source, _ in self.pairs)
        tokens = (token for source in sources for token in self.domains[source].token_ids)
        return list(dict.fromkeys(tokens))

    @property
    def n_labels(self) -> int:
        """Number of columns that belong to kinds of knowledge."""
        return sum(self.sizes.values())

    @property
    def n_columns(self) -> int:
        """Number of all columns, the control prompt's included."""
        return self.n_labels + len(self.control_token_ids)

    @property
    def sources(self) -> list[str]:
        """Names that are the source of some pair, in the order of the columns."""
        return [name for name in self.domains if name in self._targets]

    def targets(self, source: str) -> list[str]:
        """Return the targets of a source, in the order of the columns."""
        return self._targets.get(source, [])

    def columns(self, name: str) -> Tensor:
        """Return the columns of one kind of knowledge, ``(n_labels,)``."""
        start = self._starts[name]
        return torch.arange(start, start + self.sizes[name])

    def target_columns(self, source: str) -> Tensor:
        """Return the columns of all targets of a source, side by side."""
        return torch.cat([self.columns(target) for target in self.targets(source)])

    def control_columns(self, source: str) -> Tensor:
        """Return the control prompt's columns that hold the tokens of a source's domain."""
        position = {token: i for i, token in enumerate(self.control_token_ids)}
        tokens = self.domains[source].token_ids
        return torch.tensor([self.n_labels + position[token] for token in tokens])


# -- reading ----------------------------------------------------------------------------------


def source_progress(layout: JointLayout, doing: str) -> Iterable[str]:
    """Return the sources, with a progress bar on rank 0 where there are many."""
    return _progress(layout.sources, doing, n_few=8, unit="source")


def _progress(items: list[T], doing: str, n_few: int, **options: Any) -> Iterable[T]:
    hidden = len(items) < n_few or getattr(rank_zero_only, "rank", 0) != 0
    # None hides the bar where there is no terminal.
    return tqdm(items, desc=doing, disable=hidden or None, leave=False, **options)


@torch.no_grad()
def domain_rows(lm: LanguageModel, layout: JointLayout, subjects: Sequence[str]) -> Tensor:
    """Return the joint rows of some subjects, ``(n_subjects, n_columns)``, float64."""
    domains = layout.domains.values()
    prompts = [[domain.knowledge.prompt(x) for x in subjects] for domain in domains]
    tokens = [domain.token_ids for domain in domains]
    if layout.control is not None:
        prompts.append([layout.control.format(x) for x in subjects])
        tokens.append(layout.control_token_ids)
    return lm.joint_logits(prompts, tokens)


def read_rows(lm: LanguageModel, layout: JointLayout, subjects: Sequence[str]) -> Tensor:
    """Return `domain_rows` of many subjects, with a progress bar on rank 0."""
    parts = [subjects[first : first + _CHUNK] for first in range(0, max(len(subjects), 1), _CHUNK)]
    bar = _progress(parts, "reading subjects", n_few=2, unit_scale=_CHUNK, unit="subject")
    return torch.cat([domain_rows(lm, layout, part) for part in bar])


class RowReader:
    """Reads joint rows, each prompt once: make a new reader when the LM's weights have changed.

    Whatever has been announced for the same subjects is read together: their prompts share their
    beginnings, which the LM then reads once.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self._announced: dict[tuple[str, ...], dict[_Prompt, Domain]] = {}
        self._logits: dict[tuple[str, ...], dict[_Prompt, Tensor]] = {}

    def announce(self, layout: JointLayout, subjects: Sequence[str]) -> None:
        """Note domains that will be read for some subjects."""
        domains = {_key(domain): domain for domain in layout.domains.values()}
        self._announced.setdefault(tuple(subjects), {}).update(domains)

    def read(self, layout: JointLayout, subjects: Sequence[str]) -> Tensor:
        """Return the joint rows of some subjects without a control prompt, ``(n, n_labels)``."""
        self.announce(layout, subjects)
        announced = self._announced[tuple(subjects)]
        known = self._logits.setdefault(tuple(subjects), {})
        missing = {str(i): d for i, (key, d) in enumerate(announced.items()) if key not in known}
        if missing:
            together = JointLayout(missing, ())
            rows = read_rows(self.lm, together, subjects)
            for name, domain in missing.items():
                known[_key(domain)] = rows[:, together.columns(name)]
        return torch.cat([known[_key(domain)] for domain in layout.domains.values()], dim=1)


def _key(domain: Domain) -> _Prompt:
    return domain.knowledge.template, tuple(domain.token_ids)


# -- building ---------------------------------------------------------------------------------


def build_layout(
    tokenizer: PreTrainedTokenizerBase,
    catalogue: Catalogue,
    knowledge: Sequence[str],
    pairs: Sequence[str] | None = None,
    require_reference: Sequence[str] = (),
    control: str | None = None,
    partial_out: Sequence[str] = (),
    subwords: bool = False,
) -> JointLayout:
    """Turn names from a config into domains, ordered pairs and references.

    Args:
        tokenizer: The LM's tokenizer.
        catalogue: The catalogue of knowledge.
        knowledge: Names of kinds of knowledge or of families.
        pairs: Pairs as ``city->country``; None for every ordered pair.
        require_reference: Pairs that must have a reference.
        control: The control prompt, with ``{}`` for the subject; None for no control columns.
        partial_out: Kinds of knowledge that are read too, whether or not a pair has them.
        subwords: Whether beginnings of words are labels too.
    """
    selected = {k.name: k for k in catalogue.select(knowledge)}
    by_name = set(knowledge)
    relations = [catalogue.relation(pair) for pair in pairs or ()]
    for relation in relations:
        selected |= {side.name: side for side in (relation.source, relation.target)}
    if pairs is not None:
        by_name |= set(selected)
    left_out: dict[str, str] = {}
    domains = _domains(selected.values(), tokenizer, by_name, subwords, left_out)
    if len(domains) < 2:
        raise ConfigError(
            f"a probe needs two kinds of knowledge or more; model.knowledge gives {list(domains)}. "
            "Name more, or a family such as 'attribute'."
        )
    if pairs is None:
        chosen = [(s, t) for s in domains for t in domains if s != t]
    else:
        chosen = list(dict.fromkeys((r.source.name, r.target.name) for r in relations))
        # Knowledge that no pair uses would cost forward passes and give nothing.
        used = {name for pair in chosen for name in pair}
        domains = {name: domain for name, domain in domains.items() if name in used}
    others = [catalogue[name] for name in dict.fromkeys(partial_out) if name not in domains]
    domains |= _domains(others, tokenizer, set(partial_out), subwords, left_out)
    references: dict[Pair, np.ndarray | None] = {}
    for source, target in chosen:
        relation = catalogue.relation(f"{source}->{target}")
        matrix = reference_matrix(relation, domains[source], domains[target])
        references[source, target] = matrix if matrix.any() else None
    for name in require_reference:
        _check_reference(name, references)
    return JointLayout(domains, tuple(chosen), control or None, references, left_out)


def _domains(
    selected: Iterable[Knowledge],
    tokenizer: PreTrainedTokenizerBase,
    by_name: Collection[str],
    subwords: bool,
    left_out: dict[str, str],
) -> dict[str, Domain]:
    """Return the domain of each kind of knowledge; note in `left_out` which have none, and why."""
    domains = {}
    keep = tuple(Completeness) if subwords else WHOLE_WORDS
    for knowledge in selected:
        named, reason = knowledge.name in by_name, ""
        unknown = unknown_words(knowledge, tokenizer)
        if unknown:
            reason = f"the LM does not know these words of its prompt: {', '.join(unknown)}"
        if named or not reason:
            try:
                domains[knowledge.name] = build_domain(knowledge, tokenizer, keep)
            except DomainError as error:
                if named:
                    raise
                reason = str(error)
        if reason:
            _log.warning("%s%s: %s", knowledge.name, "" if named else " is left out", reason)
            if not named:
                left_out[knowledge.name] = reason
    return domains


def _check_reference(name: str, references: Mapping[Pair, np.ndarray | None]) -> None:
    source, _, target = name.partition("->")
    if (source, target) not in references:
        raise ConfigError(
            f"model.require_reference names {name}, which this run does not fit. Add it to "
            "model.pairs, or both sides to model.knowledge; or set model.require_reference to []."
        )
    if references[source, target] is None:
        raise KnowledgeError(
            f"model.require_reference names {name}, which has no reference: no {target} is known "
            f"for any {source}. Add the facts to a file of model.knowledge_files, or leave it out."
        )
