"""Resilience: correlation of a map fitted before training, during training."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lincorr_lightning.callbacks.relation import RelationCallback, RelationState
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.functional import labelwise_pearson, summarize
from lincorr_lightning.linear_map.fitting import Ridge
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import number


@dataclass
class ResilienceState(RelationState):
    """What a checkpoint keeps of a `Resilience`."""

    r: list[float] = field(default_factory=list)


class Resilience(RelationCallback):
    """Label-wise r of a fixed linear map on the LM as it trains (paper, section 4.2).

    Logs ``resilience/<relation>``. `lincorr test --config configs/resilience.yaml` compares an LM
    before and after training with maps of random words as well.

    Args:
        linear_map: Folder of a linear map; None fits one on the LM at the start of training.
        relation: Relation; None takes that of the run's edits, or ``city->country`` without any.
        subjects: Subjects that r is computed over; None samples the vocabulary.
        n_watch: Number of sampled subjects.
        seed: Seed of sampled subjects.
        ridge: Ridge of the fitted map, see `Ridge`; 0 is the paper's.
        n_subjects: Number of subjects that it is fitted on, or as many as the vocabulary has.
        **options: See `RelationCallback`.

    Attributes:
        results: ``relation``, r ``before`` and ``after`` training and ``worst`` in between; None if
            no label varies.
    """

    study = "resilience"
    state_class = ResilienceState

    def __init__(
        self,
        linear_map: str | None = None,
        relation: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 128,
        seed: int = 1,
        ridge: Ridge = "auto",
        n_subjects: int = 2000,
        **options: Any,
    ) -> None:
        super().__init__(relation, **options)
        self.watch(subjects, n_watch, seed)
        self.fit_by(linear_map, ridge, n_subjects)

    def open(self) -> Iterable[str]:
        self.resolve_relation()
        self._watched = self.subjects or self.sample_subjects(self.n_watch, self.seed)
        self.run.measured.update(self._watched)
        self.announce_map()
        return self._watched

    def prepare(self) -> None:
        if self.state.map is None:
            self.state.map = self.fit_map()

    def before_batch(self, edits: EditBatch | None) -> None:
        if self.is_due(self.run.next_step):
            self.prefetch(self.queries(self._watched, self.adapter_id))

    def measure(self) -> None:
        logits = self.read(self.queries(self._watched, self.adapter_id))
        weight, bias, _ = self.state.map
        r = labelwise_pearson(logits["source"] @ weight.T + bias, logits["target"])
        self.state.r.append(summarize(r).mean)
        self.log_scalars({f"resilience/{self.tag}": self.state.r[-1]})

    def finish(self) -> Results:
        self.measure_once()
        r = [number(value) for value in self.state.r]
        values = {
            "relation": self.tokenized.name,
            "before": r[0],
            "after": r[-1],
            "worst": min((value for value in r if value is not None), default=None),
        }
        caption = f"Label-wise r of the linear map {self.tag} at each measured step"
        return Results(self.name, values, tables=[self.history_table(caption)])
