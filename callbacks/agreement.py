"""Agreement of an LM's answers: does the target follow from its own source answer?"""

from collections.abc import Iterable
from typing import Any

import torch

from lincorr_lightning.callbacks.relation import RelationCallback
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.results.results import Results


class Agreement(RelationCallback):
    """Counts subjects whose target answer is right for the LM's own source answer.

    It needs no edits: an LM that says Paris of a subject agrees with itself if it also says France,
    whatever is true. Logs the share as ``agreement/<relation>``, and as
    ``agreement_constant/<relation>`` its null, the share for which the target label that is right
    most often would be right.

    Args:
        relation: Relation; None takes that of the run's edits, or ``city->country`` without any.
        subjects: Subjects; None samples the vocabulary.
        n_watch: Number of sampled subjects.
        seed: Seed of sampled subjects.
        **options: See `RelationCallback`.

    Attributes:
        results: ``relation``, the number ``n`` of subjects, and the shares ``before`` and ``after``
            training, and ``constant`` after it.
    """

    study = "agreement"

    def __init__(
        self,
        relation: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 128,
        seed: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(relation, **options)
        self.watch(subjects, n_watch, seed, least=1)

    def open(self) -> Iterable[str]:
        self._at = self.measured_relation()
        self._at.tokenized.require_reference()
        self._subjects = self.subjects or self._at.sample_subjects(self.n_watch, self.seed)
        return self._subjects

    def before_batch(self, edits: EditBatch | None) -> None:
        if self.is_due(self.run.next_step):
            self._at.prefetch(self._at.queries(self._subjects, self.adapter_id))

    def measure(self) -> None:
        logits = self._at.read(self._at.queries(self._subjects, self.adapter_id))
        reference = torch.from_numpy(self._at.tokenized.reference_mask).T
        right = reference[logits["source"].argmax(1)].double()
        agrees = right.gather(1, logits["target"].argmax(1, keepdim=True))
        scalars = {"agreement": agrees.mean(), "agreement_constant": right.mean(0).max()}
        self.log_scalars({f"{k}/{self._at.tag}": float(share) for k, share in scalars.items()})

    def finish(self) -> Results:
        self.measure_once()
        shares = self.history[f"agreement/{self._at.tag}"]
        constant = self.history[f"agreement_constant/{self._at.tag}"]
        values = {
            "relation": self._at.tokenized.name,
            "n": len(self._subjects),
            "before": shares[0][1],
            "after": shares[-1][1],
            "constant": constant[-1][1],
        }
        caption = f"Share of subjects whose answers of {self._at.tag} agree, at each measured step"
        return Results(self.name, values, tables=[self.history_table(caption)])
