"""The linear probe: fit and score ``F_target(X) = W F_source(X) + b`` (paper section 3.2)."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lincorr_lightning.data.subjects import Half, SubjectBatch
from lincorr_lightning.distributed import data_shard, gather
from lincorr_lightning.errors import CheckpointError, ConfigError, LanguageModelError, require
from lincorr_lightning.functional import HALF_DECADES, Moments
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.knowledge.catalogue import split_names
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.baselines import beside_baselines
from lincorr_lightning.linear_map.fitting import Ridge, check_ridge, require_held_out
from lincorr_lightning.linear_map.layout import Pair, build_layout, domain_rows, stem, wordings_of
from lincorr_lightning.linear_map.scores import over_wordings, ridge_paths, score_maps, with_numbers
from lincorr_lightning.linear_map.solver import FittedMaps, Solution, split_targets
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_data
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.metrics import JointMoments
from lincorr_lightning.probe import significance
from lincorr_lightning.probe.accumulation import ProbeSums
from lincorr_lightning.probe.results import ProbeFindings, probe_results, subjects_table
from lincorr_lightning.results.results import Results
from lincorr_lightning.study import FIXED_TRAINING, LMStudy, require_one_epoch, takes_live_lm


class LinearProbe(LMStudy):
    """How linearly kinds of knowledge are correlated in an LM, and how precise W is.

    ``fit`` reads the domain logits of every knowledge prompt for each subject of the fit half,
    accumulates their second moments, solves for (W, b) of every ordered pair at once, and scores
    them on the held-out half. ``validate`` and ``test`` score a stored fit, ``predict`` returns the
    predicted target logits. The LM is frozen and not part of the checkpoint.

    Every step takes a `SubjectBatch`, from `SubjectsDataModule` or any other DataLoader.

    Args:
        lm: The language model: its settings or name, a `LanguageModel`, or a module in memory with
            its `tokenizer`, which stays where it is and is not part of this module.
        knowledge: Kinds of knowledge, by name or family (``attribute``, ``math``, ``all``).
        pairs: Ordered pairs to fit, as ``city->country``; null fits every ordered pair.
        knowledge_files: YAML files with knowledge of your own, and relation files of LRE.
        paraphrases: Whether the paraphrases of each kind of knowledge are read, too. Scores are
            means over wordings, with their spread; the maps that are saved are of the first.
        ridge: Penalty on ``|W|^2``. 0 is the paper's map; ``auto`` takes, for each pair, the
            strongest one that costs at most .02 of r, see `Ridge`.
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
        prefix: Text before each prompt, such as examples; with `lm.chat_template`, the user's turn.
    """

    study = "linear_probe"
    batch_type = SubjectBatch
    shards_lm = True
    step_setting = "data.batch_size"
    refused_callbacks = FIXED_TRAINING

    @takes_live_lm
    def __init__(
        self,
        lm: LMConfig = LMConfig(),
        knowledge: list[str] | str = ["city", "country"],  # noqa: B006
        pairs: list[str] | str | None = None,
        knowledge_files: list[str] = [],  # noqa: B006
        paraphrases: bool = False,
        ridge: Ridge = "auto",
        require_reference: list[str] = [],  # noqa: B006
        control: str | None = "One day, {} saw a",
        partial_out: list[str] = [],  # noqa: B006
        subwords: bool = False,
        permuted: bool = True,
        random_labels: int = 20,
        prefix: str = "",
    ) -> None:
        check_ridge(ridge)
        require("model.random_labels", random_labels, at_least=0)
        if control is not None and control.count("{}") != 1:
            raise ConfigError(f"model.control {control!r} must hold {{}} once, for the subject.")
        super().__init__(lm, prefix)
        self.save_hyperparameters()
        self.ridge = ridge
        self.random_labels = random_labels
        self.layout = build_layout(
            self.lm.tokenizer,
            Catalogue.load(*knowledge_files),
            knowledge=split_names(knowledge),
            pairs=None if pairs is None else split_names(pairs),
            require_reference=require_reference,
            control=control,
            partial_out=partial_out,
            subwords=subwords,
            permuted=permuted,
            n_random=random_labels,
            wordings="paraphrases" if paraphrases else "templates",
        )
        self.sums = ProbeSums(self.layout, chooses_ridges=ridge == "auto")
        # DDP needs a parameter, and `ModelCheckpoint` a step of its optimizer.
        self.placeholder = nn.Parameter(torch.zeros(()))
        self.automatic_optimization = False
        self.fitted: FittedMaps | None = None  #: The maps; None before a fit.
        self.fitted_with: Ridge = ridge
        """The ridge that was asked for where the maps were fitted; a checkpoint has its own."""
        self.fit_subjects: list[str] = []
        self._findings: ProbeFindings | None = None
        self._batches: dict[Half, list[SubjectBatch]] = {"fit": [], "test": []}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer, although least squares need none."""
        return torch.optim.SGD([self.placeholder], lr=0.0)

    def setup(self, stage: str) -> None:
        """Check the run, and log how much memory the statistics will take."""
        super().setup(stage)
        self._findings = None
        if stage == "fit":
            require_one_epoch(self.trainer, "data.n_subjects")
        n = sum(one.n_entries for one in self.modules() if isinstance(one, JointMoments))
        rank_zero_info(
            f"{len(self.layout.domains)} prompts, {len(self.layout.pairs)} pairs of them, "
            f"{self.layout.n_labels} labels; statistics of {n * 8 / 2**30:.2f} GiB"
        )

    def joint_rows(self, subjects: Sequence[str], half: Half = "test") -> Tensor:
        """Return joint rows as they are read of the half, ``(n_subjects, n_read or n_kept)``."""
        return domain_rows(self.lm, self.layout.reads_of(half), subjects).to(self.device)

    def forward(self, rows: Tensor) -> dict[Pair, Tensor]:
        """Return the predicted target logits of every pair, from joint rows."""
        assert self.fitted is not None
        return {
            (source, target): logits
            for source, predicted, _ in self.fitted.to(rows.device).predictions(rows)
            for target, logits in split_targets(self.layout, source, predicted)
        }

    def _gather_subjects(self, half: Half) -> list[str]:
        """Return the subjects that all ranks read, in order; all ranks must call it."""
        batches = sorted(chain(*gather(self._batches[half])), key=lambda batch: batch.first)
        return [subject for batch in batches for subject in batch.subjects]

    def on_train_epoch_start(self) -> None:
        self._batches["fit"].clear()
        self.sums.reset("fit")

    def training_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        """Add a batch to the moments, and solve after the last one.

        Validation begins before `on_train_epoch_end` and needs the solution.
        """
        rows = self.joint_rows(batch.subjects, "fit")
        if not batch.is_padding:
            self._batches["fit"].append(batch)
            self.sums.add("fit", rows, batch.first)
        del rows  # which takes memory
        if self.trainer.is_last_batch:
            self.fitted = self.sums.fit_maps(self.ridge)
            self.fitted_with = self.ridge
            self.fit_subjects = self._gather_subjects("fit")
            warn_of_few_subjects(self.fitted)
            cast(LightningOptimizer, self.optimizers()).step()

    def _check_fitted(self) -> None:
        doing = self.trainer.state.fn
        if self.fitted is None and doing is not None and doing != "fit":
            raise ConfigError(
                f"there is no map to {doing.value} yet. Pass the checkpoint of a `lincorr fit` "
                "with --ckpt_path."
            )

    def on_validation_epoch_start(self) -> None:
        self._check_fitted()
        self.sums.reset("test")
        self._batches["test"].clear()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: SubjectBatch, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            return  # there are no maps yet
        require_held_out(batch.subjects, self.fit_subjects)
        rows = self.joint_rows(batch.subjects)
        if batch.is_padding:
            return
        self._batches["test"].append(batch)
        assert self.fitted is not None
        self.sums.add_test(rows, batch.first, self.fitted, data_shard(self.trainer).n)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        assert self.fitted is not None
        test, fitted = self.sums.test.gather(), self.fitted.to(self.device)
        phase = "test" if self.trainer.testing else "val"
        subjects = {"fit": self.fit_subjects, "test": self._gather_subjects("test")}
        instance, kept = self.sums.instance_r(), self.sums.take_kept(of_all_ranks=True)
        self.sums.reset("test")
        self._findings = score_probe(
            fitted, test, instance, kept, self.lm, self.random_labels, subjects, phase
        )
        del test  # moments take memory
        self.fitted = fitted.without_moments()
        scores = self._findings.scores
        known = [r for score in scores if (r := score["label_mean"]) is not None]
        mean = sum(known) / len(known) if known else math.nan
        self.log(f"{phase}/label_mean", mean, prog_bar=True, logger=False)

    on_test_epoch_end = on_validation_epoch_end

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

    def build_results(self) -> Results | None:
        """Return scores, tables and figures; None if nothing was scored."""
        if self._findings is None:
            return None
        return probe_results(self._findings, self.lm.config.name_or_path, self.fitted_with)

    def write_artifacts(self, folder: Path) -> None:
        """Write the maps, which are what took the time."""
        if self.trainer.state.fn == "predict":
            return
        assert self.fitted is not None
        scores = () if self._findings is None else self._findings.scores
        nearest = {score.ends: score.nearness for score in scores}
        LinearMap.of(self.fitted, self.lm, nearest).save(folder / "linear_map")
        if self._findings is None:
            rank_zero_warn(f"nothing was scored, so {folder} holds the maps alone")
            table = subjects_table({"fit": self.fit_subjects})
            Results(self.study, tables=[table]).write_parts(folder)

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the maps, and what they were fitted on."""
        state: dict[str, Any] = {
            "fitted_on": self._fitted_on(),
            "ridge": self.fitted_with,
            "fit_subjects": self.fit_subjects,
            "fitted": None,
        }
        if self.fitted is not None:
            maps = self.fitted.without_moments().to(torch.device("cpu")).maps
            state["fitted"] = {
                "n": self.fitted.n,
                "ridges": [self.fitted.ridges[pair] for pair in self.layout.pairs],
                "maps": {
                    problem: {source: list(solution) for source, solution in by_source.items()}
                    for problem, by_source in maps.items()
                },
            }
        return state

    def _fitted_on(self) -> dict[str, Any]:
        """Return the pairs, their prompts and labels: settings that a stored map holds for."""
        settings: dict[str, Any] = {
            "pairs": [f"{source}->{target}" for source, target in self.layout.pairs],
            "control": self.layout.control,
        }
        for name, domain in self.layout.domains.items():
            settings[f"{name} prompt"] = domain.knowledge.template
            settings[f"{name} labels"] = fingerprint_data(domain.token_ids)
        return settings

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to resume a fit, which is one pass over the subjects."""
        super().on_load_checkpoint(checkpoint)
        if self._trainer is not None and self.trainer.training:
            raise CheckpointError(
                "the fit of a probe is one pass over its subjects, which is not resumed. Score the "
                "checkpoint's maps with `lincorr validate`, or start a new run without --ckpt_path."
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the maps of a checkpoint."""
        now = self._fitted_on()
        for name, then in state["fitted_on"].items():
            if now.get(name, then) != then:
                raise CheckpointError(
                    f"the checkpoint was fitted with the {name} {then!r}, this run has "
                    f"{now[name]!r}. Set the same model.knowledge, model.pairs and prompts, as in "
                    "the config.yaml of the run that wrote it, or fit again."
                )
        self.fitted_with, self.fit_subjects = state["ridge"], state["fit_subjects"]
        if self.fitted_with != self.ridge:
            rank_zero_info(
                f"The maps of the checkpoint were fitted with model.ridge {self.fitted_with}; "
                f"model.ridge {self.ridge} changes nothing here."
            )
        if (fitted := state["fitted"]) is not None:
            maps = {
                problem: {source: Solution(*parts) for source, parts in by_source.items()}
                for problem, by_source in fitted["maps"].items()
            }
            ridges = dict(zip(self.layout.pairs, fitted["ridges"], strict=True))
            self.fitted = FittedMaps(self.layout, ridges, maps, fitted["n"])


def score_probe(
    fitted: FittedMaps,
    test: Moments,
    instance: Mapping[Pair, float],
    kept: Tensor,
    lm: LanguageModel,
    random_labels: int,
    subjects: Mapping[Any, Sequence[str]],
    phase: str = "val",
) -> ProbeFindings:
    """Score maps on held-out subjects.

    `fitted` are on the device of `test`, the moments of all held-out rows; `kept` are some of them
    as they are read, ``(n, n_kept)``, and `instance` is the instance-wise r.
    """
    if (test.high - test.low).max() <= 1e-5 * test.high.abs().max():  # rounding
        raise LanguageModelError(
            f"{lm.config.name_or_path} has the same logits after every subject: it does not read "
            "its prompts. Its config.json or weights are wrong; copy them again."
        )
    layout = fitted.layout
    kept = kept.to(test.mean.device)  # once, not for every map
    scores = score_maps(fitted, test, instance)
    scores = with_numbers(scores, significance.standard_errors(fitted, test, kept))
    scores = with_numbers(scores, significance.partial_correlations(scores, fitted, test))
    wordings = beside_baselines(scores, fitted, test, lm, random_labels, rows=kept)
    scores = over_wordings({score.ends: score for score in wordings})
    return ProbeFindings(
        phase=phase,
        scores=with_numbers(scores, significance.adjusted_p_values(scores)),
        wordings=wordings,
        weights={pair: w.cpu().numpy() for pair, w in fitted.weights().items()},
        layout=layout,
        path=ridge_paths(fitted, test, HALF_DECADES),
        subjects=subjects,
        n_fit=fitted.n,
        n_test=int(test.n),
    )


def warn_of_few_subjects(fitted: FittedMaps) -> None:
    """Warn if maps without a ridge have as many source labels as subjects, or more."""
    sizes = fitted.layout.sizes
    plain = {stem(source) for (source, _), ridge in fitted.ridges.items() if ridge == 0}
    n_labels, source = max(((sizes[s], s) for s in plain), default=(0, ""))
    if n_labels >= fitted.n:
        rank_zero_warn(
            f"the maps are fitted on {fitted.n:,} subjects, but {source} has {n_labels:,} labels: "
            "without a ridge they fit these subjects exactly, and do not generalize to others. "
            "Raise data.n_subjects, or set model.ridge to auto."
        )
