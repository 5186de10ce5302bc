"""Interventions: is it W's direction through which an edit reaches its target?"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.callbacks.relation import RelationCallback, RelationState, at_source_prompt
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.finetune import interventions as moves
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.finetune.cases import EditAnswers, rows_of
from lincorr_lightning.finetune.edit_files import SEPARATOR
from lincorr_lightning.linear_map.fitting import fit_linear_map
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.results.results import Results

_MAP_OF_ARM = {"w": "auto", "plain": "plain", "w0": "vocabulary"}


@dataclass
class InterventionState(RelationState):
    """What a checkpoint keeps of an `Intervention`."""

    maps: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  #: W and b.


class Intervention(RelationCallback):
    """Moves the state at each edit's target prompt along W's direction, beside other directions.

    W's column of the source answer that an edit teaches says which target logits rise. Is that how
    the edit reaches the target? The state that the head reads at the target prompt is moved along
    the column, as the head's rows of the target labels map it into states: see
    `lincorr_lightning.finetune.interventions.EditStates`, and docs/causal.md for the arms. This
    takes one forward pass of an edit, at its end. Edits are independent ones with LoRA.

    Args:
        relation: Relation; None takes that of the run's edits, or ``city->country`` without any.
        seed: Seed of what is random among the directions.
        n_subjects: Number of subjects that maps are fitted on, or as many as the vocabulary has.
        **options: See `RelationCallback`.

    Attributes:
        results: ``n_learned`` edits with ``n_references``, the ``rank`` of the space that target
            logits show, and ``effects`` at strength 1.
        edits: Learned edits, with their states; None before the end of training.
        maps: W and b by name: ``auto`` and ``plain``, with that ridge and none, and ``vocabulary``,
            which leads to the target labels' logits at the source prompt.
    """

    study = "intervention"
    state_class = InterventionState
    edits: moves.EditStates | None = None

    def __init__(
        self,
        relation: str | None = None,
        seed: int = 0,
        n_subjects: int = 2000,
        **options: Any,
    ) -> None:
        super().__init__(relation, **options)
        self.seed = seed
        self.set_map(None, "auto", n_subjects)

    @property
    def maps(self) -> dict[str, tuple[Tensor, Tensor]]:
        """W and b of each map, after the start of training."""
        return self.state.maps

    def open(self) -> Iterable[str]:
        run = self.run
        lm = run.cache.lm
        self.resolve_relation()
        if not run.is_independent or run.dataset.training.method != "lora":
            raise ConfigError(
                f"Intervention needs independent edits of the source of {self.tag}, with LoRA. "
                "Set model.protocol independent and model.method lora, and use EditsDataModule."
            )
        self._resolved = self.resolve_edits(None, "Intervention.edits")
        if not lm.has_linear_head:
            raise ConfigError(
                "Intervention needs logits that are products of states and of the head's rows, and "
                f"{type(lm.model).__name__} scales, caps or shifts them. Take another LM."
            )
        self._w0 = at_source_prompt(self.tokenized)
        self.announce_map()
        run.announce(JointLayout.of_relation(self._w0), self.n_subjects)
        return [f"{edit.subject}: {edit.answer}" for edit in self._resolved.edits]

    def prepare(self) -> None:
        if self.state.maps:
            return
        run = self.run
        name = self.tokenized.name
        self.state.base = self.read(self.queries(self._resolved.subjects))
        weight, bias, ridge = self.fit_map()
        plain = self.fit_map(0.0)
        subjects = run.fit_subjects(self.n_subjects)
        w0 = fit_linear_map(run.cache.lm, self._w0, subjects, ridge, run.reader())
        self.state.maps = {
            "auto": (weight, bias),
            "plain": plain[:2],
            "vocabulary": (w0.weight(name), w0.bias(name)),
        }

    def after_update(self, edits: EditBatch | None) -> None:
        if edits is not None and edits.last and edits.edits:
            logits = self.read(self.edit_queries(edits))
            self.state.keep(edits, logits)

    def finish(self) -> Results:
        relation = self.tokenized
        by_step = self.state.readings_by_step()
        ids, (after,) = next(iter(by_step.values()), ([], [rows_of(self.state.base, [])]))
        edits = [self._resolved.edits[i] for i in ids]
        answers = EditAnswers.of(edits, rows_of(self.state.base, ids), after)
        learned = answers.learned
        if not learned.any():
            rank_zero_warn(f"{self.name}: none of {len(ids)} edits has learned its source answer.")
            return Results(self.name, {"relation": relation.name, "n_learned": 0})
        edits = [edits[i] for i in learned.nonzero().flatten().tolist()]
        labels = answers.labels[learned]
        reference = answers.reference[learned]
        texts = relation.target.texts
        head = self.run.cache.lm.head_rows()
        assert head is not None  # the head is linear
        columns = {arm: self.maps[name][0].T[labels] for arm, name in _MAP_OF_ARM.items()}
        space = moves.TargetSpace(head.rows(relation.target.token_ids))
        self.edits = moves.EditStates(
            space,
            answers.before["target"][learned],
            answers.after["target"][learned],
            reference,
            [SEPARATOR.join(texts[i] for i in edit.reference) for edit in edits],
            moves.weights_of_arms(space, reference, self.seed, **columns),
        )
        return moves.intervention_results(self.name, relation.name, self.edits)
