"""Where each knowledge's logits lie in the joint rows of a probe, and which pairs are fitted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

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


@dataclass(frozen=True)
class ProbeLayout:
    """Columns of the joint rows: the domains of all knowledges, then the control's.

    A row of a probe holds the domain logits of every knowledge prompt for one X, side by side. The
    control prompt says nothing of any knowledge; its columns are the tokens of all source domains,
    each once, so that the same tokens can be read off it for any source.

    Attributes:
        domains: Domain of each knowledge, in the order of the columns.
        pairs: Ordered pairs of knowledge names.
        control_token_ids: Tokens read off the control prompt; empty without one.
        references: Which label pairs are right, ``(n_target, n_source)`` bool; None if unknown.
        left_out: Knowledges of a family that this LM cannot be asked about, and why.
    """

    domains: dict[str, Domain]
    pairs: tuple[tuple[str, str], ...]
    control_token_ids: tuple[int, ...]
    references: dict[tuple[str, str], np.ndarray | None]
    left_out: dict[str, str] = field(default_factory=dict)

    # Asked for once a pair and more: what each of them would have to count is counted once.

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of labels of each knowledge."""
        return {name: len(domain.labels) for name, domain in self.domains.items()}

    @cached_property
    def _starts(self) -> dict[str, int]:
        """First column of each knowledge."""
        ends = accumulate(self.sizes.values(), initial=0)
        return dict(zip(self.sizes, ends, strict=False))

    @cached_property
    def _targets(self) -> dict[str, list[str]]:
        """Targets of each source, in the order of the columns."""
        asked: dict[str, set[str]] = {}
        for source, target in self.pairs:
            asked.setdefault(source, set()).add(target)
        return {
            source: [name for name in self.domains if name in targets]
            for source, targets in asked.items()
        }

    @property
    def n_labels(self) -> int:
        """Columns that belong to knowledges."""
        return sum(self.sizes.values())

    @property
    def n_columns(self) -> int:
        """Columns in all, the control's included."""
        return self.n_labels + len(self.control_token_ids)

    @property
    def sources(self) -> list[str]:
        """Knowledges that are the source of some pair, in the order of the columns."""
        return [name for name in self.domains if name in self._targets]

    def targets(self, source: str) -> list[str]:
        """Targets of a source, in the order of the columns."""
        return self._targets.get(source, [])

    def columns(self, name: str) -> Tensor:
        """Columns of one knowledge, ``(n_labels,)``."""
        start = self._starts[name]
        return torch.arange(start, start + self.sizes[name])

    def target_columns(self, source: str) -> Tensor:
        """Columns of all targets of a source, side by side."""
        return torch.cat([self.columns(target) for target in self.targets(source)])

    def control_columns(self, source: str) -> Tensor:
        """Columns of the control prompt that hold the tokens of a source's domain."""
        position = {token: i for i, token in enumerate(self.control_token_ids)}
        tokens = self.domains[source].token_ids
        return torch.tensor([self.n_labels + position[token] for token in tokens])


@torch.no_grad()
def domain_rows(
    lm: LanguageModel, layout: ProbeLayout, inputs: Sequence[str], control: str | None = None
) -> Tensor:
    """Domain logits of every knowledge prompt for some X's, and the control's, side by side.

    Args:
        lm: The LM that is asked.
        layout: Of its domains.
        inputs: The X's.
        control: The control prompt, of which the layout holds the tokens; None leaves it out.

    Returns:
        ``(n_subjects, n_labels)``, float64; ``(n_subjects, n_columns)`` with the control.

    Raises:
        NonFiniteError: The LM answers a prompt with NaN or infinite logits.
    """
    prompts = [[domain.knowledge.prompt(x) for x in inputs] for domain in layout.domains.values()]
    tokens = [domain.token_ids for domain in layout.domains.values()]
    if control is not None:
        prompts.append([control.format(x) for x in inputs])
        tokens.append(list(layout.control_token_ids))
    return lm.joint_logits(prompts, tokens)


def build_layout(
    tokenizer: PreTrainedTokenizerBase,
    catalogue: Catalogue,
    knowledges: Sequence[str],
    pairs: Sequence[str] | None,
    precision: Sequence[str],
    control: bool,
    given: Sequence[str] = (),
    subwords: bool = False,
) -> ProbeLayout:
    """Turn names from a config into domains, ordered pairs and references.

    Args:
        tokenizer: The LM's.
        catalogue: What may be asked.
        knowledges: Names of knowledges or families.
        pairs: ``source->target`` names; None for every ordered pair.
        precision: Pairs that must have a reference.
        control: Whether the rows carry the control prompt's columns.
        given: Knowledges that are read too, whether or not they are in a pair.
        subwords: Whether beginnings of words are labels too.

    Raises:
        KnowledgeError: An unknown name, or a pair of `precision` without reference.
        DomainError: A knowledge asked for by name has no label in this vocabulary.
        ConfigError: Fewer than two knowledges, or a pair of `precision` that is not fitted.
    """
    relations = None if pairs is None else [catalogue.relation(pair) for pair in pairs]
    asked = catalogue.select(knowledges)
    if relations is not None:
        named = [k for relation in relations for k in (relation.source, relation.target)]
        asked = list({k.name: k for k in [*asked, *named]}.values())
    by_name = set(knowledges) | {k.name for k in asked if relations is not None}
    left_out: dict[str, str] = {}
    domains = _domains(asked, tokenizer, by_name, subwords, left_out)
    if len(domains) < 2:
        raise ConfigError(
            f"a probe needs two knowledges or more; model.knowledges gives {list(domains)}. "
            "Name more, or a family such as 'attribute'."
        )
    if relations is None:
        chosen = [(s, t) for s in domains for t in domains if s != t]
    else:
        chosen = list(dict.fromkeys((r.source.name, r.target.name) for r in relations))
        # A knowledge that no pair uses would cost forwards and give nothing.
        used = {name for pair in chosen for name in pair}
        domains = {name: domain for name, domain in domains.items() if name in used}
    others = [catalogue[name] for name in dict.fromkeys(given) if name not in domains]
    domains |= _domains(others, tokenizer, set(given), subwords, left_out)
    references: dict[tuple[str, str], np.ndarray | None] = {}
    for source, target in chosen:
        relation = catalogue.relation(f"{source}->{target}")
        if relation.reference is None:
            references[source, target] = None
        else:
            right = reference_matrix(relation, domains[source], domains[target])
            references[source, target] = right if right.any() else None
    _check_precision(precision, references)
    sources = dict.fromkeys(source for source, _ in chosen)
    tokens = dict.fromkeys(token for source in sources for token in domains[source].token_ids)
    return ProbeLayout(
        domains, tuple(chosen), tuple(tokens) if control else (), references, left_out
    )


def _domains(
    asked: Sequence[Knowledge],
    tokenizer: PreTrainedTokenizerBase,
    by_name: set[str],
    subwords: bool,
    left_out: dict[str, str],
) -> dict[str, Domain]:
    domains = {}
    keep = tuple(Completeness) if subwords else WHOLE_WORDS
    for knowledge in asked:
        unknown = unknown_words(knowledge, tokenizer)
        if unknown:
            named = knowledge.name in by_name
            _log.warning(
                "%s%s: the LM does not know these words of its prompt: %s",
                knowledge.name,
                "" if named else " is left out",
                ", ".join(unknown),
            )
            if not named:
                left_out[knowledge.name] = (
                    "the LM does not know these words of its prompt: " + ", ".join(unknown)
                )
                continue
        try:
            domains[knowledge.name] = build_domain(knowledge, tokenizer, keep)
        except DomainError as error:
            if knowledge.name in by_name:
                raise
            _log.warning("%s is left out: %s", knowledge.name, error)
            left_out[knowledge.name] = str(error)
    return domains


def _check_precision(
    precision: Sequence[str], references: dict[tuple[str, str], np.ndarray | None]
) -> None:
    for name in precision:
        source, _, target = name.partition("->")
        if (source, target) not in references:
            raise ConfigError(
                f"model.precision names {name}, which this run does not fit. "
                "Add it to model.pairs, or its knowledges to model.knowledges."
            )
        if references[source, target] is None:
            raise KnowledgeError(
                f"model.precision names {name}, which has no reference: nobody has said which "
                f"{target} belongs to which {source}. Add the facts to a YAML file and name it in "
                "model.knowledge_files, or take the pair out of model.precision."
            )
