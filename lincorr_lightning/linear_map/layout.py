"""Joint rows: the domain logits of all kinds of knowledge side by side, and the pairs to fit."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning import knowledge as kinds
from lincorr_lightning.errors import ConfigError, DomainError, KnowledgeError
from lincorr_lightning.functional.moments import Block, upper_half
from lincorr_lightning.knowledge import Answer, Catalogue, Domain, Knowledge, TokenizedRelation
from lincorr_lightning.knowledge.answer_tokens import TokenReader, answer_tokens, unknown_words
from lincorr_lightning.knowledge.domain import build_domain, label_answers, reference_matrix
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.progress import progress

_log = logging.getLogger(__name__)
_CHUNK = 256  # subjects that are read between two steps of a progress bar
_DRAWS_AT_ONCE = 5  # at least, of as many random words as are compared with labels
_WORDS_SEED = 1

Pair = tuple[str, str]  #: Names of a source and a target.

Wordings = Literal["first", "templates", "paraphrases"]

Read = tuple[str, tuple[int, ...]]  #: A template, and the tokens to read after its prompts.


class View(NamedTuple):
    """What is read after one prompt; its columns lie side by side.

    Attributes:
        kind: ``labels`` of a kind of knowledge after its own prompt; ``control``: those of all
            sources after the control prompt; ``words``: random words after its prompt; ``targets``:
            the labels of its targets after its prompt.
        name: Name of the kind of knowledge whose prompt is read; empty for ``control``.
    """

    kind: str
    name: str = ""


@dataclass(frozen=True)
class JointLayout:
    """Columns of the joint rows: the domains of all kinds of knowledge, then what nulls need.

    First those that are read of all subjects, then the labels' logits of another subject, then
    those that only maps are fitted on, the views ``targets``, which held-out subjects do not have.

    Nulls compare them with the logits of the same labels after other prompts, and of random words
    after the same prompts (see `View`), and with those of another subject.

    Attributes:
        domains: Domain of each kind of knowledge, in the order of the columns.
        pairs: Ordered pairs of names.
        control: The control prompt, about no kind of knowledge, with ``{}`` for the subject.
        references: Which label pairs the reference has, ``(n_target, n_source)`` bool, if any.
        left_out: Kinds of knowledge of a family that this LM lacks words for, and which.
        permuted: Whether rows have the labels' logits of another subject.
        words: Token ids of random words for each kind of knowledge of a pair; empty leaves them
            and the targets' labels after the source prompt out.
        partial_out: Kinds of knowledge that are removed from both sides of every pair.
    """

    domains: dict[str, Domain]
    pairs: tuple[Pair, ...]
    control: str | None = None
    references: Mapping[Pair, np.ndarray | None] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    permuted: bool = False
    words: dict[str, list[int]] = field(default_factory=dict)
    partial_out: tuple[str, ...] = ()

    @classmethod
    def of_relation(cls, relation: TokenizedRelation) -> Self:
        """Return the layout of one relation's source and target."""
        source, target = relation.source, relation.target
        pair = source.knowledge.name, target.knowledge.name
        references = {pair: relation.reference_mask} if relation.has_reference else {}
        return cls({pair[0]: source, pair[1]: target}, (pair,), references=references)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of labels of each kind of knowledge."""
        return {name: len(domain.labels) for name, domain in self.domains.items()}

    def reference(self, pair: Pair) -> npt.NDArray[np.bool_]:
        """Return which label pairs of a pair are right, like W; none where that is not known."""
        known = self.references.get(pair)
        shape = self.sizes[pair[1]], self.sizes[pair[0]]
        return np.zeros(shape, dtype=bool) if known is None else known

    @cached_property
    def targets(self) -> dict[str, list[str]]:
        """Targets of each source, both in the order of the columns."""
        pairs = set(self.pairs)
        targets = {s: [t for t in self.domains if (s, t) in pairs] for s in self.domains}
        return {source: names for source, names in targets.items() if names}

    @cached_property
    def views(self) -> dict[View, list[int]]:
        """Tokens of each view, in the order of the columns."""
        views = {View("labels", name): one.token_ids for name, one in self.domains.items()}
        if self.control is not None:
            # The map from the control prompt to itself needs the targets' labels, too.
            read = {name for pair in self.pairs for name in pair[: 2 if self.words else 1]}
            views[View("control")] = self._tokens(name for name in self.domains if name in read)
        views |= {View("words", name): tokens for name, tokens in self.words.items()}
        if self.words:
            for source, targets in self.targets.items():
                views[View("targets", source)] = self._tokens(targets)
        return views

    def _tokens(self, names: Iterable[str]) -> list[int]:
        tokens = (token for name in names for token in self.domains[name].token_ids)
        return list(dict.fromkeys(tokens))

    @cached_property
    def _spans(self) -> dict[View, slice]:
        spans, start = {}, 0
        for view, tokens in self.views.items():
            first = start + self.permuted * self.n_labels * (view.kind == "targets")
            spans[view] = slice(first, first + len(tokens))
            start += len(tokens)
        return spans

    @property
    def reads(self) -> list[Read]:
        """Template and tokens of each view that is read of fitted subjects, in their order."""
        prompts = {name: one.knowledge.template for name, one in self.domains.items()}
        prompts[""] = str(self.control)
        return [(prompts[view.name], tuple(tokens)) for view, tokens in self.views.items()]

    def reads_of(self, half: Literal["fit", "test"]) -> list[Read]:
        """Return `reads`, or those of held-out subjects, which are the first."""
        n_test = sum(view.kind != "targets" for view in self.views)
        return self.reads if half == "fit" else self.reads[:n_test]

    @property
    def n_labels(self) -> int:
        """Number of the first columns, which belong to kinds of knowledge."""
        return sum(self.sizes.values())

    @property
    def n_kept(self) -> int:
        """Number of the first columns, which are read of all subjects."""
        return sum(len(tokens) for view, tokens in self.views.items() if view.kind != "targets")

    @property
    def n_read(self) -> int:
        """Number of columns that the LM is read for: all but those of another subject."""
        return sum(map(len, self.views.values()))

    @property
    def n_columns(self) -> int:
        """Number of the columns of fitted subjects, all of them."""
        return self.n_read + self.permuted * self.n_labels

    @property
    def n_test_columns(self) -> int:
        """Number of the columns of held-out subjects, the first of all."""
        return self.n_kept + self.permuted * self.n_labels

    @property
    def label_blocks(self) -> list[Block]:
        """The blocks of the joint scatter between labels."""
        return upper_half(slice(0, self.n_labels))

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the joint scatter of fitted subjects."""
        spans = self._spans
        targets = [(view.name, span) for view, span in spans.items() if view.kind == "targets"]
        return self.test_blocks + [(spans[View("labels", x)], span) for x, span in targets]

    @property
    def test_blocks(self) -> list[Block]:
        """The blocks of the joint scatter of held-out subjects, by which maps are scored."""
        blocks = self.label_blocks
        for name in self.words:
            span = self._spans[View("words", name)]
            partners = {other for pair in self.pairs for other in pair if name in pair} - {name}
            blocks += [(run, span) for run in self._runs(partners)]
            blocks += upper_half(span)
        for source, targets in self.targets.items():
            labels = self._spans[View("labels", source)]
            for run in self._runs(targets) if self.permuted else ():
                blocks.append((labels, slice(self.n_kept + run.start, self.n_kept + run.stop)))
        if self.control is not None:
            span = self._spans[View("control")]
            blocks += [(run, span) for run in self._runs({target for _, target in self.pairs})]
            blocks += upper_half(span)
        return blocks

    def _runs(self, names: Collection[str]) -> list[slice]:
        """Return the columns of the labels of some kinds of knowledge, those of neighbours as one.

        Names are taken in the order of the columns.
        """
        runs: list[slice] = []
        for name in self.domains:
            if name in names:
                span = self._spans[View("labels", name)]
                start = runs.pop().start if runs and runs[-1].stop == span.start else span.start
                runs.append(slice(start, span.stop))
        return runs

    @property
    def sources(self) -> list[str]:
        """Names that are the source of some pair, in the order of the columns."""
        return list(self.targets)

    def columns(self, name: str, kind: str = "labels") -> Tensor:
        """Return the columns of one kind of knowledge: its ``labels``, or random ``words``."""
        span = self._spans[View(kind, name)]
        return torch.arange(span.start, span.stop)

    def target_columns(self, source: str) -> Tensor:
        """Return the columns of all targets of a source, side by side."""
        return torch.cat([self.columns(target) for target in self.targets[source]])

    def target_sizes(self, source: str) -> list[int]:
        """Return the number of labels of each target of a source."""
        return [self.sizes[target] for target in self.targets[source]]

    def control_columns(self, *names: str) -> Tensor:
        """Return the columns of the labels of some kinds of knowledge after the control prompt."""
        return self._find(View("control"), names)

    @cached_property
    def problems(self) -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
        """Columns x and y that the map of each source, ``y``, and those of its nulls are fitted on.

        ``permuted``: to targets of another subject. ``vocabulary``: to the targets' labels after
        the source's own prompt, the map of Gaussian states with the covariance of the LM's states
        there. ``control``: from the source's labels after the control prompt. ``same_prompt``:
        between both label sets after the control prompt.
        """
        problems = {}
        for source, targets in self.targets.items():
            x, y = self.columns(source), self.target_columns(source)
            columns = problems[source] = {"y": (x, y)}
            if self.permuted:
                columns["permuted"] = x, self.n_kept + y
            if self.words:
                columns["vocabulary"] = x, self._find(View("targets", source), targets)
            if self.control is not None:
                columns["control"] = self.control_columns(source), y
                if self.words:
                    columns["same_prompt"] = columns["control"][0], self.control_columns(*targets)
        return problems

    def _find(self, view: View, names: Iterable[str]) -> Tensor:
        column = {token: i for i, token in enumerate(self.views[view], self._spans[view].start)}
        tokens = [token for name in names for token in self.domains[name].token_ids]
        return torch.tensor([column[token] for token in tokens])

    def with_permuted(self, rows: Tensor, *groups: Tensor) -> list[Tensor]:
        """Return all columns, in parts, of rows that are read, ``(n_subjects, n_read or n_kept)``.

        If `permuted`, the labels' logits of another subject come after the first `n_kept`. It is
        the subject of the row before, or of that before in a group of rows, if there are `groups`
        of indices: a pairing as random as the order of the subjects.
        """
        if not self.permuted:
            return [rows]
        labels = rows[:, : self.n_labels]
        permuted = torch.empty_like(labels)
        for group in groups or [torch.arange(len(rows), device=rows.device)]:
            permuted[group] = labels[group.roll(1)]
        parts = rows[:, : self.n_kept], permuted, rows[:, self.n_kept :]
        return [part for part in parts if part.shape[1]]


@torch.no_grad()
def domain_rows(lm: LanguageModel, reads: Sequence[Read], subjects: Sequence[str]) -> Tensor:
    """Return the joint rows of some subjects, ``(n_subjects, n_read)``, float64.

    `reads` are those of a layout, or of its held-out subjects. Each prompt is read once.
    """
    templates = list(dict.fromkeys(template for template, _ in reads))
    prompts = [[template.replace("{}", x, 1) for x in subjects] for template in templates]
    read_after = [templates.index(template) for template, _ in reads]
    return lm.joint_logits(prompts, [tokens for _, tokens in reads], read_after)


class RelationLogits(NamedTuple):
    """Domain logits of source and target for the same subjects, ``(n_subjects, n_labels)``."""

    source: Tensor
    target: Tensor


def relation_logits(
    lm: LanguageModel, relation: TokenizedRelation, subjects: Sequence[str]
) -> RelationLogits:
    """Return the domain logits of a relation's prompts, on the CPU."""
    source = lm.domain_logits(relation.source_prompts(subjects), relation.source.token_ids)
    target = lm.domain_logits(relation.target_prompts(subjects), relation.target.token_ids)
    return RelationLogits(source.cpu(), target.cpu())


class RowReader:
    """Reads joint rows, each prompt once: make a new reader when the LM's weights have changed.

    Whatever has been announced for the same subjects is read together: their prompts share their
    beginnings, which the LM then reads once. Rank 0 shows a progress bar.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self._announced: dict[tuple[str, ...], dict[Read, None]] = {}
        self._logits: dict[tuple[str, ...], dict[Read, Tensor]] = {}

    def announce(self, layout: JointLayout, subjects: Sequence[str]) -> None:
        """Note rows that will be read for some subjects."""
        self._announced.setdefault(tuple(subjects), {}).update(dict.fromkeys(layout.reads))

    def read(self, layout: JointLayout, subjects: Sequence[str]) -> Tensor:
        """Return the joint rows of some subjects as they are read, ``(n_subjects, n_read)``."""
        self.announce(layout, subjects)
        known = self._logits.setdefault(tuple(subjects), {})
        if missing := [one for one in self._announced[tuple(subjects)] if one not in known]:
            starts = range(0, max(len(subjects), 1), _CHUNK)
            bar = progress(starts, "reading subjects", unit_scale=_CHUNK, unit="subject")
            rows = torch.cat([domain_rows(self.lm, missing, subjects[i : i + _CHUNK]) for i in bar])
            sizes = [len(tokens) for _, tokens in missing]
            known |= zip(missing, torch.split(rows, sizes, dim=1), strict=True)
        return torch.cat([known[one] for one in layout.reads], dim=1)


def build_layout(
    tokenizer: PreTrainedTokenizerBase,
    catalogue: Catalogue,
    *,
    knowledge: Sequence[str] = (),
    pairs: Sequence[str] | None = None,
    require_reference: Sequence[str] = (),
    control: str | None = None,
    partial_out: Sequence[str] = (),
    subwords: bool = False,
    permuted: bool = False,
    n_random: int = 0,
    wordings: Wordings = "first",
) -> JointLayout:
    """Turn names from a config into domains, ordered pairs and references.

    If no `pairs` are named, they are all ordered ones of `knowledge`, names or families. With
    `subwords`, beginnings of words are labels; `n_random` labels are compared with as many random
    words (0 reads none). `wordings` are the prompts of each kind of knowledge: the first alone, all
    templates, or also the paraphrases. For the others see `JointLayout` and `LinearProbe`.

    Raises:
        ConfigError: There are fewer than two kinds of knowledge, a pair of `require_reference` is
            not fitted, or there are no paraphrases.
        KnowledgeError: A name is unknown, or a pair of `require_reference` has no reference.
        DomainError: A kind of knowledge that is named has no label.
    """
    relations = [catalogue.relation(pair) for pair in pairs or ()]
    sides = [side for each in relations for side in (each.source, each.target)]
    selected = catalogue.select(knowledge) if pairs is None else sides
    named = {*knowledge} if pairs is None else {side.name for side in sides}
    keep = tuple(kinds.Completeness) if subwords else kinds.WHOLE_WORDS
    domains, left_out = _find_domains(selected, named, tokenizer, keep)
    if len(domains) < 2:
        raise ConfigError(
            f"a probe needs two kinds of knowledge or more; model.knowledge gives {list(domains)}. "
            "Name more, or a family such as 'attribute'."
        )
    chosen = [(each.source.name, each.target.name) for each in relations]
    if pairs is None:
        chosen = [(s, t) for s in domains for t in domains if s != t]
    others = [catalogue[name] for name in partial_out if name not in domains]
    domains |= _find_domains(others, {*partial_out}, tokenizer, keep)[0]
    references: dict[Pair, np.ndarray | None] = {}
    for source, target in dict.fromkeys(chosen):
        relation = catalogue.relation(f"{source}->{target}")
        matrix = reference_matrix(relation, domains[source], domains[target])
        references[source, target] = matrix if matrix.any() else None
    for name in require_reference:
        _check_reference(catalogue.relation(name), references)
    in_pairs = {name: domains[name] for name in domains if any(name in pair for pair in references)}
    layout = JointLayout(
        domains=domains,
        pairs=tuple(references),
        control=control or None,
        references=references,
        left_out=left_out,
        permuted=permuted,
        words=random_word_tokens(tokenizer, in_pairs, n_random),
        partial_out=tuple(partial_out),
    )
    return layout if wordings == "first" else _with_wordings(layout, tokenizer, wordings)


def _find_domains(
    selected: Iterable[Knowledge],
    named: Collection[str],
    tokenizer: PreTrainedTokenizerBase,
    keep: Collection[kinds.Completeness],
) -> tuple[dict[str, Domain], dict[str, str]]:
    """Return domains, and why the LM has too few words for other kinds of knowledge.

    One that is `named` must have labels, and then stays in spite of unknown words in its prompt.
    """
    domains: dict[str, Domain] = {}
    left_out: dict[str, str] = {}
    for knowledge in selected:
        name, reason = knowledge.name, ""
        if unknown := unknown_words(knowledge, tokenizer):
            reason = f"the LM does not know these words of its prompt: {', '.join(unknown)}"
        if name in named or not reason:
            try:
                domains[name] = build_domain(knowledge, tokenizer, keep)
            except DomainError as error:
                if name in named:
                    raise
                reason = str(error)
        if name not in domains:
            left_out[name] = reason
        if reason:
            _log.warning("%s%s: %s", name, " is left out" if name in left_out else "", reason)
    return domains, left_out


def _with_wordings(
    layout: JointLayout, tokenizer: PreTrainedTokenizerBase, wordings: Wordings
) -> JointLayout:
    """Return the layout with the other wordings of each prompt, and with pairs of them.

    Labels, random words and references are those of the first. Wording i of a source goes with
    wording i of the target; if one of the two has fewer, its first follows its last. Wordings that
    the LM does not read as the first are left out.
    """
    domains, left_out = dict(layout.domains), dict(layout.left_out)
    names = {name: [name] for name in domains}
    for name, domain in layout.domains.items():
        knowledge = domain.knowledge
        prompts = list(knowledge.more_templates)
        if wordings == "paraphrases":
            prompts += knowledge.paraphrases
        for prompt in prompts:
            # No name that a file gives has a space, see `stem`.
            other = replace(knowledge, name=f"{name} ({len(names[name]) + 1})", template=prompt)
            if unknown := unknown_words(other, tokenizer):
                left_out[prompt] = f"the LM does not know these words of it: {', '.join(unknown)}"
            elif answer_tokens(other, tokenizer) != answer_tokens(knowledge, tokenizer):
                left_out[prompt] = "answers have other tokens after it than after the first wording"
            else:
                domains[other.name] = replace(domain, knowledge=other)
                names[name].append(other.name)
                continue
            _log.warning("%s: %r is left out: %s", name, prompt, left_out[prompt])
    if wordings == "paraphrases" and len(domains) == len(names):
        raise ConfigError(
            f"model.paraphrases is true, but {', '.join(names)} have none whose words this LM "
            "knows. Add some in a file of model.knowledge_files, or set it to false."
        )
    references: dict[Pair, np.ndarray | None] = {}
    for pair in layout.pairs:
        source, target = (names[name] for name in pair)
        for i in range(max(len(source), len(target))):
            one = source[i % len(source)], target[i % len(target)]
            references[one] = layout.references.get(pair)
    return replace(
        layout,
        domains=domains,
        pairs=tuple(references),
        references=references,
        words={other: layout.words[name] for name in layout.words for other in names[name]},
        left_out=left_out,
    )


def stem(name: str) -> str:
    """Return the name of a domain, or the beginning of a pair's, without the wording's number."""
    return name.partition(" ")[0]


def wordings_of(pairs: Iterable[Pair]) -> dict[Pair, list[Pair]]:
    """Return the wordings of each pair, itself first."""
    wordings: dict[Pair, list[Pair]] = {}
    for source, target in pairs:
        wordings.setdefault((stem(source), stem(target)), []).append((source, target))
    return wordings


def random_word_tokens(
    tokenizer: PreTrainedTokenizerBase, domains: Mapping[str, Domain], n_random: int
) -> dict[str, list[int]]:
    """Return whole words of the vocabulary, as tokens by domain, of which none is a label of it.

    There are twice as many as labels, and several draws of `n_random`, if the vocabulary has them;
    none for 0, or if a domain has none.
    """
    words = {}
    for name, domain in domains.items() if n_random else ():
        n = max(2 * len(domain.labels), _DRAWS_AT_ONCE * n_random)
        # Some merge with the prompt or are several tokens after a space.
        drawn = sample_up_to(tokenizer, 2 * n, domain.texts, _WORDS_SEED, "words")
        other = replace(domain.knowledge, answers=tuple(Answer(word, word) for word in drawn))
        ids = label_answers(other, TokenReader(tokenizer), {kinds.Completeness.WHOLE}).token_ids
        words[name] = [token for token in ids if token not in set(domain.token_ids)][:n]
        if not words[name]:
            _log.warning("the vocabulary has no whole words but those of %s: no random words", name)
            return {}
    return words


def _check_reference(relation: kinds.Relation, references: Mapping[Pair, object]) -> None:
    source, target = relation.source.name, relation.target.name
    if (source, target) not in references:
        raise ConfigError(
            f"model.require_reference names {relation.name}, which this run does not fit. Add it "
            "to model.pairs, or both sides to model.knowledge; or leave it out."
        )
    if references[source, target] is None:
        raise KnowledgeError(
            f"model.require_reference names {relation.name}, which has no reference: no {target} "
            f"is known for any {source}. Add facts to a file of model.knowledge_files, or leave it "
            "out."
        )
