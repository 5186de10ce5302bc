"""The linear probe: fit and score ``F_target(X) = W F_source(X) + b`` (paper section 3.2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal, cast

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from tqdm import tqdm

from lincorr_lightning.data.subjects import SubjectBatch, SubjectsDataModule
from lincorr_lightning.distributed import data_shard
from lincorr_lightning.frozen_lm import FrozenLMModule
from lincorr_lightning.functional import HALF_DECADES, Moments, merge_moments
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.linear_map.affine_map import AffineMap
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.layout import build_layout, domain_rows
from lincorr_lightning.linear_map.solver import (
    Pair,
    SourceSolver,
    choose_ridges,
    fit_control,
    per_target_ridge,
    split_targets,
)
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.sharding_strategy import refuse_sharding
from lincorr_lightning.metrics import InstancewisePearson, JointMoments, MeanRError
from lincorr_lightning.probe.descent import descend
from lincorr_lightning.probe.files import (
    check_fitted,
    check_held_out,
    checkpoint_entry,
    restore_entry,
    to_linear_map,
    write_inputs,
    write_report,
)
from lincorr_lightning.probe.optimizers import ClosedForm, Descent
from lincorr_lightning.probe.results import ProbeReport
from lincorr_lightning.probe.ridge_path import RidgePoint, ridge_paths
from lincorr_lightning.probe.runtime import log_runtime_estimate
from lincorr_lightning.probe.scores import score_probe
from lincorr_lightning.probe.settings import check_settings
from lincorr_lightning.probe.significance import measure_errors
from lincorr_lightning.results.run_folder import is_dry_run

# Of every five X's of the fit half one judges the ridge strengths fitted on the other four.
_TUNE_EVERY = 5
# Held-out X's whose logits are kept until the end, for standard errors: memory stays what it is.
_MOST_KEPT = 2000


class LinearProbe(FrozenLMModule):
    """How linearly are pieces of knowledge tied in an LM, and how precise is the tie?

    ``fit`` reads the domain logits of every knowledge prompt for each X of the fit half, keeps
    their second moments, solves for (W, b) of every ordered pair at once, and scores the held-out
    half.
    ``validate`` and ``test`` score a stored fit, ``predict`` gives the predicted target logits.
    The LM is frozen and is not part of the checkpoint.

    Args:
        lm: The language model that is asked.
        knowledges: Knowledges to tie, by name or family (``attribute``, ``math``, ``all``).
        pairs: Ordered pairs to fit, as ``city->country``; null fits every ordered pair.
        knowledge_files: YAML files with knowledge of your own.
        ridge: Penalty on ``|W|^2``. 0 is the paper's map; ``auto`` takes, for each pair, the
            strongest one of the path that costs at most `ridge_tolerance` of r, judged on a fifth
            of the fit half.
        ridge_grid: Ridge strengths of the path, increasing; null takes 0 and half decades from 0.1
            to 1e6.
        ridge_tolerance: What ``ridge: auto`` may cost in mean label-wise r.
        precision: Pairs for which Hit@N must be told; the others get it when they have a reference.
        control: Neutral prompt that stands in for the source as a null; null leaves it out.
        given: Knowledges that are independent of the others, as far as is known: each pair's r is
            told once more with all that these tell taken out of both sides. They are read whether
            or not they are among `knowledges`.
        subwords: Whether answers of which the first token is only the beginning of a word (" Br" of
            Brunei) are labels too; scores are then told apart by completeness (appendix K).
        permuted: Whether to fit each map a second time on permuted targets, as a null.
        solver: ``closed_form``, or ``sgd`` for gradient descent over `trainer.max_epochs`; several
            processes take a step together, by the mean over the X's of all of them.
        learning_rate: Of ``sgd``, in units of the inverse of the source's largest curvature.
        momentum: Of ``sgd``.

    Raises:
        KnowledgeError: An unknown knowledge or pair, or a pair of `precision` without reference.
        DomainError: A knowledge without labels in this LM's vocabulary.
        LanguageModelError: The LM cannot be read.
        ConfigError: Settings that contradict each other.
    """

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        knowledges: list[str] | str = ["city", "country"],  # noqa: B006 (never changed)
        pairs: list[str] | str | None = None,
        knowledge_files: list[str] = [],  # noqa: B006
        ridge: float | Literal["auto"] = 0.0,
        ridge_grid: list[float] | None = None,
        ridge_tolerance: float = 0.02,
        precision: list[str] = [],  # noqa: B006
        control: str | None = "One day, {} saw a",
        given: list[str] = [],  # noqa: B006
        subwords: bool = False,
        permuted: bool = True,
        solver: Literal["closed_form", "sgd"] = "closed_form",
        learning_rate: float = 0.5,
        momentum: float = 0.9,
    ) -> None:
        lm = LMConfig(**lm) if isinstance(lm, Mapping) else lm
        check_settings(ridge, ridge_grid, control, solver)
        super().__init__(lm)
        self.save_hyperparameters(
            {
                "lm": asdict(lm), "knowledges": knowledges, "pairs": pairs,
                "knowledge_files": knowledge_files, "ridge": ridge, "ridge_grid": ridge_grid,
                "ridge_tolerance": ridge_tolerance, "precision": precision, "control": control,
                "given": given, "subwords": subwords, "permuted": permuted, "solver": solver,
                "learning_rate": learning_rate, "momentum": momentum,
            },
            logger=False,
        )  # fmt: skip
        self.automatic_optimization = False
        self.ridge_grid = tuple(ridge_grid or HALF_DECADES)
        self.layout = build_layout(
            self.lm.tokenizer,
            Catalogue.load(*knowledge_files),
            split_names(knowledges),
            None if pairs is None else split_names(pairs),
            precision,
            control=control is not None,
            given=given,
            subwords=subwords,
        )
        self.given = list(given)
        self.maps = self._new_maps(trainable=True)
        self.permuted_maps = self._new_maps() if permuted else nn.ModuleDict()
        self.control_maps = self._new_maps() if control is not None else nn.ModuleDict()
        n_shuffled = self.layout.n_labels if permuted else 0
        self.fit_moments = JointMoments(self.layout.n_columns, n_shuffled)
        # Kept apart from the rest of the fit half only where a ridge is chosen on it.
        tuned = ridge == "auto"
        self.tune_moments = JointMoments(tuned * self.layout.n_columns, tuned * n_shuffled)
        self.test_moments = JointMoments(self.layout.n_columns, n_shuffled)
        sizes = {
            source: [self.layout.sizes[target] for target in self.layout.targets(source)]
            for source in self.layout.sources
        }
        self.instancewise = nn.ModuleDict({s: InstancewisePearson(n) for s, n in sizes.items()})
        self.errors = nn.ModuleDict({s: MeanRError(n) for s, n in sizes.items()})
        self.ridges: dict[Pair, float] = dict.fromkeys(
            self.layout.pairs, 0.0 if ridge == "auto" else float(ridge)
        )
        self.fitted_on = 0
        self.fit_subjects: list[str] = []
        self.report: ProbeReport | None = None
        self._solvers: dict[str, SourceSolver] = {}
        self._fit: Moments | None = None
        self._kept: list[Tensor] = []
        self._timed = False

    def _new_maps(self, trainable: bool = False) -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                source: AffineMap(
                    self.layout.sizes[source], len(self.layout.target_columns(source)), trainable
                )
                for source in self.layout.sources
            }
        )

    # -- set-up ------------------------------------------------------------------------------

    @property
    def shares_steps(self) -> bool:
        """Tells `SubjectsDataModule` that the batches of all processes make a step."""
        return bool(self.hparams["solver"] == "sgd")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One step solves, or plain gradient descent with one learning rate a source."""
        if self.hparams["solver"] == "closed_form":
            return ClosedForm(self.maps.parameters(), self._solve)
        return Descent(self.maps, self.hparams["learning_rate"], self.hparams["momentum"])

    def setup(self, stage: str) -> None:
        """Check the run, and say what it will hold in memory.

        Raises:
            ConfigError: Gradient descent while the LM is in pieces, or see `FrozenLMModule.setup`.
        """
        super().setup(stage)
        if self.shares_steps:
            refuse_sharding(self.trainer, "model.solver sgd")
        rank_zero_info(
            f"{len(self.layout.domains)} knowledges, {len(self.layout.pairs)} pairs, "
            f"{self.layout.n_labels} labels; statistics of {self._gigabytes():.2f} GiB"
        )

    def on_train_start(self) -> None:
        """Say how long the LM will be asked, from a few X's."""
        if not self._timed:
            self._timed = True
            log_runtime_estimate(self)

    on_validation_start = on_test_start = on_train_start

    def _gigabytes(self) -> float:
        halves = 3 if self.hparams["ridge"] == "auto" else 2
        kept = self.layout.n_columns**2 + self.fit_moments.shuffled.numel()
        return float(halves * kept * 8 / 2**30)

    # -- the data's way ----------------------------------------------------------------------

    @torch.no_grad()
    def joint_rows(self, inputs: list[str]) -> Tensor:
        """Domain logits of every knowledge prompt, and the control's, for some X's.

        Args:
            inputs: The X's.

        Returns:
            ``(n_subjects, n_columns)``, float64, columns as `layout` says.

        Raises:
            NonFiniteError: The LM answers a prompt with NaN or infinite logits.
        """
        return domain_rows(self.lm, self.layout, inputs, self.hparams["control"])

    def forward(self, rows: Tensor) -> dict[Pair, Tensor]:
        """Predicted target logits of every pair from joint rows."""
        return {
            (source, target): prediction
            for source, x, _, module in self.sources_of(rows)
            for target, prediction in split_targets(self.layout, source, module(x))
        }

    def on_train_epoch_start(self) -> None:
        """Every epoch is a whole fit."""
        datamodule = getattr(self.trainer, "datamodule", None)
        if isinstance(datamodule, SubjectsDataModule):
            self.fit_subjects = datamodule.halves["fit"]
        self.fit_moments.reset()
        self.tune_moments.reset()

    def training_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        """Add a batch to the statistics; solve when it is the last."""
        rows = self.joint_rows(batch.inputs)
        if not batch.is_padding:
            self._accumulate(rows, batch.first)
        if self.hparams["solver"] == "sgd":
            descend(self, rows, batch, first=self.current_epoch == 0 and batch_idx == 0)
        if self.trainer.is_last_batch:
            if self.hparams["solver"] == "closed_form":
                cast(Any, self.optimizers()).step()
            else:
                self._solve()

    def _accumulate(self, rows: Tensor, first: int) -> None:
        if self.hparams["ridge"] != "auto":
            self.fit_moments.update(rows)
            return
        # By position in the half, not in the batch: the same X's judge whatever the batch size.
        tune = [i for i in range(len(rows)) if (first + i) % _TUNE_EVERY == _TUNE_EVERY - 1]
        fit = [i for i in range(len(rows)) if (first + i) % _TUNE_EVERY != _TUNE_EVERY - 1]
        self.tune_moments.update(rows[tune])
        self.fit_moments.update(rows[fit])

    def _solve(self) -> None:
        fit, tune = self.fit_moments.gather(), self.tune_moments.gather()
        if self.hparams["ridge"] == "auto":
            self.ridges = choose_ridges(
                fit, tune, self.layout, self.ridge_grid, self.hparams["ridge_tolerance"]
            )
            fit = merge_moments(fit, tune)
        self.fitted_on = int(fit.n)
        self._solvers = {}
        for source in self._each_source("solving"):
            ridge = per_target_ridge(self.layout, source, self.ridges).to(fit.mean.device)
            solver = self._solvers[source] = SourceSolver(fit, self.layout, source)
            closed = self.hparams["solver"] == "closed_form"
            permuted = self.permuted_maps[source] if self.permuted_maps else None
            solver.assign(
                cast(AffineMap, self.maps[source]) if closed else None,
                cast(AffineMap | None, permuted),
                ridge,
            )
            if self.control_maps:
                control = cast(AffineMap, self.control_maps[source])
                fit_control(fit, self.layout, source, control, ridge)
        self._fit = fit

    def sources_of(self, rows: Tensor) -> Iterable[tuple[str, Tensor, Tensor, AffineMap]]:
        """Source logits, logits of all its targets, and map, of each source."""
        for source, module in self.maps.items():
            x = rows[:, self.layout.columns(source).to(rows.device)]
            y = rows[:, self.layout.target_columns(source).to(rows.device)]
            yield source, x, y, cast(AffineMap, module)

    # -- scoring -----------------------------------------------------------------------------

    def _need_maps(self) -> None:
        """Refuse to score or predict with maps of zeros."""
        check_fitted(self)

    def _begin_scoring(self) -> None:
        self._need_maps()
        check_held_out(self)
        self.test_moments.reset()
        for metric in self.instancewise.values():
            cast(InstancewisePearson, metric).reset()
        self._kept = []

    def _score_batch(self, batch: SubjectBatch) -> None:
        if self.trainer.sanity_checking:
            return  # before the fit there is nothing to score
        rows = self.joint_rows(batch.inputs)
        if batch.is_padding:
            return
        self.test_moments.update(rows)
        for source, x, y, module in self.sources_of(rows):
            cast(InstancewisePearson, self.instancewise[source]).update(module(x), y)
        room = _MOST_KEPT // data_shard(self.trainer).n - sum(map(len, self._kept))
        if room > 0:
            self._kept.append(rows[:room].float())

    def _finish_scoring(self) -> None:
        if self.trainer.sanity_checking:
            return
        test = self.test_moments.gather()
        paths: dict[Pair, list[RidgePoint]] = {}
        for source in self._each_source("ridge path") if self._solvers else ():
            solver = self._solvers.pop(source)
            paths |= ridge_paths(solver, test, self.layout, source, self.ridge_grid)
        instance = {
            # torchmetrics squeezes the result of a source with a single target
            source: cast(InstancewisePearson, metric).compute().reshape(-1)
            for source, metric in self.instancewise.items()
        }
        measure_errors(self, test, self._kept)
        self._kept = []
        self.report = score_probe(self, test, instance, paths, self._fit)
        self._fit = None
        mean = sum(score.label_mean or 0.0 for score in self.report.pairs) / len(self.report.pairs)
        self.log("label_mean", mean, prog_bar=True)

    def _each_source(self, doing: str) -> Any:
        sources = self.layout.sources
        # None is silent where no terminal shows it.
        quiet = len(sources) < 8 or not self.trainer.is_global_zero or None
        return tqdm(sources, desc=doing, unit="source", disable=quiet, leave=False)

    on_validation_epoch_start = _begin_scoring
    on_test_epoch_start = _begin_scoring
    on_validation_epoch_end = _finish_scoring
    on_test_epoch_end = _finish_scoring
    on_predict_start = _need_maps

    def validation_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        """Add held-out X's to the scores."""
        self._score_batch(batch)

    test_step = validation_step

    def predict_step(self, batch: SubjectBatch, batch_idx: int) -> dict[str, Any]:
        """Predicted target logits.

        Returns:
            ``inputs``: the X's; ``first``: position of the first one; ``logits``: of each pair,
            ``(n_subjects, n_target)``; ``labels``: the target labels of each pair.
        """
        inputs = [] if batch.is_padding else batch.inputs
        logits = self(self.joint_rows(batch.inputs))
        return {
            "inputs": inputs,
            "first": batch.first,
            "logits": {f"{s}->{t}": y[: len(inputs)].cpu() for (s, t), y in logits.items()},
            "labels": {f"{s}->{t}": self.layout.domains[t].texts for s, t in logits},
        }

    # -- outputs -----------------------------------------------------------------------------

    def linear_map(self) -> LinearMap:
        """The fitted maps as an artifact of their own."""
        return to_linear_map(self)

    @rank_zero_only
    def _write(self) -> None:
        if not is_dry_run(self.trainer):
            write_inputs(self)
            write_report(self)

    def on_fit_end(self) -> None:
        """Write everything the fit found."""
        self._write()

    def on_validation_end(self) -> None:
        """Write the scores, unless a fit is still going on."""
        if self.trainer.state.fn != "fit":
            self._write()

    on_test_end = on_fit_end

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say what the maps were fitted on, beside them."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["linear_probe"] = checkpoint_entry(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another LM, of other labels or of other pairs.

        Raises:
            LinearMapError: It says what differs.
        """
        super().on_load_checkpoint(checkpoint)
        restore_entry(self, checkpoint["linear_probe"])
