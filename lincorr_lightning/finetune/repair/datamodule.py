"""Examples of a repair, the edits that are measured before and after it, and their batches."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lincorr_lightning.data.files import SampleBy
from lincorr_lightning.data.loaders import ResumableLoader, make_loader
from lincorr_lightning.data.texts import TokenBatch, read_prompts
from lincorr_lightning.distributed import DataShard, data_shard, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError, require, require_one_of
from lincorr_lightning.finetune import batches as batching
from lincorr_lightning.finetune import edits as resolving
from lincorr_lightning.finetune.edit_files import read_edits
from lincorr_lightning.finetune.edits import Edit, reference_mask
from lincorr_lightning.knowledge import Catalogue, Domain, TokenizedRelation, build_domain
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import SubjectKind
from lincorr_lightning.study import StudyData

SHOWN, HELD_OUT = "shown", "held_out"
"""Parts of the measured edits: source answers that are in the examples, and held-out ones."""
JOINED_BY = (". ", " and ", ", so ", "; ")  # of the two facts of a statement
Examples = Literal["edits", "statements", "source", "target"]
HoldOut = Literal["answers", "references"]
MIN_ANSWERS = 4  # source labels with a reference, or references, to hold some out
_TEXTS_PER_BATCH = 4


class DomainPrompts(NamedTuple):
    """Prompts of one kind of knowledge, as `LanguageModel.forward` takes them."""

    rows: list[list[int]]  #: Token ids of each prompt.
    token_ids: Tensor  #: Those of the labels, ``(n_labels,)``.


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class RepairBatch:
    """Edits, and the prompts that they are evaluated on.

    `before` has the logits before the repair, ``(n, n_labels)``, after the prompts of ``source``,
    ``target``, ``in_context`` and each of `others`; it is empty for edits that are only measured.
    """

    part: str  #: ``shown`` or ``held_out``, see `RepairDataModule`.
    edits: batching.EditBatch
    source: DomainPrompts
    target: DomainPrompts
    in_context: DomainPrompts  #: The target prompts after the statement of the new answer.
    others: dict[str, DomainPrompts]  #: Prompts of other knowledge, which must not change.
    reference_mask: Tensor  #: Target labels in each edit's reference, ``(n, n_target)`` bool.
    target_shown: Tensor  #: Whether an example has a label of each reference, ``(n,)`` bool.
    before: dict[str, Tensor]
    texts: Tensor  #: Texts whose predictions must not change, ``(n_texts, n_tokens)``.
    is_padding: bool = False


@dataclass  # not frozen, as above
class StatementBatch(batching.LabelledTokens):
    """Statements to train on: all tokens but the first are learned; `texts` as in `RepairBatch`."""

    texts: Tensor


@dataclass(frozen=True, eq=False)
class RepairDataset(Dataset[Any]):
    """The steps of one rank over all epochs; each follows from the seed and its own number.

    `split` has the source answers of the examples, ``shown``, and those ``held_out``. A step has
    `batch_size` examples on all ranks together; `make_batch` returns a rank's part of it, given the
    numbers of its examples and one that no other batch of the run has.
    """

    examples: Sequence[Edit]
    relation: TokenizedRelation
    split: Mapping[str, Sequence[str]]
    make_batch: Callable[[Sequence[int], int], RepairBatch | StatementBatch]
    batch_size: int
    seed: int
    shard: DataShard

    @property
    def determined_by(self) -> dict[str, Any]:
        """What determines the content of a step beside the settings of the datamodule."""
        return {"n_shards": self.shard.n}

    def __len__(self) -> int:
        """Number of steps of an epoch; examples that do not fill one are left to a later epoch."""
        return len(self.examples) // self.batch_size

    def __getitem__(self, index: int) -> RepairBatch | StatementBatch:
        epoch, step = divmod(index, len(self))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))
        ids = order[step * self.batch_size : (step + 1) * self.batch_size]
        own = np.array_split(ids, self.shard.n)[self.shard.number].tolist()
        return self.make_batch(own, index * self.shard.n + self.shard.number)


class RepairDataModule(StudyData):
    """Examples that a repair trains on, and edits of the same relation that measure it.

    The source answers are split: the examples have the ``shown`` ones, and edits of both are
    measured. No subject of a measured edit is in the examples, and with `hold_out`
    ``references``, no target label that is right for a ``held_out`` one is right for an example.

    Args:
        lm: LM to repair; the program `lincorr` passes that of the study.
        relation: Source that is taught and target that should follow, as ``city->country``.
        examples: What is trained: ``edits``, each taught in an adapter of its own, in which the
            target has to follow; ``statements`` of source and target together; or, as controls,
            statements of the ``source`` or of the ``target`` alone.
        n_examples: Number of examples, each about another subject.
        max_examples_per_reference: Largest number of them with one reference; null: no limit.
        hold_out: Whether ``answers`` are held out one by one, or all answers of ``references``;
            references that share a target label, such as those of England and of the US, are one.
        held_out: Share of the source answers, or of the references, that the examples do not have.
        n_edits: Number of measured edits of the shown answers, and of the others.
        max_edits_per_reference: Largest number of measured edits of either part with the same
            reference; of a file, the first of both. null sets no limit.
        edits_file: File of edits to measure instead (`EditsDataModule`), of other subjects.
        batch_size: Examples of a step, on all ranks together; a multiple of the ranks.
        eval_batch_size: Measured edits that are trained side by side.
        preserve: Other kinds of knowledge, whose answers examples of kind ``edits`` keep.
        controls: Other kinds of knowledge, whose answers are measured.
        texts: Files or folders of texts, some of which are measured and some preserved; null takes
            texts about the tiny world.
        key: Field of a ``.jsonl`` or ``.csv`` row that holds its text.
        sample_by: Whether a ``.txt`` file has a text per ``line`` or is one ``document``.
        n_texts: Number of texts that are measured.
        n_preserved_texts: Number of other texts, whose predictions the repair preserves.
        texts_per_step: Preserved texts in a step, on each rank.
        n_tokens: Number of tokens of each text.
        subject_kind: Which strings subjects are, see `EditsDataModule`.
        knowledge_files: YAML files with additional knowledge.
        seed: Seed of subjects, answers, split and order.
    """

    batch_type = RepairBatch
    free_settings = frozenset({"eval_batch_size"})

    def __init__(
        self, lm: LanguageModel | None = None, relation: str = "city->country",
        examples: Examples = "edits", n_examples: int = 200,
        max_examples_per_reference: int | None = None, hold_out: HoldOut = "answers",
        held_out: float = 0.5, n_edits: int = 75, max_edits_per_reference: int | None = None,
        edits_file: str | None = None, batch_size: int = 16, eval_batch_size: int = 32,
        preserve: Sequence[str] = ("pet", "gender"), controls: Sequence[str] = ("color",),
        texts: list[str] | str | None = None, key: str = "text", sample_by: SampleBy = "line",
        n_texts: int = 32, n_preserved_texts: int = 256, texts_per_step: int = 4,
        n_tokens: int = 64, subject_kind: SubjectKind = "any",
        knowledge_files: list[str] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(lm)
        self.save_hyperparameters(ignore=["lm"])
        require_one_of("data.examples", examples, get_args(Examples))
        require_one_of("data.hold_out", hold_out, get_args(HoldOut))
        require_one_of("data.subject_kind", subject_kind, get_args(SubjectKind))
        require("data.held_out", held_out, above=0, below=1)
        # Of a text, one token is read, and the next one predicted.
        limits = ("max_edits_per_reference", "max_examples_per_reference")
        self.require_at_least(
            *limits, **dict.fromkeys(limits, 1), n_examples=1, n_edits=1, batch_size=1,
            eval_batch_size=1, n_texts=1, texts_per_step=1, n_preserved_texts=0, n_tokens=2,
        )  # fmt: skip
        self._catalogue = Catalogue.load(*(knowledge_files or ()))
        self._catalogue.relation(relation)
        others = [*preserve, *controls]
        for name in others:
            self._catalogue[name]  # refuses an unknown kind of knowledge
            if name in relation.split("->") or others.count(name) > 1:
                raise ConfigError(
                    f"data.preserve and data.controls name {name!r}, which is in both of them or "
                    f"a part of {relation}."
                )
        self.relation, self.kind = relation, examples
        self.n_examples, self.n_edits = n_examples, n_edits
        self.preserve, self.controls = list(preserve), list(controls)
        self.batch_size, self.n_tokens, self.seed = batch_size, n_tokens, seed
        self.examples: list[Edit] = []
        self.measured: dict[str, list[Edit]] = {}  #: The measured edits, by part.
        self.split: dict[str, list[str]] = {}  #: The source answers, by part.
        self._before: dict[str, Tensor] = {}

    def prepare_edits(self) -> None:
        """Choose examples and measured edits on the first call, of the LM before the repair."""
        if self.measured:
            return
        lm, relation, file = self.language_model, self.tokenized, self.hparams["edits_file"]
        relation.require_reference()
        labels, limit = self._split(relation), self.hparams["max_edits_per_reference"]
        edits: list[Edit] = []
        if file is not None:
            edits = resolving.resolve_edits(
                read_edits(file), relation, lm, max_per_reference=limit
            ).edits
        taken = {edit.subject for edit in edits}
        pools = self._candidates(self.n_edits if file is None else 0, taken)
        sample = partial(resolving.sample_edits, relation, lm, seed=self.seed)
        examples = sample(
            self.n_examples, pools[0], labels=labels[SHOWN], setting="data.n_examples",
            max_per_reference=self.hparams["max_examples_per_reference"],
        )  # fmt: skip
        if file is None:
            measured = {
                part: sample(self.n_edits, pool, labels=labels[part], max_per_reference=limit)
                for part, pool in zip(labels, pools[1:], strict=True)
            }
        else:
            measured, right = {part: [] for part in labels}, set[int]()
            if self.hparams["hold_out"] == "references":  # a row may name one of its own
                of_shown = relation.reference_mask[:, sorted(labels[SHOWN])].any(1)
                right = set(np.flatnonzero(of_shown).tolist())
            for edit in edits:
                is_shown = edit.label in labels[SHOWN] or not right.isdisjoint(edit.reference)
                measured[SHOWN if is_shown else HELD_OUT].append(edit)
            for part in (part for part, own in measured.items() if not own):
                rank_zero_warn(
                    f"data.edits_file has no edit whose answer is {part.replace('_', ' ')}. "
                    "Another data.seed splits the answers in another way."
                )
        if self.trainer is not None:
            # Ranks may round logits differently; all use the edits of rank 0.
            examples, measured = self.trainer.strategy.broadcast((examples, measured))
        self.examples, self.measured = examples, measured
        texts = relation.source.texts
        self.split = {part: [texts[i].strip() for i in sorted(labels[part])] for part in labels}

    def _split(self, relation: TokenizedRelation) -> dict[str, set[int]]:
        """Return the source labels that the examples may have, and the others, by part."""
        labels = np.flatnonzero(relation.reference_mask.any(0))
        mask, groups = relation.reference_mask[:, labels].astype(int), np.arange(len(labels))
        if self.hparams["hold_out"] == "references":
            groups = connected_components(mask.T @ mask)[1]
        if (n_groups := len(set(groups.tolist()))) < MIN_ANSWERS:
            raise SubjectsError(
                f"{relation.name} has {n_groups} {self.hparams['hold_out']} with a reference in "
                f"this LM's vocabulary, and a repair needs {MIN_ANSWERS}. Take another relation."
            )
        n = min(max(round(self.hparams["held_out"] * n_groups), 1), n_groups - 1)
        out = np.isin(groups, np.random.default_rng([self.seed, 1]).permutation(n_groups)[:n])
        return {SHOWN: set(labels[~out].tolist()), HELD_OUT: set(labels[out].tolist())}

    def _candidates(self, n_edits: int, excluding: Collection[str]) -> list[list[str]]:
        """Return disjoint subjects: of the examples, and twice those of measured edits."""
        sizes, lm = [self.n_examples, n_edits, n_edits], self.language_model
        n, kind = sum(sizes), self.hparams["subject_kind"]
        pool = resolving.sample_candidates(lm, n, self.seed, kind, excluding)
        edges = (np.cumsum(sizes) / n * len(pool)).astype(int).tolist()
        return [pool[: edges[0]], pool[edges[0] : edges[1]], pool[edges[1] :]]

    def _batch(
        self, every: Sequence[Edit], ids: Sequence[int], part: str, others: Sequence[str]
    ) -> RepairBatch:
        edits = [every[i] for i in ids]
        lm, relation, subjects = self.language_model, self.tokenized, [e.subject for e in edits]
        mask = reference_mask(edits, len(relation.target.labels))

        def prompts(domain: Domain, texts: Sequence[str] = ()) -> DomainPrompts:
            rows = lm.rows(texts or [domain.knowledge.prompt(subject) for subject in subjects])
            return DomainPrompts(rows, torch.tensor(domain.token_ids))

        return RepairBatch(
            part, batching.edit_batch(edits, ids, lm.rows(relation.source_prompts(subjects))),
            prompts(relation.source), prompts(relation.target),
            prompts(relation.target, resolving.prompts_in_context(edits, relation)),
            {name: prompts(self._domains[name]) for name in others}, mask,
            (mask & reference_mask(self.examples, mask.shape[1]).any(0)).any(1), {},
            torch.empty(0, self.n_tokens, dtype=torch.long),
        )  # fmt: skip

    def train_dataloader(self) -> ResumableLoader:
        self.prepare_edits()
        relation, kind = self.tokenized, self.kind
        size = min(self.batch_size, len(self.examples))
        require_items(self.trainer, size, "examples of a step", "raise data.batch_size")
        shard = data_shard(self.trainer)
        if size % shard.n:  # the mean over ranks would not be that over examples
            raise ConfigError(
                f"a step has {size} examples (data.batch_size, data.n_examples), which must be a "
                f"multiple of the {shard.n} ranks."
            )
        if kind == "edits":
            domains = {"source": relation.source, "target": relation.target}
            domains |= {name: self._domains[name] for name in self.preserve}
            domains["in_context"] = relation.target
            if not self._before:
                subjects = [edit.subject for edit in self.examples]
                prompts = [list(map(x.knowledge.prompt, subjects)) for x in domains.values()]
                prompts[-1] = resolving.prompts_in_context(self.examples, relation)
                tokens = [domain.token_ids for domain in domains.values()]
                logits = self.language_model.joint_logits(prompts, tokens).cpu()
                parts = torch.split(logits, [len(ids) for ids in tokens], dim=1)
                self._before = dict(zip(domains, parts, strict=True))

            def make_batch(ids: Sequence[int], step: int) -> RepairBatch | StatementBatch:
                before = {name: logits[ids] for name, logits in self._before.items()}
                batch = self._batch(self.examples, ids, SHOWN, self.preserve)
                return replace(batch, before=before, texts=self._preserved_texts(step))

        else:
            texts = statements(relation, self.examples, kind)
            rows = self.language_model.rows(texts, lead_in=False)

            def make_batch(ids: Sequence[int], step: int) -> RepairBatch | StatementBatch:
                tokens = batching.labelled_tokens([(rows[i][:1], rows[i][1:]) for i in ids])
                return StatementBatch(*tokens, self._preserved_texts(step))

        steps = self.examples, relation, self.split, make_batch, size, self.seed, shard
        return ResumableLoader(RepairDataset(*steps), self.trainer)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the measured edits (`RepairBatch`), then the texts (`TokenBatch`)."""
        self.prepare_edits()
        size, batches = self.hparams["eval_batch_size"], list[Any]()
        for part, edits in self.measured.items():
            prompts = self.tokenized.source_prompts([edit.subject for edit in edits])
            lengths = [len(row) for row in self.language_model.rows(prompts)]
            # Those of one length together: fewer tokens of padding.
            ids = sorted(range(len(edits)), key=lengths.__getitem__)
            for first in range(0, len(edits), size):
                batches.append(self._batch(edits, ids[first : first + size], part, self.controls))
        parts = torch.split(self._texts[0], _TEXTS_PER_BATCH)
        batches += [TokenBatch(rows, [], []) for rows in parts]
        return make_loader(batches, self.trainer)

    @cached_property
    def _texts(self) -> tuple[Tensor, Tensor]:
        n, n_preserved = self.hparams["n_texts"], self.hparams["n_preserved_texts"]
        names = ("texts", "key", "n_tokens", "seed", "sample_by")
        own = {name: self.hparams[name] for name in names}
        tokens = read_prompts(self.language_model, n_texts=n + n_preserved, **own).tokens
        if n_preserved and len(tokens) <= n:
            raise SubjectsError(
                f"data.texts has {len(tokens)} texts, and data.n_texts takes all of them. Lower "
                "it, add texts, or set data.n_preserved_texts to 0."
            )
        return tokens[:n], tokens[n:]

    def _preserved_texts(self, step: int) -> Tensor:
        texts, rng = self._texts[1], np.random.default_rng([self.seed, 3, step])
        n = min(self.hparams["texts_per_step"], len(texts))
        return texts[rng.choice(len(texts), n, replace=False)] if n else texts

    @cached_property
    def tokenized(self) -> TokenizedRelation:
        """The relation, with the labels that this LM has."""
        return TokenizedRelation.of(self.relation, self._catalogue, self.language_model.tokenizer)

    @cached_property
    def _domains(self) -> dict[str, Domain]:
        known, tokenizer = self._catalogue, self.language_model.tokenizer
        return {x: build_domain(known[x], tokenizer) for x in self.preserve + self.controls}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "examples": list(map(tuple, self.examples)),
            "measured": {part: list(map(tuple, edits)) for part, edits in self.measured.items()},
            "split": self.split, "before": self._before,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.examples = list(map(Edit._make, state_dict["examples"]))
        measured = state_dict["measured"].items()
        self.measured = {part: list(map(Edit._make, edits)) for part, edits in measured}
        self.split = state_dict["split"]
        self._before = state_dict["before"]


def statements(
    relation: TokenizedRelation, edits: Sequence[Edit], kind: Examples = "statements"
) -> list[str]:
    """Return a statement about the subject of each edit, as if the edit were true.

    Of kind ``statements``, they state both facts, take turns in wording, and half of them begin
    with the target; of kind ``source`` or ``target``, they state one fact alone.

    Such as ``Anna lives in the city of Paris. Anna lives in the country of France.``
    """
    texts = []
    for i, edit in enumerate(edits):
        source = relation.relation.source.statement(edit.subject, edit.answer)
        target = relation.relation.target.statement(edit.subject, target_answer(relation, edit))
        pair = (source, target) if i // len(JOINED_BY) % 2 == 0 else (target, source)
        both = JOINED_BY[i % len(JOINED_BY)].join(pair)
        texts.append({"statements": both, "source": source, "target": target}[kind] + ".")
    return texts


def target_answer(relation: TokenizedRelation, edit: Edit) -> str:
    """Return the text of the target answer that an edit's reference begins with."""
    reference = relation.relation.reference or {}
    taught = [a for a in relation.source.labels[edit.label].answers if a.text == edit.answer]
    in_reference = {name for answer in taught for name in reference.get(answer.identity, ())}
    answers = relation.target.labels[edit.reference[0]].answers
    # A label may stand for several answers, such as " South" for South Korea and South Africa.
    return next((a.text for a in answers if a.identity in in_reference), answers[0].text)
