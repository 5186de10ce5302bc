"""The linear probe: fit and score ``F_target(X) = W F_source(X) + b`` (paper section 3.2)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lincorr_lightning.data.subjects import Half, SubjectBatch, SubjectsDataModule
from lincorr_lightning.distributed import data_shard, gather
from lincorr_lightning.errors import CheckpointError, ConfigError, LanguageModelError, require
from lincorr_lightning.functional import Moments
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.linear_map import solver as solving
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.baselines import LabelCount, beside_baselines
from lincorr_lightning.linear_map.fitting import (
    FitMoments,
    Ridge,
    RidgeRequest,
    fit_maps,
    require_held_out,
    split_rows,
)
from lincorr_lightning.linear_map.layout import Pair, build_layout, domain_rows, stem, wordings_of
from lincorr_lightning.linear_map.scores import (
    PairScore,
    over_wordings,
    ridge_paths,
    score_maps,
    with_numbers,
)
from lincorr_lightning.linear_map.solver import AffineMap, FittedMaps
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.finder import logit_lens
from lincorr_lightning.lm.sharding_strategy import refuse_sharding
from lincorr_lightning.metrics import InstancewisePearson, JointMoments
from lincorr_lightning.probe import significance
from lincorr_lightning.probe.cost import describe_cost
from lincorr_lightning.probe.results import ProbeFindings, probe_results, subjects_table
from lincorr_lightning.results.results import Results
from lincorr_lightning.study import FIXED_TRAINING, LMStudy, require_one_pass

_MAX_KEPT = 2000  # held-out subjects whose logits are kept until the end, for standard errors
_LM = "lm"  # name of the LM itself among the views that are read; the others are layers
_HALVES: tuple[Half, Half] = ("fit", "test")


class LinearProbe(LMStudy):
    """How linearly kinds of knowledge are correlated in an LM, and how precise W is.

    ``fit`` reads the domain logits of every knowledge prompt for each subject of the fit half,
    accumulates their second moments, solves for (W, b) of every ordered pair at once, and scores
    them on the held-out half. ``validate`` and ``test`` score a stored fit, ``predict`` returns the
    predicted target logits. The LM is frozen and not part of the checkpoint.

    Every step takes a `SubjectBatch`, from `SubjectsDataModule` or any other DataLoader.

    Args:
        lm: The language model.
        knowledge: Kinds of knowledge, by name or family (``attribute``, ``math``, ``all``).
        pairs: Ordered pairs to fit, as ``city->country``; null fits every ordered pair.
        knowledge_files: YAML files with knowledge of your own, and relation files of LRE.
        paraphrases: Whether the paraphrases of each kind of knowledge are read, too. Scores are
            means over wordings, with their spread; the maps that are saved are of the first.
        ridge: Penalty on ``|W|^2``. 0 is the paper's map; ``auto`` takes, for each pair, the
            strongest one of `ridge_grid` that costs at most `ridge_tolerance` of held-out r, see
            `RidgeRequest`.
        ridge_grid: Ridge strengths of the path, increasing; null: 0, half decades from 0.1 to 1e6.
        ridge_tolerance: What ``ridge: auto`` may cost in mean label-wise r.
        require_reference: Pairs that must have a reference, for Hit@N; others may have one.
        control: Neutral prompt that replaces the source's as a null; null leaves it out.
        partial_out: Knowledge that is independent of the rest, as far as known: each pair's r is
            also reported with all that this knowledge predicts removed from both sides. It is read
            whether or not it is part of `knowledge`.
        subwords: Whether answers whose first token is only the beginning of a word (" Br" of
            Brunei) are labels, too; scores are then also reported by completeness (appendix K).
        permuted: Whether to fit each map a second time on permuted targets, as a null.
        random_labels: Number of source labels whose r is compared with that of as many random
            words. 0 leaves out random words, and the pairings that the vocabulary alone gives.
        layers: Layers, from 0, whose logit lens (final norm and head on the states after the
            layer) is probed, too, with the ridges of the last one. Each takes as long again.
        solver: ``closed_form``, or ``sgd`` for gradient descent over ``trainer.max_epochs``.
        learning_rate: Learning rate of ``sgd``, in units of 1 / the source's largest curvature.
        prefix: Text before each prompt, such as examples; with `lm.chat_template`, the user's turn.
        momentum: Momentum of ``sgd``.
        figure_labels: Labels in figures of W, such as ``[Paris, Tokyo]``, by text, answer or
            English name; [] takes well-known ones, or without any the highest weights.
        dry_run: Whether ``lincorr fit`` ends when it has shown the tokens that would be read, and
            about what time and memory that takes; an LM's weights are not needed.
    """

    study = "linear_probe"
    batch_type = SubjectBatch
    shards_lm = True
    step_setting = "data.batch_size"
    free_settings = frozenset({"figure_labels"})

    def __init__(
        self,
        lm: LMConfig = LMConfig(),
        knowledge: list[str] | str = ["city", "country"],  # noqa: B006
        pairs: list[str] | str | None = None,
        knowledge_files: list[str] = [],  # noqa: B006
        paraphrases: bool = False,
        ridge: Ridge = "auto",
        ridge_grid: list[float] | None = None,
        ridge_tolerance: float = 0.02,
        require_reference: list[str] = [],  # noqa: B006
        control: str | None = "One day, {} saw a",
        partial_out: list[str] = [],  # noqa: B006
        subwords: bool = False,
        permuted: bool = True,
        random_labels: int = 20,
        layers: list[int] = [],  # noqa: B006
        solver: Literal["closed_form", "sgd"] = "closed_form",
        learning_rate: float = 0.5,
        momentum: float = 0.9,
        prefix: str = "",
        figure_labels: list[str] = [],  # noqa: B006
        dry_run: bool = False,
    ) -> None:
        request = RidgeRequest(ridge, ridge_grid, ridge_tolerance)
        if request.is_auto and solver == "sgd":
            raise ConfigError("model.ridge auto needs model.solver closed_form; give sgd a number.")
        require("model.random_labels", random_labels, at_least=0)
        require("model.learning_rate", learning_rate, above=0)
        require("model.momentum", momentum, at_least=0, below=1)
        if control is not None and control.count("{}") != 1:
            raise ConfigError(f"model.control {control!r} must hold {{}} once, for the subject.")
        super().__init__(lm, prefix)
        for layer in layers:
            require("model.layers", layer, at_least=0, below=self.lm.n_layers)
        self.save_hyperparameters(ignore=["dry_run"])
        self.dry_run = dry_run
        self.ridge_request, self.partial_out = request, partial_out
        self.solver, self.learning_rate, self.momentum = solver, learning_rate, momentum
        self.refused_callbacks = FIXED_TRAINING if solver == "closed_form" else (WeightAveraging,)
        self.random_labels, self.layers = random_labels, list(dict.fromkeys(layers))
        self.automatic_optimization = False
        self.layout = build_layout(
            self.lm.tokenizer,
            Catalogue.load(*knowledge_files),
            split_names(knowledge),
            None if pairs is None else split_names(pairs),
            require_reference,
            control,
            partial_out,
            subwords,
            permuted,
            random_labels,
            paraphrases,
        )
        for label in figure_labels:
            if not any(domain.places([label]) for domain in self.layout.domains.values()):
                names = ", ".join(self.layout.domains)
                raise ConfigError(
                    f"model.figure_labels: {label!r} is no label of {names}. `lincorr audit` shows "
                    "the labels."
                )
        self.figure_labels = list(figure_labels)
        # Parameters, so that checkpoints hold the maps and DDP accepts the module.
        self.maps = self._new_maps(trainable=True)
        _, *nulls = self.layout.problems[self.layout.sources[0]]
        self.null_maps = nn.ModuleDict({null: self._new_maps() for null in nulls})
        views, size = (_LM, *map(str, layers)), (self.layout.n_columns, self.layout.blocks)
        self.moments = nn.ModuleDict(
            {half: nn.ModuleDict({v: JointMoments(*size) for v in views}) for half in _HALVES}
        )
        # A ridge is fitted on a part of the fit half, and chosen on the rest.
        size = self.layout.n_labels, self.layout.blocks[: len(self.layout.groups)]
        self.tuning = nn.ModuleList(JointMoments(*size) for _ in range(2 if request.is_auto else 0))
        self.instancewise = nn.ModuleList(
            InstancewisePearson([self.layout.sizes[target] for target in self.layout.targets[s]])
            for s in self.layout.sources
        )
        self.fitted_with: Ridge = ridge
        """The ridge that was asked for where the maps were fitted; a checkpoint has its own."""
        strength = ridge if isinstance(ridge, (int, float)) else 0.0
        self.ridges = dict.fromkeys(self.layout.pairs, float(strength))
        self.n_fit = 0
        self.fit_subjects: list[str] = []
        self._findings: ProbeFindings | None = None
        self._fit: FittedMaps | None = None
        self._batches: dict[Half, list[SubjectBatch]] = {"fit": [], "test": []}
        self._kept: dict[str, list[Tensor]] = {}  # by view

    def _new_maps(self, trainable: bool = False) -> nn.ModuleDict:
        maps = nn.ModuleDict()
        for s in self.layout.sources:
            # Attributes, such as `type`, are no keys; a kind of knowledge has no space in its name.
            key = f"{s} " if hasattr(maps, s) else s
            n_targets = len(self.layout.target_columns(s))
            maps[key] = AffineMap(self.layout.sizes[s], n_targets, trainable)
        return maps

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return gradient descent on all maps, which the closed form steps without gradients."""
        groups: list[dict[str, Any]] = [
            {"params": [parameter], "source": source, "parameter": name}
            for source, module in _modules(self.maps)
            for name, parameter in module.named_parameters()
        ]
        return torch.optim.SGD(groups, lr=self.learning_rate, momentum=self.momentum)

    def setup(self, stage: str) -> None:
        """Check the run, and log how much memory the statistics will take."""
        if self.dry_run:
            raise ConfigError("model.dry_run is an option of `lincorr fit` alone. Leave it out.")
        super().setup(stage)
        self._findings = None
        if self.solver == "sgd":
            refuse_sharding(self.trainer, "model.solver sgd")
        elif stage == "fit":
            require_one_pass(self.trainer)
        n = sum(one.products.numel() for one in self.modules() if isinstance(one, JointMoments))
        rank_zero_info(
            f"{len(self.layout.domains)} prompts, {len(self.layout.pairs)} pairs of them, "
            f"{self.layout.n_labels} labels; statistics of {n * 8 / 2**30:.2f} GiB"
        )

    def describe_cost(self, trainer: L.Trainer, data: SubjectsDataModule) -> str:
        """Return in some lines what a fit will take; nothing is read, and no weights are loaded."""
        data.setup("fit")
        epochs = 1 if self.solver == "closed_form" else trainer.max_epochs or 1
        n_read = sum(map(len, data.halves.values())) * (1 + len(self.layers)) * epochs
        scatters = [one.products for one in self.modules() if isinstance(one, JointMoments)]
        return describe_cost(
            self.lm,
            self.layout,
            scatters,
            data.halves["fit"][: data.batch_size],
            n_read,
            trainer.strategy.root_device,
            trainer.world_size,
        )

    def joint_rows(self, subjects: Sequence[str]) -> Tensor:
        """Return the joint rows of `layout` as they are read, ``(n_subjects, n_read)``."""
        return domain_rows(self.lm, self.layout.reads, subjects)

    def _gather_subjects(self, half: Half) -> list[str]:
        """Return the subjects that all ranks read, in order; all ranks must call it."""
        batches = sorted(chain(*gather(self._batches[half])), key=lambda batch: batch.first)
        return [subject for batch in batches for subject in batch.subjects]

    def forward(self, rows: Tensor) -> dict[Pair, Tensor]:
        """Return the predicted target logits of every pair, from joint rows."""
        return {
            (source, target): prediction
            for source, x, _, module in self._by_source(rows)
            for target, prediction in solving.split_targets(self.layout, source, module(x))
        }

    def _by_source(self, rows: Tensor) -> Iterable[tuple[str, Tensor, Tensor, AffineMap]]:
        """Yield each source with its logits, the logits of all its targets, and its map."""
        for source, module in _modules(self.maps):
            x = rows[:, self.layout.columns(source).to(rows.device)]
            y = rows[:, self.layout.target_columns(source).to(rows.device)]
            yield source, x, y, module

    def on_train_epoch_start(self) -> None:
        self._batches["fit"].clear()
        for moments in (*self._moments_of("fit").values(), *self.tuning):
            cast(JointMoments, moments).reset()

    def _moments_of(self, half: Half) -> dict[str, JointMoments]:
        """Return the moments of the LM itself, and of the logit lens of each layer."""
        return dict(cast(nn.ModuleDict, self.moments[half]).items())  # type: ignore[arg-type]

    def _read(self, batch: SubjectBatch, half: Half) -> Tensor:
        """Add a batch to the moments of all views, and return the rows of the LM itself."""
        rows: dict[str, Tensor] = {}
        for view, moments in self._moments_of(half).items():
            if view != _LM and half == "test" and not self._moments_of("fit")[view].n:
                continue  # stored maps are none of a layer
            with nullcontext() if view == _LM else logit_lens(self.lm.model, int(view)):
                rows[view] = used = self.joint_rows(batch.subjects)
            if batch.is_padding:
                continue
            if half == "test":
                kept = self._kept.setdefault(view, [])
                room = _MAX_KEPT // data_shard(self.trainer).n - sum(map(len, kept))
                if room > 0:
                    kept.append(used[:room, : self.layout.n_kept].float().cpu())
            elif view == _LM and self.ridge_request.is_auto:
                split = split_rows(used, batch.first)
                parts = [self.layout.with_permuted(part) for part in split]
                for one, part in zip(self.tuning, parts, strict=True):
                    cast(JointMoments, one).update(part[:, : self.layout.n_labels])
                moments.update(torch.cat(parts))
                continue
            moments.update(self.layout.with_permuted(used))
        if not batch.is_padding:
            self._batches[half].append(batch)
        return rows[_LM]

    def _gather_kept(self, view: str) -> Tensor:
        """Return the kept rows of all ranks, ``(n, n_kept)``; all ranks must call it."""
        none = torch.zeros(0, self.layout.n_kept)
        return torch.cat([none, *chain(*gather(self._kept.pop(view, [])))])

    def training_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        """Add a batch to the moments, and solve after the last one.

        Validation begins before `on_train_epoch_end` and needs the solution.
        """
        rows = self._read(batch, "fit")
        if self.solver == "sgd":
            self._descend(rows, batch)
        if self.trainer.is_last_batch:
            self._solve()

    def _solve(self) -> None:
        tuning = (cast(JointMoments, one).gather() for one in self.tuning)
        moments = FitMoments(self._moments_of("fit")[_LM].gather(), *tuning)
        self._fit = fit_maps(moments, self.layout, self.ridge_request)
        self.ridges = dict(self._fit.ridges)
        self.fitted_with = self.ridge_request.ridge
        self.n_fit = self._fit.n
        self._warn_of_few_subjects()
        # Gradient descent has also seen those of earlier epochs, which a resumed run may lack.
        before = self.fit_subjects if self.solver == "sgd" else []
        self.fit_subjects = list(dict.fromkeys([*before, *self._gather_subjects("fit")]))
        if self.solver == "closed_form":
            for source, module in _modules(self.maps):
                module.assign(self._fit.maps["y"][source])
            # Without gradients it changes nothing, but `ModelCheckpoint` saves from the first on.
            cast(LightningOptimizer, self.optimizers()).step()
        for null, maps in self.null_maps.items():
            for source, module in _modules(maps):
                module.assign(self._fit.maps[null][source])

    def _warn_of_few_subjects(self) -> None:
        plain = {stem(source) for (source, _), ridge in self.ridges.items() if ridge == 0}
        n_labels, source = max(((self.layout.sizes[s], s) for s in plain), default=(0, ""))
        if n_labels >= self.n_fit:
            rank_zero_warn(
                f"the maps are fitted on {self.n_fit:,} subjects, but {source} has {n_labels:,} "
                "labels: without a ridge they fit these subjects exactly, and do not generalize "
                "to others. Raise data.n_subjects, or set model.ridge to auto."
            )

    def _descend(self, rows: Tensor, batch: SubjectBatch) -> None:
        """Take a step of gradient descent, that of one rank with the subjects of all ranks."""
        optimizer = cast(LightningOptimizer, self.optimizers())
        if self.global_step == 0:
            self._prepare_descent(optimizer.param_groups)
        n_own = torch.tensor(0.0 if batch.is_padding else len(rows), dtype=torch.float64)
        n = self.trainer.strategy.reduce(n_own.to(rows.device, copy=True), reduce_op="sum")
        # DDP averages gradients over ranks; the mean is to be one over subjects.
        scale = self.trainer.world_size * float(n_own) / float(n)
        # The closed form's penalty counts once per fit, not once per step.
        ridge = float(self.ridge_request.ridge) / (self.trainer.num_training_batches * float(n))
        loss = rows.new_zeros(())
        for _, x, y, module in self._by_source(rows):
            error = 0.5 * (module(x) - y).square().sum(1).mean()
            loss = loss + error * scale + 0.5 * ridge * module.weight.square().sum()
        optimizer.zero_grad()
        self.manual_backward(loss)
        # Along a half cosine to zero, so that batch noise dies out.
        done = self.global_step / self.trainer.estimated_stepping_batches
        for group in optimizer.param_groups:
            group["lr"] = group["top_lr"] * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        optimizer.step()
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(rows), sync_dist=True)

    def _prepare_descent(self, groups: Iterable[dict[str, Any]]) -> None:
        """Center maps, and set learning rates, by the subjects of the first step.

        Rates are in units of the inverse of the largest curvature, the largest eigenvalue of the
        source's covariance: below 1 they converge, and one setting suits every LM.
        """
        step = self._moments_of("fit")[_LM].gather()
        curvature = {}
        for source, module in _modules(self.maps):
            x = self.layout.columns(source).to(step.mean.device)
            module.center.copy_(step.mean[x])
            largest = torch.linalg.matrix_norm(step.between(x, x) / step.n, ord=2)
            curvature[source] = max(largest.item(), torch.finfo(torch.float64).tiny)
        # With momentum m a step goes 1 / (1 - m) times as far.
        unit = self.learning_rate * (1 - self.momentum)
        for group in groups:
            is_weight = group["parameter"] == "weight"
            group["top_lr"] = unit / (curvature[group["source"]] if is_weight else 1.0)

    def _check_fitted(self) -> None:
        doing = self.trainer.state.fn
        if not self.n_fit and doing is not None and doing != "fit":
            raise ConfigError(
                f"there is no map to {doing.value} yet. Pass the checkpoint of a `lincorr fit` "
                "with --ckpt_path."
            )

    def on_validation_epoch_start(self) -> None:
        self._check_fitted()
        for metric in (*self._moments_of("test").values(), *self.instancewise):
            cast(JointMoments | InstancewisePearson, metric).reset()
        self._batches["test"].clear()
        self._kept.clear()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            return  # there are no maps yet
        require_held_out(batch.subjects, self.fit_subjects)
        rows = self._read(batch, "test")
        for i, (_, x, y, module) in enumerate(() if batch.is_padding else self._by_source(rows)):
            cast(InstancewisePearson, self.instancewise[i]).update(module(x), y)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        test, fitted = self._moments_of("test")[_LM].gather(), self._fitted_maps()
        self._fit = None  # its solvers and moments take memory
        if (test.high - test.low).max() <= 1e-5 * test.high.abs().max():  # rounding
            raise LanguageModelError(
                f"{self.lm.config.name_or_path} has the same logits after every subject: it does "
                "not read its prompts. Its config.json or weights are wrong; copy them again."
            )
        wordings, label_counts = self._score(fitted, test)
        paths = ridge_paths(fitted, test, self.ridge_request.strengths)
        scores = [*over_wordings({score.pair: score for score in wordings}).values()]
        scores = with_numbers(scores, significance.p_values(scores))
        known = [score.label_mean for score in scores if score.label_mean is not None]
        mean = sum(known) / len(known) if known else math.nan
        phase = "test" if self.trainer.testing else "val"
        self.log(f"{phase}/label_mean", mean, prog_bar=True)
        self._findings = ProbeFindings(
            phase=phase,
            scores=scores,
            wordings=wordings,
            weights={pair: w.cpu().clone().numpy() for pair, w in fitted.weights().items()},
            layout=self.layout,
            paths=over_wordings(paths),
            compositions=significance.compose_maps(wordings, fitted, test),
            label_counts=[one for one in label_counts if one.pair == stem(one.pair)],
            layers=self._score_layers(),
            subjects={"fit": self.fit_subjects, "test": self._gather_subjects("test")},
            n_fit=self.n_fit,
            n_test=int(test.n),
            figure_labels=self.figure_labels,
        )

    on_test_epoch_end = on_validation_epoch_end

    def _score(self, fitted: FittedMaps, test: Moments) -> tuple[list[PairScore], list[LabelCount]]:
        layout, instance = self.layout, dict[Pair, float]()
        for source, metric in zip(layout.sources, self.instancewise, strict=True):
            # torchmetrics squeezes the result of a source with a single target
            means = cast(InstancewisePearson, metric).compute().reshape(-1).tolist()
            targets = layout.targets[source]
            instance |= {(source, t): r for t, r in zip(targets, means, strict=True)}
        scores = score_maps(fitted, test, instance)
        kept = self._gather_kept(_LM)
        scores = with_numbers(scores, significance.standard_errors(fitted, test, kept))
        scores = with_numbers(scores, significance.partial_correlations(scores, fitted, test))
        return beside_baselines(scores, fitted, test, self.lm, self.random_labels, rows=kept)

    def _score_layers(self) -> dict[int, list[PairScore]]:
        """Return the scores of each layer's logit lens; none where stored maps are scored."""
        scores: dict[int, list[PairScore]] = {}
        for layer in self.layers:
            fit, test = (self._moments_of(half)[str(layer)].gather() for half in _HALVES)
            if fit.n > 0:
                fitted = solving.fit_layout(fit, self.layout, self.ridges)
                own, kept = score_maps(fitted, test), self._gather_kept(str(layer))
                own, _ = beside_baselines(own, fitted, test, self.lm, self.random_labels, rows=kept)
                scores[layer] = [*over_wordings({score.pair: score for score in own}).values()]
        return scores

    def _fitted_maps(self) -> FittedMaps:
        """Return the maps as plain tensors, with the moments of this run's fit if it had one."""
        every = {"y": self.maps, **dict(self.null_maps.items())}
        maps = {name: {s: m.solution for s, m in _modules(ones)} for name, ones in every.items()}
        if self._fit is not None:
            return replace(self._fit, maps=maps)
        return FittedMaps(self.layout, self.ridges, maps, self.n_fit)

    def on_predict_start(self) -> None:
        self._check_fitted()

    def predict_step(self, batch: SubjectBatch, batch_idx: int) -> dict[str, Any]:
        """Return predicted ``logits`` of each pair, ``(n_subjects, n_target)``, and its ``labels``.

        The ``subjects`` stand beside them; ``first`` is the position of the first one.
        """
        subjects = [] if batch.is_padding else batch.subjects
        logits = self(self.joint_rows(batch.subjects))
        logits = {pair: logits[pair] for pair in wordings_of(logits)}
        return {
            "subjects": subjects,
            "first": batch.first,
            "logits": {f"{s}->{t}": y[: len(subjects)].cpu() for (s, t), y in logits.items()},
            "labels": {f"{s}->{t}": self.layout.domains[t].texts for s, t in logits},
        }

    def linear_map(self) -> LinearMap:
        """Return the fitted maps as an artifact of their own."""
        return LinearMap.of(self._fitted_maps(), self.lm)

    def build_results(self) -> Results | None:
        """Return scores, tables and figures; None if nothing was scored."""
        if self._findings is None:
            return None
        lm = self.lm.config.name_or_path
        return probe_results(self._findings, lm, self.fitted_with, self.partial_out)

    def write_artifacts(self, folder: Path) -> None:
        """Write the maps, which are what took the time."""
        if self.trainer.state.fn == "predict":
            return
        self.linear_map().save(folder / "linear_map")
        if self._findings is None:
            rank_zero_warn(f"nothing was scored, so {folder} holds the maps alone")
            table = subjects_table({"fit": self.fit_subjects})
            Results(self.study, tables=[table]).write_parts(folder)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what the maps were fitted on."""
        return {
            "fitted_on": self._fitted_on(),
            "ridge": self.fitted_with,
            "fit_subjects": self.fit_subjects,
            "ridges": {f"{s}->{t}": ridge for (s, t), ridge in self.ridges.items()},
            "n_fit": self.n_fit,
        }

    def _fitted_on(self) -> dict[str, tuple[str | None, list[int]]]:
        """Return each prompt, the control included, and the labels that are read after it."""
        domains = self.layout.domains
        own = {name: (d.knowledge.template, d.token_ids) for name, d in domains.items()}
        return {**own, "control": (self.layout.control, [])}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to resume a fit from the middle of an epoch or after its end."""
        super().on_load_checkpoint(checkpoint)
        if self._trainer is None or not self.trainer.training:
            return
        progress, max_epochs = checkpoint["loops"]["fit_loop"], self.trainer.max_epochs or -1
        epochs = progress["epoch_progress"]["current"]
        is_whole = progress["epoch_loop.batch_progress"]["is_last_batch"]
        if epochs["started"] > epochs["processed"] and not is_whole:
            raise CheckpointError(
                "the checkpoint is from the middle of an epoch, and has no statistics of the "
                "subjects read so far. Resume from the end of an epoch, or start a new run."
            )
        if 0 < max_epochs <= epochs["started"]:
            raise CheckpointError(
                f"the checkpoint has all {max_epochs} epochs of trainer.max_epochs. Score its maps "
                "with `lincorr validate`, or raise trainer.max_epochs."
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Read what the maps were fitted on."""
        own = {f"{s}->{t}" for s, t in self.layout.pairs}
        if set(state["ridges"]) != own:
            raise CheckpointError(
                f"the checkpoint fits {sorted(state['ridges'])}, this run {sorted(own)}. "
                "Set the same model.knowledge and model.pairs, or fit again."
            )
        for name, now in self._fitted_on().items():
            if (then := state["fitted_on"][name]) != now:
                raise CheckpointError(
                    f"the checkpoint was fitted with the {name} prompt {then[0]!r} or on other "
                    f"labels, this run has {now[0]!r}. Use the settings of the run that wrote it "
                    "(its config.yaml), or fit again."
                )
        # Only a fit sets these.
        self.fitted_with = state["ridge"]
        if self.fitted_with != self.ridge_request.ridge:
            rank_zero_info(
                f"The maps of the checkpoint were fitted with model.ridge {self.fitted_with}; "
                f"model.ridge {self.ridge_request.ridge} changes nothing here."
            )
        self.fit_subjects = state["fit_subjects"]
        self.ridges = {(s, t): state["ridges"][f"{s}->{t}"] for s, t in self.layout.pairs}
        self.n_fit = state["n_fit"]


def _modules(maps: nn.Module) -> Iterator[tuple[str, AffineMap]]:
    for key, module in cast(nn.ModuleDict, maps).items():
        yield key.rstrip(), cast(AffineMap, module)
