"""Interventions: is it W's direction through which an edit reaches its target?"""

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lincorr_lightning.callbacks.relation_callback import MapCallback
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.finetune import interventions as moves
from lincorr_lightning.finetune.batches import EditBatch, edit_dataset
from lincorr_lightning.finetune.edit_files import SEPARATOR
from lincorr_lightning.finetune.edits import reference_mask
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.fitting import fit_linear_map
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.results.results import Results

_MAP_OF_ARM = {"w": "auto", "plain": "plain", "w0": "vocabulary"}


class Intervention(MapCallback):
    """Moves the state at each edit's target prompt along W's direction, beside other directions.

    W's column of the source answer that an edit teaches says which target logits rise. Is that how
    the edit reaches the target? The state that the head reads at the target prompt is moved along
    the column, as the head's rows of the target labels map it into states: see
    `lincorr_lightning.finetune.interventions.EditStates`, and docs/causal.md for the arms. This
    takes one forward pass of an edit, at its end. Edits are independent ones with LoRA.

    Args:
        relation: Relation, as ``city->country``; None takes that of the run's edits.
        **options: See `MapCallback`.

    Attributes:
        results: ``n_learned`` edits with ``n_references``, the ``rank`` of the space that target
            logits show, and ``effects`` at strength 1.
        edits: Learned edits, with their states; None before the end of training.
    """

    study = "intervention"
    edits: moves.EditStates | None = None

    def __init__(self, relation: str | None = None, **options: Any) -> None:
        super().__init__(relation, None, **options)

    def open(self, trainer: L.Trainer) -> None:
        """Refuse edits and LMs whose target logits do not show the states."""
        super().open(trainer)
        dataset, lm = edit_dataset(trainer), self.cache.lm
        self._edits = self.find_edits(None, trainer) if self.is_independent else []
        if dataset is None or dataset.training.method != "lora" or not self._edits:
            raise ConfigError(
                f"Intervention needs independent edits of the source of {self.tag}, with LoRA. Set "
                "model.protocol independent and model.method lora, and use EditsDataModule."
            )
        if not lm.has_linear_head:
            raise ConfigError(
                "Intervention needs logits that are products of states and of the head's rows, and "
                f"{type(lm.model).__name__} scales, caps or shifts them. Take another LM."
            )
        self.declare_measured(f"{edit.subject}: {edit.answer}" for edit in self._edits)
        # W₀ maps to the target labels' logits at the source prompt, as the vocabulary alone would.
        relation, template = self.tokenized, self.tokenized.source.knowledge.template
        knowledge = replace(relation.target.knowledge, template=template)
        self._w0 = replace(relation, target=replace(relation.target, knowledge=knowledge))
        self.shared.rows.announce(JointLayout.of_relation(self._w0), self._fitted_subjects())

    def start(self, trainer: L.Trainer) -> None:
        """Record the logits before training, and fit the maps."""
        self.keep_base([edit.subject for edit in self._edits])
        super().start(trainer)

    def _fit_maps(self) -> dict[str, LinearMap]:
        maps = {"auto": self.fit_map("auto"), "plain": self.fit_map(0.0)}
        maps["vocabulary"] = fit_linear_map(
            self.cache.lm,
            self._w0,
            self._fitted_subjects(),
            maps["auto"].ridge[self.tokenized.name],
            self.shared.rows,
        )
        return maps

    def after_optimizer_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        if edit_batch is not None and edit_batch.last:
            queries = self.queries(*self.own_subjects(edit_batch))
            self.keep_edits(edit_batch, self.read(queries))

    def finish(self, trainer: L.Trainer) -> Results:
        """Move the states of all edits whose source was learned."""
        ids, (after,) = next(iter(self.edits_by_step().values()), ([], [self.base.rows([])]))
        taught = torch.tensor([self._edits[i].label for i in ids], dtype=torch.long)
        learned = (after.source.argmax(1) == taught).nonzero().flatten().tolist()
        if not learned:
            rank_zero_warn(f"{self.name}: none of {len(ids)} edits has learned its source answer.")
            return Results(self.name, {"relation": self.tokenized.name, "n_learned": 0})
        edits = [self._edits[ids[i]] for i in learned]
        before, labels = self.base.rows([ids[i] for i in learned]).target, taught[learned]
        right, texts = reference_mask(edits, before.shape[1]), self.tokenized.target.texts
        rows = self.cache.lm.head_rows(self.tokenized.target.token_ids)
        assert rows is not None  # the head is linear
        own = {arm: self.maps[one][0].T[labels] for arm, one in _MAP_OF_ARM.items()}
        space = moves.TargetSpace(rows)
        self.edits = moves.EditStates(
            space,
            before,
            after.target[learned],
            right,
            [SEPARATOR.join(texts[i] for i in edit.reference) for edit in edits],
            moves.weights_of_arms(space, right, self.seed, **own),
            self.base.source.mean(0)[labels],
        )
        return moves.intervention_results(self.name, self.tokenized.name, self.edits)
