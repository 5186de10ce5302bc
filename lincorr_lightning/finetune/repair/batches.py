"""Batches of a repair: edits with the prompts that they are evaluated on, and statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from lincorr_lightning.distributed import DataShard
from lincorr_lightning.finetune.batches import EditBatch, LabelledTokens
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.knowledge import Knowledge, TokenizedRelation

SHOWN, HELD_OUT = "shown", "held_out"
"""Parts of the measured edits: source answers that are in the examples, and held-out ones."""
Facts = Literal["both", "source", "target"]
JOINED_BY = (". ", " and ", ", so ", "; ")
"""How the two facts of a statement are joined."""


class DomainPrompts(NamedTuple):
    """Prompts of one kind of knowledge, as `LanguageModel.forward` takes them.

    Attributes:
        input_ids: Token ids, padded on the right, ``(n, length)``.
        attention_mask: 1 at tokens, same shape.
        token_ids: Tokens of its labels, ``(n_labels,)``.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_ids: Tensor


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class RepairBatch:
    """Edits, and the prompts that they are evaluated on.

    Attributes:
        part: ``shown`` or ``held_out``, see `RepairDataModule`.
        edits: The edits, and their source prompts.
        source: The source prompts, with the source labels.
        target: The target prompts, with the n_target target labels.
        in_context: The target prompts after the statement of the new answer.
        reference_mask: Target labels in each edit's reference, ``(n, n_target)`` bool.
        target_shown: Whether an example has a target label of each edit's reference, ``(n,)`` bool.
        other_prompts: Prompts of other kinds of knowledge, which must not change.
        logits_before: Logits after these before the repair, ``(n, n_labels)``; empty for edits that
            are only measured.
        unedited_before: Logits before the repair after the source prompts, ``(n, n_source)``, and
            after the target prompts, ``(n, n_target)``; empty for edits that are only measured.
        texts: Token ids of texts whose predictions must not change, ``(n_texts, n_tokens)``;
            without rows for edits that are only measured.
        is_padding: Whether the batch only keeps a rank in step with the others.
    """

    part: str
    edits: EditBatch
    source: DomainPrompts
    target: DomainPrompts
    in_context: DomainPrompts
    reference_mask: Tensor
    target_shown: Tensor
    other_prompts: dict[str, DomainPrompts]
    logits_before: dict[str, Tensor]
    unedited_before: list[Tensor]
    texts: Tensor
    is_padding: bool = False


@dataclass  # not frozen, as above
class StatementBatch(LabelledTokens):
    """Statements to train on: all tokens but the first are learned.

    Attributes:
        texts: Token ids of texts whose predictions must not change, ``(n_texts, n_tokens)``.
    """

    texts: Tensor


class RepairDataset(Dataset[Any]):
    """The steps of one rank over all epochs; each follows from the seed and its own number.

    Args:
        examples: The examples of the repair.
        relation: The relation that they are about.
        split: The source answers of the examples, ``shown``, and those ``held_out``.
        make_batch: Returns a batch, given the numbers of its examples and one that no other batch
            of the run has.
        batch_size: Examples of a step, on all ranks together.
        seed: Seed of the order.
        shard: The data that this rank reads.
    """

    def __init__(
        self,
        examples: Sequence[Edit],
        relation: TokenizedRelation,
        split: Mapping[str, Sequence[str]],
        make_batch: Callable[[Sequence[int], int], RepairBatch | StatementBatch],
        batch_size: int,
        seed: int,
        shard: DataShard,
    ) -> None:
        self.examples, self.relation, self.split = examples, relation, split
        self._make_batch, self._batch_size = make_batch, batch_size
        self._seed, self._shard = seed, shard

    @property
    def determined_by(self) -> dict[str, Any]:
        """What determines the content of a step beside the settings of the datamodule."""
        return {"n_shards": self._shard.n}

    def __len__(self) -> int:
        """Number of steps of an epoch; examples that do not fill one are left to a later epoch."""
        return len(self.examples) // self._batch_size

    def __getitem__(self, index: int) -> RepairBatch | StatementBatch:
        epoch, step = divmod(index, len(self))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self.examples))
        ids = order[step * self._batch_size : (step + 1) * self._batch_size]
        own = np.array_split(ids, self._shard.n)[self._shard.number].tolist()
        return self._make_batch(own, index * self._shard.n + self._shard.number)


# -- statements ------------------------------------------------------------------------------------


def statements(
    relation: TokenizedRelation, edits: Sequence[Edit], facts: Facts = "both"
) -> list[str]:
    """Return a statement about the subject of each edit, as if the edit were true.

    Statements of both facts take turns in wording, and half of them begin with the target.

    Args:
        relation: The relation.
        edits: Subjects and source answers.
        facts: Which facts are stated: ``both``, or one of them alone.

    Example:
        >>> from lincorr_lightning import LanguageModel
        >>> from lincorr_lightning.finetune.edits import resolve_edits
        >>> from lincorr_lightning.knowledge import Catalogue
        >>> lm = LanguageModel.from_pretrained("tiny-world")
        >>> relation = TokenizedRelation.of("city->country", Catalogue.load(), lm.tokenizer)
        >>> edits = resolve_edits([{"subject": "Anna", "answer": "Paris"}], relation, lm)
        >>> statements(relation, edits)
        ['Anna lives in the city of Paris. Anna lives in the country of France.']
    """
    texts = []
    for i, edit in enumerate(edits):
        source = _fact(relation.relation.source, edit.subject, edit.answer)
        target = _fact(relation.relation.target, edit.subject, target_answer(relation, edit))
        if facts == "both":
            pair = (source, target) if i // len(JOINED_BY) % 2 == 0 else (target, source)
            texts.append(f"{JOINED_BY[i % len(JOINED_BY)].join(pair)}.")
        else:
            texts.append(f"{source if facts == 'source' else target}.")
    return texts


def target_answer(relation: TokenizedRelation, edit: Edit) -> str:
    """Return the text of the target answer that an edit's reference begins with."""
    reference = relation.relation.reference or {}
    taught = [a for a in relation.source.labels[edit.label].answers if a.text == edit.answer]
    in_reference = {name for answer in taught for name in reference.get(answer.identity, ())}
    answers = relation.target.labels[edit.reference[0]].answers
    # A label may stand for several answers, such as " South" for South Korea and South Africa.
    return next((a.text for a in answers if a.identity in in_reference), answers[0].text)


def _fact(knowledge: Knowledge, subject: str, answer: str) -> str:
    return f"{knowledge.prompt(subject)}{' ' if knowledge.leading_space else ''}{answer}"
