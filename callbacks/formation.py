"""How do ties form? A probe at set steps of training (open in the paper, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lincorr_lightning.callbacks.watcher import RelationCallback
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.functional import (
    LeastSquares,
    hit_rates,
    labelwise_pearson,
    moments_of,
    summarize,
)
from lincorr_lightning.io import write_csv
from lincorr_lightning.knowledge import Domain, TokenizedRelation
from lincorr_lightning.lm.query_cache import get_query_cache
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.run_folder import is_dry_run, run_folder
from lincorr_lightning.results.style import write_picture

_LEAST = 20
"""X's that a map and its scores need."""


@dataclass(frozen=True)
class TiePoint:
    """A pair at one step.

    Attributes:
        step: Optimizer steps done.
        pair: As ``city->country``.
        label_mean: Mean label-wise r on held-out X's; None where no label varies.
        control_label_mean: The same from the neutral prompt; None without.
        influenced: Hit@1 of influenced targets; None without a reference.
        influencing: Hit@1 of influencing sources; None without a reference.
    """

    step: int
    pair: str
    label_mean: float | None
    control_label_mean: float | None
    influenced: float | None
    influencing: float | None


@dataclass(frozen=True)
class RecallPoint:
    """A knowledge at one step.

    Attributes:
        step: Optimizer steps done.
        knowledge: Its name.
        said: Share of the facts in the training text that the LM gives back, of its labels.
        unsaid: Share of the facts that the text never states; None if there is none.
    """

    step: int
    knowledge: str
    said: float | None
    unsaid: float | None


class _Facts(NamedTuple):
    """Prompts about people, and the column of each true answer."""

    prompts: list[str]
    columns: Tensor


class Formation(RelationCallback):
    """Fits and scores linear maps while any LightningModule trains a causal LM.

    At each measurement the maps are fitted anew on half of the X's and scored on the other half.
    Where the run's DataModule knows what is true (`CorpusDataModule.truths`), recall is told too,
    of facts that the text states and of facts that it never does: what the LM infers. Training is
    left as it is, bit for bit; every process asks the same, and the first one writes.

    Args:
        pairs: Ordered pairs, as ``city->country``.
        n_subjects: X's, as far as the vocabulary has so many.
        every_n_steps: Optimizer steps between two measurements; the beginning and the end are
            always measured.
        control: Neutral prompt in the source's place; None leaves it out.
        ridge: Of the maps.
        lm: Name of the LM in ``module.named_modules()``, if there are several.
        tokenizer: Folder or hub id of its tokenizer, if none is found.
        knowledge_files: YAML files with knowledge of your own.
        seed: Of the X's.

    Attributes:
        ties: A row a pair and step.
        recall: A row a knowledge and step.

    Raises:
        ConfigError: A setting that no run can have.
    """

    def __init__(
        self,
        pairs: Sequence[str] = ("city->country", "city->color"),
        n_subjects: int = 1000,
        every_n_steps: int = 100,
        control: str | None = "One day, {} saw a",
        ridge: float = 0.0,
        lm: str | None = None,
        tokenizer: str | None = None,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        if not pairs:
            raise ConfigError("Formation.pairs is empty; name some, such as city->country.")
        super().__init__(
            None, None, ridge, n_subjects, every_n_steps, lm, tokenizer, knowledge_files, seed
        )
        if control is not None and control.count("{}") != 1:
            raise ConfigError(f"Formation.control {control!r} must hold {{}} once, where X goes.")
        self.pairs = list(dict.fromkeys(pairs))
        self.control = control

    @property
    def state_key(self) -> str:
        """Several may watch one run, each other pairs."""
        return self._generate_state_key(pairs=self.pairs, lm=self.lm, seed=self.seed)

    def begin(self) -> None:
        """Forget all that was seen in another run."""
        super().begin()
        self.ties: list[TiePoint] = []
        self.recall: list[RecallPoint] = []

    @property
    def results(self) -> dict[str, Any]:
        """Everything that was measured, for ``results.json``."""
        return {
            "ties": [asdict(point) for point in self.ties],
            "recall": [asdict(point) for point in self.recall],
        }

    # -- a run -----------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin anew; of a run that is resumed, the checkpoint says the rest."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            run_folder(trainer)  # processes agree on it by a broadcast

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look the labels up, and measure before anything changes."""
        self._lm = get_query_cache(trainer, pl_module, self.lm, self.tokenizer).lm
        catalogue = self.catalogue(trainer)
        tokenizer = self._lm.tokenizer
        self._asked = {
            name: TokenizedRelation.of(name, catalogue, tokenizer) for name in self.pairs
        }
        self._domains: dict[str, Domain] = {
            domain.knowledge.name: domain
            for asked in self._asked.values()
            for domain in (asked.source, asked.target)
        }
        n = min(self.n_subjects, len(usable_strings(tokenizer)))
        if n < _LEAST:
            raise SubjectsError(
                f"Formation needs {_LEAST} X's or more, and has {n}: raise its n_subjects, or take "
                "an LM with a larger vocabulary."
            )
        self._inputs = sample_subjects(tokenizer, n, seed=self.seed)
        self._facts = self._look_facts_up(trainer)
        self.watch_from(trainer)
        if not self.ties:
            self.measure(trainer)

    def _look_facts_up(self, trainer: L.Trainer) -> dict[str, tuple[_Facts, _Facts]]:
        truths = getattr(getattr(trainer, "datamodule", None), "truths", None)
        found: dict[str, tuple[_Facts, _Facts]] = {}
        if not callable(truths):
            return found
        for name, domain in self._domains.items():
            column = {
                answer.identity: i for i, one in enumerate(domain.labels) for answer in one.answers
            }
            parts = []
            for statements in truths(name):
                known = [s for s in statements if s.answer.identity in column]
                columns = torch.tensor([column[s.answer.identity] for s in known])
                parts.append(_Facts([s.prompt for s in known], columns))
            found[name] = (parts[0], parts[1])
        return found

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the end, and write the table and the figure."""
        del pl_module
        if self.ties[-1].step != trainer.global_step:
            self.measure(trainer)
        if trainer.is_global_zero and not is_dry_run(trainer):
            self._write(trainer)

    # -- measuring -------------------------------------------------------------------------------

    def measure(self, trainer: L.Trainer) -> None:
        """Fit and score the maps, and ask for the facts."""
        step = trainer.global_step
        rows = {
            name: self._lm.domain_logits(
                [domain.knowledge.prompt(x) for x in self._inputs], domain.token_ids
            )
            for name, domain in self._domains.items()
        }
        neutral: dict[str, Tensor] = {}
        numbers: dict[str, float | None] = {}
        for name, asked in self._asked.items():
            source, target = (rows[d.knowledge.name] for d in (asked.source, asked.target))
            r, weight = self._tie(source, target)
            control = None
            if self.control is not None:
                known = asked.source.knowledge.name
                if known not in neutral:  # asked once for all pairs of a source
                    prompts = [self.control.format(x) for x in self._inputs]
                    neutral[known] = self._lm.domain_logits(prompts, asked.source.token_ids)
                control, _ = self._tie(neutral[known], target)
            hits: list[float | None] = [None, None]
            if asked.has_reference:
                right = torch.from_numpy(asked.right)
                hits = [number(float(rates.rates[0])) for rates in hit_rates(weight.cpu(), right)]
            self.ties.append(TiePoint(step, name, r, control, hits[0], hits[1]))
            numbers |= {
                f"formation_r/{name}": r, f"formation_control/{name}": control,
                f"formation_influenced/{name}": hits[0], f"formation_influencing/{name}": hits[1],
            }  # fmt: skip
        for name, (said, unsaid) in self._facts.items():
            point = RecallPoint(step, name, self._share(name, said), self._share(name, unsaid))
            self.recall.append(point)
            numbers |= {
                f"formation_recall/{name}": point.said, f"formation_inferred/{name}": point.unsaid,
            }  # fmt: skip
        told = {name: value for name, value in numbers.items() if value is not None}
        self.log_numbers(trainer, told, step)

    def _tie(self, x: Tensor, y: Tensor) -> tuple[float | None, Tensor]:
        """Mean label-wise r on every second X of a map fitted on the others, and W."""
        n = x.shape[1]
        fit = moments_of(torch.cat([x[::2], y[::2]], 1))
        weight = LeastSquares(fit.scatter[:n, :n], fit.scatter[:n, n:]).weight(self.ridge)
        return number(summarize(labelwise_pearson(x[1::2] @ weight.T, y[1::2])).mean), weight

    def _share(self, name: str, facts: _Facts) -> float | None:
        if not facts.prompts:
            return None
        said = self._lm.domain_logits(facts.prompts, self._domains[name].token_ids).argmax(1)
        return float((said.cpu() == facts.columns).double().mean())

    # -- telling ---------------------------------------------------------------------------------

    def _write(self, trainer: L.Trainer) -> None:
        from lincorr_lightning.results.loggers import add_picture, tensorboard_writers
        from lincorr_lightning.results.style import to_picture
        from lincorr_lightning.results.training_curves import training_curves

        folder = run_folder(trainer)
        tables: tuple[tuple[str, type, Sequence[object]], ...] = (
            ("formation", TiePoint, self.ties),
            ("formation_recall", RecallPoint, self.recall),
        )
        for name, kind, points in tables:
            columns = [field.name for field in fields(kind)]
            if points:
                rows = ([getattr(point, column) for column in columns] for point in points)
                write_csv(folder / "tables" / f"{name}.csv", columns, rows)
        picture = to_picture(
            training_curves(self._curves(), "How ties form", "r on held-out X’s at each step")
        )
        write_picture(picture, folder / "figures" / "formation.png")
        for writer in tensorboard_writers(trainer):
            add_picture(writer, "formation", picture, trainer.global_step)

    def _curves(self) -> dict[str, list[tuple[int, float]]]:
        curves: dict[str, list[tuple[int, float]]] = {}
        for kind, points, key, of in (
            ("label-wise r", self.ties, "label_mean", "pair"),
            ("r of the control prompt", self.ties, "control_label_mean", "pair"),
            ("Hit@1 influenced", self.ties, "influenced", "pair"),
            ("Hit@1 influencing", self.ties, "influencing", "pair"),
            ("recall of what is said", self.recall, "said", "knowledge"),
            ("recall of what is never said", self.recall, "unsaid", "knowledge"),
        ):
            for point in points:
                value = getattr(point, key)
                if value is not None:
                    tag = f"{kind}/{getattr(point, of)}"
                    curves.setdefault(tag, []).append((point.step, value))
        return curves

    def state_dict(self) -> dict[str, Any]:
        """What was measured so far."""
        return {**super().state_dict(), **self.results}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state_dict)
        self.ties = [TiePoint(**point) for point in state_dict["ties"]]
        self.recall = [RecallPoint(**point) for point in state_dict["recall"]]
