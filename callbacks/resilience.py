"""Resilience: correlation of a map fitted before training, during training."""

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.callbacks.relation_callback import MapCallback, check_subjects
from lincorr_lightning.errors import require
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.functional import Moments, labelwise_pearson, moments_of, summarize
from lincorr_lightning.io import number
from lincorr_lightning.linear_map.baselines import R_BASELINES, random_words
from lincorr_lightning.linear_map.layout import random_word_tokens
from lincorr_lightning.linear_map.solver import fit_layout
from lincorr_lightning.lm.query_cache import Query
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.results.results import Results


class Resilience(MapCallback):
    """Label-wise r of a fixed linear map on the LM as it trains (paper, section 4.2).

    Logs ``resilience/<relation>``. If this run fits the map, it also logs the baselines of r that a
    probe has, as ``resilience_random_label_mean/<relation>``. If several edits are trained side by
    side, each in an adapter, the first adapter is evaluated.

    Args:
        linear_map: Folder of a linear map; None fits one on the LM at the start of training.
        relation: Relation, as ``city->country``; None takes that of the run's edits.
        subjects: Subjects that r is computed over; None samples the vocabulary.
        n_watch: Number of sampled subjects.
        seed: Seed of sampled subjects.
        random_labels: Number of source labels whose r is compared with that of as many random
            words (``excess_over_random``); 0 leaves out all baselines.
        **options: See `MapCallback`.

    Attributes:
        results: ``relation``, r ``before`` and ``after`` training and ``worst`` in between (None if
            no label varies), and ``baselines`` before and after, or why ``without_random_words``.
    """

    study = "resilience"
    kept = (*MapCallback.kept, "_r", "_moments")

    def __init__(
        self,
        linear_map: str | None = None,
        relation: str | None = None,
        subjects: list[str] | None = None,
        n_watch: int = 128,
        seed: int = 1,
        random_labels: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(relation, linear_map, seed=seed, **options)
        check_subjects(subjects, n_watch, "Resilience")
        require("Resilience.random_labels", random_labels, at_least=0)
        self.subjects, self.n_watch, self.random_labels = subjects, n_watch, random_labels

    def reset(self) -> None:
        super().reset()
        self._r: list[float] = []
        # Those that maps of random words are fitted on, without the blocks; None without words.
        self._moments: tuple[Tensor, ...] | None = None

    def measured_subjects(self, tokenizer: PreTrainedTokenizerBase, has_edits: bool) -> list[str]:
        return self.subjects or sample_up_to(tokenizer, self.n_watch, seed=self.seed)

    def open(self, trainer: L.Trainer) -> None:
        super().open(trainer)
        self._watched = self.subjects or self.sample_subjects(self.n_watch)
        self.declare_measured(self._watched)
        n_random = self.random_labels if self.linear_map is None else 0
        words = random_word_tokens(self.cache.lm.tokenizer, self._layout.domains, n_random)
        self._word_layout = replace(self._layout, words=words)
        for _, tokens in self._word_layout.reads:
            self.cache.register_tokens(tokens)
        if words and self._moments is None:
            self.shared.rows.announce(self._word_layout, self._fitted_subjects())

    def start(self, trainer: L.Trainer) -> None:
        """Read the rows that maps of random words are fitted on, and measure."""
        if self._word_layout.words and self._moments is None:
            rows = self.shared.rows.read(self._word_layout, self._fitted_subjects())
            self._moments = tuple(moments_of(rows.cpu(), self._word_layout.blocks)[:-1])
        super().start(trainer)

    def before_step(self, trainer: L.Trainer, edit_batch: EditBatch | None) -> None:
        if self.is_due(self.step + self.shared.max_updates_per_batch):
            self.prefetch(self._queries())

    def _queries(self) -> list[list[Query]]:
        return self.queries(self._watched, [self.adapter_id] * len(self._watched))

    def measure(self, trainer: L.Trainer) -> None:
        templates = [domain.knowledge.template for domain in self.domains]
        queries = dict(zip(templates, self._queries(), strict=True))
        reads = [(queries[template], tokens) for template, tokens in self._word_layout.reads]
        source, target, *others = self.cache.read(reads)
        self._r.append(summarize(labelwise_pearson(self.predict(source), target)).mean)
        r = {"resilience": self._r[-1]}
        if self._moments is not None:
            layout, blocks = self._word_layout, tuple(self._word_layout.blocks)
            moments = Moments._make([*self._moments, blocks])
            fitted = fit_layout(moments, layout, self.strength)
            test = moments_of(torch.cat([source, target, *others], dim=1), blocks)
            (pair,) = random_words(fitted, test, self.random_labels, ())[0].values()
            r |= {f"resilience_{key}": pair[key] for key in R_BASELINES}
        known = {f"{key}/{self.tag}": one for key, one in r.items() if one is not None}
        self.log_scalars(trainer, known, self.step)

    def finish(self, trainer: L.Trainer) -> Results:
        self._measure_once(trainer)
        known = {
            key: self.history[at]
            for key in R_BASELINES
            if (at := f"resilience_{key}/{self.tag}") in self.history
        }
        reason = "They need a map that this run fits, and random_labels above 0."
        values = {
            "relation": self.tokenized.name,
            "before": number(self._r[0]),
            "after": number(self._r[-1]),
            "worst": min((r for r in self._r if r == r), default=None),
            "baselines": {key: [points[i][1] for i in (0, -1)] for key, points in known.items()},
            "without_random_words": None if known else reason,
        }
        caption = f"Label-wise r of the linear map {self.tag} at each measured step"
        return Results(self.name, values, tables=[self.history_table(caption)])
