"""Resilience: correlation of a map fitted before training, during training."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lincorr_lightning.callbacks.relation import RelationCallback, RelationState
from lincorr_lightning.errors import require
from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.functional import Moments, labelwise_pearson, moments_of, summarize
from lincorr_lightning.io import number
from lincorr_lightning.linear_map.baselines import R_BASELINES, random_words
from lincorr_lightning.linear_map.fitting import Ridge
from lincorr_lightning.linear_map.layout import JointLayout, random_word_tokens
from lincorr_lightning.linear_map.solver import fit_layout
from lincorr_lightning.results.results import Results


@dataclass
class ResilienceState(RelationState):
    """What a checkpoint keeps of a `Resilience`."""

    r: list[float] = field(default_factory=list)
    #: What maps of random words are fitted on, without the blocks; None without words.
    moments: tuple[Tensor, ...] | None = None


class Resilience(RelationCallback):
    """Label-wise r of a fixed linear map on the LM as it trains (paper, section 4.2).

    Logs ``resilience/<relation>``. If this run fits the map, it also logs the baselines of r that a
    probe has, as ``resilience_random_label_mean/<relation>``.

    Args:
        linear_map: Folder of a linear map; None fits one on the LM at the start of training.
        relation: Relation; None takes that of the run's edits, or ``city->country`` without any.
        subjects: Subjects that r is computed over; None samples the vocabulary.
        n_watch: Number of sampled subjects.
        seed: Seed of sampled subjects.
        random_labels: Number of source labels whose r is compared with that of as many random
            words (``excess_over_random``); 0 leaves out all baselines.
        ridge: Ridge of the fitted map, see `Ridge`; 0 is the paper's.
        n_subjects: Number of subjects that it is fitted on, or as many as the vocabulary has.
        **options: See `RelationCallback`.

    Attributes:
        results: ``relation``, r ``before`` and ``after`` training and ``worst`` in between (None if
            no label varies), and ``baselines`` before and after, or why ``without_random_words``.
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
        random_labels: int = 20,
        ridge: Ridge = "auto",
        n_subjects: int = 2000,
        **options: Any,
    ) -> None:
        super().__init__(relation, **options)
        self.watch(subjects, n_watch, seed)
        require("Resilience.random_labels", random_labels, at_least=0)
        self.random_labels = random_labels
        self.set_map(linear_map, ridge, n_subjects)

    def open(self) -> Iterable[str]:
        self.resolve_relation()
        self._watched = self.subjects or self.sample_subjects(self.n_watch, self.seed)
        self.run.measured.update(self._watched)
        self.announce_map()
        layout = JointLayout.of_relation(self.tokenized)
        n_random = self.random_labels if self.map_folder is None else 0
        words = random_word_tokens(self.run.cache.lm.tokenizer, layout.domains, n_random)
        self._layout = replace(layout, words=words)
        for _, tokens in self._layout.reads_of("test"):
            self.run.cache.register_tokens(tokens)
        if words and self.state.moments is None:
            self.run.announce(self._layout, self.n_subjects)
        return self._watched

    def prepare(self) -> None:
        if self.state.map is None:
            if self._layout.words:
                subjects = self.run.fit_subjects(self.n_subjects)
                rows = self.run.reader().read(self._layout, subjects)
                self.state.moments = tuple(moments_of(rows.cpu(), self._layout.blocks)[:-1])
            self.state.map = self.fit_map()

    def before_batch(self, edits: EditBatch | None) -> None:
        if self.is_due(self.run.next_step):
            self.prefetch(self.queries(self._watched, self.adapter_id))

    def measure(self) -> None:
        queries = self.queries(self._watched, self.adapter_id)
        templates = [domain.knowledge.template for domain in self.domains.values()]
        queries_of = dict(zip(templates, queries.values(), strict=True))
        reads = self._layout.reads_of("test")
        logits = self.run.cache.read([(queries_of[template], tokens) for template, tokens in reads])
        weight, bias, ridge = self.state.map
        r = labelwise_pearson(logits[0] @ weight.T + bias, logits[1])
        self.state.r.append(summarize(r).mean)
        numbers = {"resilience": self.state.r[-1]}
        if self.state.moments is not None:
            moments = Moments._make([*self.state.moments, tuple(self._layout.blocks)])
            fitted = fit_layout(moments, self._layout, ridge)
            test = moments_of(torch.cat(logits, dim=1), self._layout.test_blocks)
            (pair,) = random_words(fitted, test, self.random_labels, ()).values()
            numbers |= {f"resilience_{key}": pair[key] for key in R_BASELINES}
        known = {f"{k}/{self.tag}": value for k, value in numbers.items() if value is not None}
        self.log_scalars(known)

    def finish(self) -> Results:
        self.measure_once()
        baselines = {
            key: [points[0][1], points[-1][1]]
            for key in R_BASELINES
            if (points := self.history.get(f"resilience_{key}/{self.tag}"))
        }
        reason = "They need a map that this run fits, and random_labels above 0."
        r = [number(value) for value in self.state.r]
        values = {
            "relation": self.tokenized.name,
            "before": r[0],
            "after": r[-1],
            "worst": min((value for value in r if value is not None), default=None),
            "baselines": baselines,
            "without_random_words": None if baselines else reason,
        }
        caption = f"Label-wise r of the linear map {self.tag} at each measured step"
        return Results(self.name, values, tables=[self.history_table(caption)])
