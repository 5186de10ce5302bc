"""Forecast of edits before they are trained."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from lincorr_lightning.callbacks.periodic_callback import CallbackState
from lincorr_lightning.callbacks.relation import RelationCallback
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.finetune.edits import nearness
from lincorr_lightning.finetune.forecasts import NearestWord, forecast_edits, forecast_results
from lincorr_lightning.results.results import Results


@dataclass
class ForecastState(CallbackState):
    """What a checkpoint keeps of a `Forecast`."""

    words: list[dict[str, Any]] = field(default_factory=list)  #: The nearest word of each edit.


class Forecast(RelationCallback):
    """Forecasts whether the target of each edit will follow, before a LightningModule trains it.

    The forecast is that of ``lincorr predict``: whether the target label nearest to the new answer
    in the LM's head is a right one (see `forecast_edits`). `output` and the table ``forecast``
    exist when training starts, and are kept on resume.

    Logs the share of edits whose nearest word is right, as ``forecast/right``.

    Args:
        relation: Relation; None takes that of the run's edits, or ``city->country`` without any.
        edits: Edits of the run, as `Generalization` takes them; None takes the dataset's.
        **options: See `RelationCallback`.

    Attributes:
        results: As ``results.json`` of ``lincorr predict`` has them.
    """

    study = "forecast"
    state_class = ForecastState
    is_of_start = True

    def __init__(
        self,
        relation: str | None = None,
        edits: list[dict[str, Any]] | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(relation, **options)
        self.edits = edits

    def open(self) -> Iterable[str]:
        self.resolve_relation()
        self._resolved = self.resolve_edits(self.edits, "Forecast.edits")
        self.run.measured.update(self._resolved.subjects)
        return [f"{edit.subject}: {edit.answer}" for edit in self._resolved.edits]

    def prepare(self) -> None:
        if not self.state.words:
            by_answer = nearness(self.run.nearest_words, self.tokenized)
            words = forecast_edits(by_answer, self._resolved.edits, self.tokenized)
            self.state.words = [asdict(word) for word in words]

    def measure(self) -> None:
        right = self.finish().values["nearest"]["right"]
        self.log_scalars({f"{self.name}/right": right})

    def after_update(self, edits: EditBatch | None) -> None:
        """Do nothing: a forecast is made once."""

    def finish(self) -> Results:
        words = [NearestWord(**word) for word in self.state.words]
        name = self.tokenized.name
        return forecast_results(self.name, words, name, self._resolved.skipped)
