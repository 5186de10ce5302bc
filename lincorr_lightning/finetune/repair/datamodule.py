"""Training examples of a repair, and the edits that are measured before and after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lincorr_lightning.data.files import SampleBy
from lincorr_lightning.data.loaders import ResumableLoader, make_loader
from lincorr_lightning.data.tokenized_texts import TokenBatch, read_prompts
from lincorr_lightning.distributed import data_shard, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError, require
from lincorr_lightning.finetune.batches import edit_batch, labelled_tokens
from lincorr_lightning.finetune.datamodule import require_same_data
from lincorr_lightning.finetune.edits import (
    Edit,
    prompts_in_context,
    reference_mask,
    repaired_subjects,
    resolve_edits,
    sample_candidates,
    sample_edits,
)
from lincorr_lightning.finetune.repair.batches import (
    HELD_OUT,
    SHOWN,
    DomainPrompts,
    Facts,
    RepairBatch,
    RepairDataset,
    StatementBatch,
    statements,
)
from lincorr_lightning.knowledge import Catalogue, Domain, TokenizedRelation
from lincorr_lightning.knowledge.catalogue import UnknownKnowledgeError
from lincorr_lightning.linear_map.fitting import fit_linear_maps
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import SubjectKind, require_subject_kind, sample_up_to
from lincorr_lightning.study import StudyData, plain

Examples = Literal["edits", "statements", "source", "target"]
Choice = Literal["all", "wrong", "random"]
MIN_ANSWERS = 4
"""Source labels with a reference that are needed to hold some out."""
_TEXTS_PER_BATCH = 4
_FITTED_SUBJECTS = 2000  # of the W that says which answers are wrong


class RepairDataModule(StudyData):
    """Examples that a repair trains on, and edits of the same relation that measure it.

    The source answers are split: the examples have the ``shown`` ones, and edits of both are
    measured. No subject of a measured edit is in the examples.

    Args:
        lm: LM to repair; the program `lincorr` passes that of the study.
        relation: Source that is taught and target that should follow, as ``city->country``.
        examples: What is trained: ``edits``, each taught in an adapter of its own, in which the
            target has to follow; ``statements`` of source and target together; or, as controls,
            statements of the ``source`` or of the ``target`` alone.
        n_examples: Number of examples, each about another subject.
        answers: Which shown answers the examples have: ``all``; those that W has ``wrong`` (the
            highest weight of the answer's column is not its reference); or equally many at
            ``random``.
        held_out: Share of the source answers that the examples do not have.
        n_edits: Number of measured edits of the shown answers, and of the others.
        edits_file: JSONL or CSV file of edits to measure instead, see `EditsDataModule`. Their
            subjects are left out of the examples, and those whose answer is neither in the examples
            nor held out are left out with a warning.
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

    Attributes:
        examples: The examples.
        measured: The measured edits, by part.
        split: The answers that the examples have, ``shown``, and those ``held_out``.

    Raises:
        ConfigError: A setting is out of range.
        KnowledgeError: The relation does not exist.
    """

    batch_type = RepairBatch

    def __init__(
        self,
        lm: LanguageModel | None = None,
        relation: str = "city->country",
        examples: Examples = "edits",
        n_examples: int = 200,
        answers: Choice = "all",
        held_out: float = 0.5,
        n_edits: int = 75,
        edits_file: str | None = None,
        batch_size: int = 16,
        eval_batch_size: int = 32,
        preserve: Sequence[str] = ("pet", "gender"),
        controls: Sequence[str] = ("color",),
        texts: list[str] | str | None = None,
        key: str = "text",
        sample_by: SampleBy = "line",
        n_texts: int = 32,
        n_preserved_texts: int = 256,
        texts_per_step: int = 4,
        n_tokens: int = 64,
        subject_kind: SubjectKind = "any",
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(lm)
        for name, value, allowed in (
            ("examples", examples, get_args(Examples)), ("answers", answers, get_args(Choice)),
        ):  # fmt: skip
            if value not in allowed:
                raise ConfigError(f"data.{name} is {value!r}; it must be {' or '.join(allowed)}.")
        for name, number in (
            ("n_examples", n_examples), ("n_edits", n_edits), ("batch_size", batch_size),
            ("eval_batch_size", eval_batch_size), ("n_texts", n_texts),
            ("texts_per_step", texts_per_step),
        ):  # fmt: skip
            require(f"data.{name}", number, at_least=1)
        # One token is read, and the next one predicted.
        require("data.n_tokens", n_tokens, at_least=2)
        require("data.n_preserved_texts", n_preserved_texts, at_least=0)
        require("data.held_out", held_out, above=0, below=1)
        require_subject_kind(subject_kind)
        self._catalogue = Catalogue.load(*(knowledge_files or ()))
        self._catalogue.relation(relation)
        for setting, names in (("preserve", preserve), ("controls", controls)):
            for name in names:
                if name in relation.split("->"):
                    raise ConfigError(
                        f"data.{setting} names {name!r}, which is a part of {relation}. Remove it."
                    )
                try:
                    self._catalogue[name]
                except UnknownKnowledgeError as error:
                    raise UnknownKnowledgeError(f"data.{setting}: {error}") from None
        both = sorted(set(preserve) & set(controls))
        if both:
            raise ConfigError(
                f"data.preserve and data.controls both name {both[0]!r}: a control measures what "
                "the repair does not train. Remove it from one of them."
            )
        self.save_hyperparameters(ignore=["lm"])
        self.relation, self.kind, self.answers = relation, examples, answers
        self.n_examples, self.n_edits, self.edits_file = n_examples, n_edits, edits_file
        self.held_out, self.preserve, self.controls = held_out, preserve, controls
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.n_texts, self.n_preserved_texts = n_texts, n_preserved_texts
        self.texts_per_step, self.n_tokens = texts_per_step, n_tokens
        self.subject_kind, self.seed = subject_kind, seed
        self.texts, self.key, self.sample_by = texts, key, sample_by
        self.examples: list[Edit] = []
        self.measured: dict[str, list[Edit]] = {}
        self.split: dict[str, list[str]] = {}
        self._before: dict[str, Tensor] = {}
        self._tokenized: dict[str, TokenizedRelation] = {}
        self._texts: tuple[Tensor, Tensor] | None = None

    # -- edits -------------------------------------------------------------------------------------

    def prepare_edits(self) -> None:
        """Choose the examples and the measured edits, on the first call.

        The LM must be loaded, and as it is before the repair.
        """
        if self.measured:
            return
        lm, relation, file = self.language_model, self.tokenized, self.edits_file
        relation.require_reference()
        shown, held_out = self._split(relation)
        labels = {SHOWN: self._choose(relation, shown), HELD_OUT: held_out}
        if file is None:
            n_edits, edits = self.n_edits, list[Edit]()
        else:
            n_edits, edits = 0, resolve_edits(file, relation, lm, "data.edits_file")
        excluding = repaired_subjects(lm) | {edit.subject for edit in edits}
        n = self.n_examples
        pools = self._candidates([n, n_edits, n_edits], excluding)
        examples = self._sample(n, pools[0], labels[SHOWN], "n_examples")
        if file is None:
            measured = {
                part: self._sample(n_edits, pool, labels[part], "n_edits")
                for part, pool in zip(labels, pools[1:], strict=True)
            }
        else:
            measured = self._assign(edits, labels)
        if self.trainer is not None:
            # Ranks may round logits differently; all use the edits of rank 0.
            examples, measured = self.trainer.strategy.broadcast((examples, measured))
        self.examples, self.measured = examples, measured
        texts = relation.source.texts
        self.split = {part: [texts[i].strip() for i in sorted(labels[part])] for part in labels}
        rank_zero_info(
            f"The examples have {len(labels[SHOWN])} of {len(shown) + len(held_out)} answers of "
            f"{relation.source.knowledge.name}; {len(held_out)} are held out."
        )

    def _split(self, relation: TokenizedRelation) -> tuple[set[int], set[int]]:
        """Return the source labels that the examples may have, and the others."""
        labels = np.flatnonzero(relation.reference_mask.any(0))
        if len(labels) < MIN_ANSWERS:
            raise SubjectsError(
                f"{relation.name} has {len(labels)} answers with a reference in this LM's "
                f"vocabulary; a repair needs {MIN_ANSWERS}, to hold some out. Take a relation with "
                "more answers."
            )
        order = np.random.default_rng([self.seed, 1]).permutation(labels).tolist()
        n = min(max(round(self.held_out * len(order)), 1), len(order) - 1)
        return set(order[n:]), set(order[:n])

    def _choose(self, relation: TokenizedRelation, shown: set[int]) -> set[int]:
        """Return the shown labels that the examples have, by ``data.answers``."""
        answers, seed = self.answers, self.seed
        if answers == "all":
            return shown
        lm, kind = self.language_model, self.subject_kind
        subjects = sample_up_to(lm.tokenizer, _FITTED_SUBJECTS, (), seed, kind)
        (fitted,) = fit_linear_maps(lm, relation, subjects, ["auto"])
        leading = fitted.weight(relation.name).argmax(0).tolist()
        wrong = {i for i in shown if not relation.reference_mask[leading[i], i]}
        if not wrong:
            raise SubjectsError(
                f"W predicts the reference of every shown answer of {relation.name}, so that "
                f"data.answers {answers} selects none (random takes as many as are wrong). Set it "
                "to all."
            )
        if answers == "wrong":
            return wrong
        rng = np.random.default_rng([seed, 2])
        return set(rng.choice(sorted(shown), len(wrong), replace=False).tolist())

    def _candidates(self, sizes: Sequence[int], excluding: Collection[str]) -> list[list[str]]:
        """Return disjoint parts of the vocabulary's subjects, in proportion to the sizes."""
        n, n_edits, _ = sizes
        seed, kind = self.seed, self.subject_kind
        pool = sample_candidates(self.language_model, sum(sizes), seed, kind, excluding)
        if len(pool) < sum(sizes):
            raise SubjectsError(
                f"data.n_examples {n} and twice data.n_edits {n_edits} ask for {sum(sizes)} "
                f"subjects, but the LM's vocabulary has {len(pool)}. Lower them."
            )
        edges = (np.cumsum(sizes) / sum(sizes) * len(pool)).astype(int).tolist()
        return [pool[: edges[0]], pool[edges[0] : edges[1]], pool[edges[1] :]]

    def _sample(
        self, n: int, subjects: Sequence[str], labels: Collection[int], setting: str
    ) -> list[Edit]:
        lm, seed = self.language_model, self.seed
        return sample_edits(self.tokenized, lm, n, subjects, seed, labels, f"data.{setting}")

    def _assign(self, edits: Sequence[Edit], labels: dict[str, set[int]]) -> dict[str, list[Edit]]:
        """Return a user's edits by part, and warn of those that are in none."""
        measured = {part: [edit for edit in edits if edit.label in labels[part]] for part in labels}
        names = {SHOWN: "answers of the examples", HELD_OUT: "held-out answers"}
        empty = [f"of the {len(labels[p])} {names[p]}" for p in labels if not measured[p]]
        if empty:
            message = (
                f"data.edits_file has no edit {' nor '.join(empty)}. Another data.seed or "
                "data.held_out splits the answers in another way."
            )
            if len(empty) == len(labels):
                raise SubjectsError(message)
            rank_zero_warn(message)
        n_left = len(edits) - sum(map(len, measured.values()))
        if n_left:
            rank_zero_warn(
                f"{n_left} of {len(edits)} edits of data.edits_file are left out: their answers "
                f"are neither in the examples (data.answers {self.answers}) nor held "
                "out."
            )
        return measured

    # -- batches -----------------------------------------------------------------------------------

    def _batch(
        self, edits: Sequence[Edit], part: str, others: Sequence[str], ids: Sequence[int]
    ) -> RepairBatch:
        """Return a batch of edits that are measured."""
        lm, relation, subjects = self.language_model, self.tokenized, [e.subject for e in edits]
        mask = reference_mask(edits, len(relation.target.labels))
        source = lm.rows(relation.source_prompts(subjects))
        in_context = _encode(lm, prompts_in_context(edits, relation))
        domains = {name: self._domain(name) for name in others}
        return RepairBatch(
            part,
            edit_batch(edits, ids, source),
            _prompts(lm, source, relation.source),
            _prompts(lm, lm.rows(relation.target_prompts(subjects)), relation.target),
            _prompts(lm, in_context, relation.target),
            mask,
            (mask & reference_mask(self.examples, mask.shape[1]).any(0)).any(1),
            {
                name: _prompts(lm, lm.rows([domain.knowledge.prompt(x) for x in subjects]), domain)
                for name, domain in domains.items()
            },
            {},
            [],
            torch.empty(0, self.n_tokens, dtype=torch.long),
        )

    def _domain(self, name: str) -> Domain:
        return self._tokenize(f"{self.tokenized.source.knowledge.name}->{name}").target

    def train_dataloader(self) -> ResumableLoader:
        """Return the steps of an epoch: `RepairBatch` of edits, or `StatementBatch`."""
        relation, lm, kind = self.tokenized, self.language_model, self.kind
        self.prepare_edits()
        size = min(self.batch_size, len(self.examples))
        require_items(self.trainer, size, "examples of a step", "raise data.batch_size")
        shard = data_shard(self.trainer)
        if size % shard.n:  # the mean over ranks would not be that over examples
            raise ConfigError(
                f"a step has {size} examples (data.batch_size, data.n_examples), which is not a "
                f"multiple of the {shard.n} ranks. Set data.batch_size to one."
            )
        if kind == "edits":
            preserve = self.preserve
            before = {n: self._logits_before(self._domain(n)) for n in preserve}
            unedited = [self._logits_before(side) for side in (relation.source, relation.target)]

            def make_batch(ids: Sequence[int], step: int) -> RepairBatch | StatementBatch:
                batch = self._batch([self.examples[i] for i in ids], SHOWN, preserve, ids)
                batch.logits_before = {name: logits[ids] for name, logits in before.items()}
                batch.unedited_before = [logits[ids] for logits in unedited]
                batch.texts = self._preserved_texts(step)
                return batch

        else:
            facts: Facts = "both" if kind == "statements" else kind
            rows = _encode(lm, statements(relation, self.examples, facts))

            def make_batch(ids: Sequence[int], step: int) -> RepairBatch | StatementBatch:
                tokens = labelled_tokens([(rows[i][:1], rows[i][1:]) for i in ids])
                return StatementBatch(*tokens, self._preserved_texts(step))

        steps = RepairDataset(
            self.examples, relation, self.split, make_batch, size, self.seed, shard
        )
        return ResumableLoader(steps, self.trainer)

    def _logits_before(self, domain: Domain) -> Tensor:
        """Return the logits of a kind of knowledge before the repair, for each example."""
        name = domain.knowledge.name
        if name not in self._before:
            prompts = [domain.knowledge.prompt(edit.subject) for edit in self.examples]
            self._before[name] = self.language_model.domain_logits(prompts, domain.token_ids).cpu()
        return self._before[name]

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the measured edits (`RepairBatch`), then the texts (`TokenBatch`)."""
        self.prepare_edits()
        size, batches = self.eval_batch_size, list[Any]()
        for part, edits in self.measured.items():
            for first in range(0, len(edits), size):
                ids = range(len(edits))[first : first + size]
                some = [edits[i] for i in ids]
                batches.append(self._batch(some, part, self.controls, ids))
        measured, _ = self._read_texts()
        batches += [TokenBatch(rows, [], []) for rows in torch.split(measured, _TEXTS_PER_BATCH)]
        return make_loader(batches, self.trainer)

    def _read_texts(self) -> tuple[Tensor, Tensor]:
        """Return the texts that are measured, and those that are preserved; read once."""
        if self._texts is None:
            n, n_preserved = self.n_texts, self.n_preserved_texts
            rows = read_prompts(
                self.language_model, self.texts, self.key, self.n_tokens, n + n_preserved,
                self.seed, sample_by=self.sample_by,
            ).rows  # fmt: skip
            if n_preserved and len(rows) <= n:
                raise SubjectsError(
                    f"data.texts has {len(rows)} texts, and data.n_texts uses all of them for the "
                    "perplexity. Lower data.n_texts, add texts, or set data.n_preserved_texts to 0."
                )
            tokens = torch.tensor(rows)
            self._texts = tokens[:n], tokens[n:]
        return self._texts

    def _preserved_texts(self, step: int) -> Tensor:
        """Return the texts of a step whose predictions must not change."""
        _, texts = self._read_texts()
        rng = np.random.default_rng([self.seed, 3, step])
        n = min(self.texts_per_step, len(texts))
        return texts[rng.choice(len(texts), n, replace=False)] if n else texts

    @property
    def tokenized(self) -> TokenizedRelation:
        """The relation, with the labels that this LM has."""
        return self._tokenize(self.relation)

    def _tokenize(self, name: str) -> TokenizedRelation:
        """Return a relation, tokenized once: every step needs it."""
        if name not in self._tokenized:
            tokenizer = self.language_model.tokenizer
            self._tokenized[name] = TokenizedRelation.of(name, self._catalogue, tokenizer)
        return self._tokenized[name]

    # -- resuming ----------------------------------------------------------------------------------

    @property
    def _settings(self) -> dict[str, Any]:
        """What a resumed run must not change: the examples, or what is measured."""
        free = "eval_batch_size"
        return {k: plain(v) for k, v in self.hparams.items() if k[0] != "_" and k != free}

    def state_dict(self) -> dict[str, Any]:
        """Return the edits and the logits before, which a repaired LM would not give again."""
        return {
            "settings": self._settings,
            "examples": [edit._asdict() for edit in self.examples],
            "measured": {
                part: [edit._asdict() for edit in edits] for part, edits in self.measured.items()
            },
            "split": self.split,
            "before": self._before,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the edits of the run that is resumed."""
        require_same_data(state_dict["settings"], self._settings)
        self.examples = [Edit(**state) for state in state_dict["examples"]]
        self.measured = {
            part: [Edit(**state) for state in states]
            for part, states in state_dict["measured"].items()
        }
        self.split = state_dict["split"]
        self._before = state_dict["before"]


def _prompts(lm: LanguageModel, rows: Sequence[Sequence[int]], domain: Domain) -> DomainPrompts:
    ids, mask = lm.pad(rows)
    return DomainPrompts(ids.cpu(), mask.cpu(), torch.tensor(domain.token_ids))


def _encode(lm: LanguageModel, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts that state both facts, and may be too long for the LM."""
    try:
        return lm.rows(texts)
    except SubjectsError as error:
        raise SubjectsError(
            f"{error} A repair reads statements of both facts of data.relation in one text; "
            "data.knowledge_files may give shorter templates."
        ) from None
