"""Where do features come from, what depends on them, and what do they have to do with a tie?"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict

import torch
from torch import nn

from lincorr_lightning.data.texts import TextsDataModule, TokenRows
from lincorr_lightning.errors import ConfigError, DomainError, SparseAutoencoderError
from lincorr_lightning.flow.default_saes import train_saes
from lincorr_lightning.flow.graph import Feature, FlowGraph
from lincorr_lightning.flow.matcher import DecoderMatcher, check_thresholds
from lincorr_lightning.flow.measurements import (
    SteeredAnswer,
    TextPass,
    measure_cuts,
    measure_steering,
    measure_transitions,
    name_features,
)
from lincorr_lightning.flow.relation_flow import (
    LEAST_AUROC,
    RelationMeasurement,
    chosen_starts,
    measure_relation,
)
from lincorr_lightning.flow.results import DrawnFlow, FeatureFlowReport
from lincorr_lightning.flow.settings import DeactivationSettings, SteeringSettings
from lincorr_lightning.frozen_lm import FrozenLMModule
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings
from lincorr_lightning.results.run_folder import is_dry_run, run_folder
from lincorr_lightning.sae import HookKind, HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, width_of
from lincorr_lightning.sae.loading import load_folder, parse_feature
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from lincorr_lightning.sae.stacked import SAESettings

_log = logging.getLogger(__name__)

_N_DRAWN = 3
_MOST_FEATURES = 250  # of a flow graph, before it is said that there are many


class FeatureFlow(FrozenLMModule):
    """Follows the features of sparse autoencoders through an LM, cuts them and steers with them.

    On texts it counts where features come from (groups), tests by deactivation whether they do,
    and carries features from place to place by transition matrices. Of a relation it finds the
    features that carry its answers, follows them back to see whether they meet, cuts what they
    share, and steers towards some of the answers. ("Analyze Feature Flow ...", Laptev et al., 2025,
    arXiv 2502.03032.)

    Args:
        lm: The LM.
        saes: Folder that holds a folder for each SAE, in any known format, such as
            ``sparse_autoencoders/`` of a run of `SparseAutoencoders`; or the SAEs' folders. Null
            trains some first, on texts that are not read afterwards.
        training_tokens: Tokens that these are trained on.
        sae: How these are built.
        relation: Whose answers' features are looked for, as ``city->country``; null leaves it and
            steering out.
        features: Features whose flow is drawn, as ``residual.1.37``; null takes those that carry
            some of the relation's answers.
        thresholds: Least cosine of an edge of a flow graph: one, or by kind of its source.
        k: Predecessors looked at in each place for flow graphs, the most similar first. Above 1 a
            graph of many layers may hold most features there are; steering takes 1 in any case.
        n_subjects: Subjects X that the relation is measured on, as far as the vocabulary has so many.
        deactivation: How predecessors are cut.
        steering: How the LM is steered.
        knowledge_files: YAML files with knowledge of your own.
        seed: Of everything that is drawn.

    Raises:
        SparseAutoencoderError: An SAE cannot be read, or does not fit the LM; a feature that is not
            there.
        LanguageModelError: The LM cannot be read.
        ConfigError: Settings that contradict each other.
        DomainError: The LM's vocabulary lacks the relation's words.
    """

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        saes: str | list[str] | None = None,
        training_tokens: int = 500_000,
        sae: SAESettings = SAESettings(n_features=1024),  # noqa: B008 (frozen)
        relation: str | None = "city->country",
        features: list[str] | None = None,
        thresholds: dict[str, float] | float = 0.25,
        k: int = 1,
        n_subjects: int = 2000,
        deactivation: DeactivationSettings = DeactivationSettings(),  # noqa: B008 (frozen)
        steering: SteeringSettings = SteeringSettings(),  # noqa: B008 (frozen)
        knowledge_files: list[str] = [],  # noqa: B006 (never changed)
        seed: int = 0,
    ) -> None:
        lm = LMConfig(**lm) if isinstance(lm, Mapping) else lm
        sae = SAESettings(**sae) if isinstance(sae, Mapping) else sae
        if isinstance(deactivation, Mapping):
            deactivation = DeactivationSettings(**deactivation)
        steering = SteeringSettings(**steering) if isinstance(steering, Mapping) else steering
        for name, value, least in (("k", k, 1), ("n_subjects", n_subjects, 20)):
            if value < least:
                raise ConfigError(f"model.{name} is {value}; it must be at least {least}.")
        try:
            check_thresholds(thresholds)  # type: ignore[arg-type]
        except SparseAutoencoderError as error:
            raise ConfigError(f"model.thresholds is {thresholds}: {error}") from None
        super().__init__(lm)
        self.save_hyperparameters(
            {
                "lm": asdict(lm), "saes": saes, "training_tokens": training_tokens,
                "sae": asdict(sae),
                "relation": relation, "features": features, "thresholds": thresholds, "k": k,
                "n_subjects": n_subjects, "deactivation": asdict(deactivation),
                "steering": asdict(steering),
                "knowledge_files": knowledge_files, "seed": seed,
            },
            logger=False,
        )  # fmt: skip
        self.sae = sae
        self.deactivation = deactivation
        self.steering = steering
        self.thresholds: Mapping[HookKind, float] | float = thresholds  # type: ignore[assignment]
        self.asked: TokenizedRelation | None = None
        if relation is not None:
            catalogue = Catalogue.load(*knowledge_files)
            try:
                self.asked = TokenizedRelation.of(relation, catalogue, self.lm.tokenizer)
            except DomainError as error:
                raise DomainError(
                    f"{error} --model.relation null leaves {relation} and steering out."
                ) from error
        self.starts: list[Feature] = []
        self.saes = nn.ModuleDict()
        if saes is not None:
            self._take(load_folder(saes, self.lm))
        self.report: FeatureFlowReport | None = None

    @property
    def language_model(self) -> LanguageModel:
        """The LM, for the DataModule."""
        return self.lm

    def _take(self, saes: Mapping[HookPoint, SparseAutoencoder]) -> None:
        # Folded, so that an activation is the length of what a feature adds.
        folded = {hook_point: saes[hook_point].folded() for hook_point in sorted(saes)}
        self._hook_points = {
            f"{hook_point.kind}_{hook_point.layer}": hook_point for hook_point in folded
        }
        # A module of modules, so that Lightning moves them with the LM.
        self.saes.update(
            {name: folded[hook_point] for name, hook_point in self._hook_points.items()}
        )
        self.saes.requires_grad_(False)
        self.starts = [parse_feature(text, folded) for text in self.hparams["features"] or []]

    @property
    def by_hook_point(self) -> dict[HookPoint, SparseAutoencoder]:
        """The SAEs."""
        return {hook_point: self.saes[name] for name, hook_point in self._hook_points.items()}  # type: ignore[misc]

    def setup(self, stage: str) -> None:
        """Refuse what would give wrong numbers or lose them; train SAEs if none are given.

        Raises:
            ConfigError: Several processes, other data, or what every study of a frozen LM refuses.
            OutputError: The run's folder cannot be written.
        """
        super().setup(stage)
        if self.trainer.world_size > 1:
            raise ConfigError(
                f"FeatureFlow runs in one process, not {self.trainer.world_size}. Pass "
                "--trainer.devices 1."
            )
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, TextsDataModule):
            raise ConfigError(
                "FeatureFlow reads the texts of a TextsDataModule; data is "
                f"{type(data).__name__}. Pass --data TextsDataModule."
            )
        if not len(self.saes):
            folder = None if is_dry_run(self.trainer) else run_folder(self.trainer)
            tokens = self.hparams["training_tokens"]
            seed = self.hparams["seed"]
            self._take(train_saes(self.lm, data, tokens, self.sae, folder, seed))

    def configure_model(self) -> None:
        """Load the LM.

        Raises:
            SparseAutoencoderError: An SAE does not fit it, or no feature can have a predecessor.
        """
        super().configure_model()
        model = self.lm.model
        n_layers = 1 + max(hook_point.layer for hook_point in find_hook_points(model))
        for sae in self.by_hook_point.values():
            sae.check_fits(width_of(model), n_layers, self.lm.config.name_or_path)
        flow = DecoderMatcher.of(self.by_hook_point.values())
        for start in self.starts:
            flow.check_start(start)
        if not any(flow.predecessors(hook_point) for hook_point in flow.hook_points):
            raise SparseAutoencoderError(
                f"there are SAEs for {', '.join(map(str, flow.hook_points))} alone, and none of these "
                "is where another one's features come from. Pass the SAE of a residual stream and "
                "one of the layer below, or of the layer's MLP or attention."
            )

    # -- reading -----------------------------------------------------------------------------

    def on_test_start(self) -> None:
        """Match the features, and begin to count."""
        self._flow = DecoderMatcher.of(self.by_hook_point.values())
        self._pass = TextPass(self.lm, self.by_hook_point, self._flow)
        self._rows: list[list[int]] = []
        self._n_skipped = 0
        self._draw = torch.Generator().manual_seed(self.hparams["seed"])

    @torch.no_grad()
    def test_step(self, batch: TokenRows, batch_idx: int) -> None:
        """Count groups on some texts."""
        del batch_idx
        pairs = zip(batch.input_ids, batch.attention_mask.bool(), strict=True)
        rows = [ids[mask].tolist() for ids, mask in pairs]
        # What a tokenizer puts before every text is not read: its activations are like no others.
        n_skipped = int((batch.attention_mask - batch.counted.long()).sum(1).max())
        self._pass.update(rows, n_skipped)
        self._n_skipped = n_skipped
        if len(self._rows) < self._n_kept:
            self._rows += rows

    @property
    def _n_kept(self) -> int:
        """Texts that are read again."""
        return max(2 * self.deactivation.n_cases, self.steering.n_texts)

    # -- the end -----------------------------------------------------------------------------

    @torch.no_grad()
    def on_test_epoch_end(self) -> None:
        """Measure what needs all texts, or none."""
        saes, flow, seen = self.by_hook_point, self._flow, self._pass
        cuts = []
        for groups in seen.groups.values() if self.deactivation.n_cases else ():
            cuts += measure_cuts(
                self.lm, saes, flow, self._rows, groups, self.deactivation, self._draw,
                self._n_skipped,
            )  # fmt: skip
        relation = self._measure_relation()
        answers = self._answers_to_steer(relation) if relation is not None else []
        texts = self._rows[: self.steering.n_texts]
        steering = (
            measure_steering(self.lm, saes, seen.activity, answers, texts, self.steering)
            if answers
            else []
        )
        flows = list(self._flows(relation))
        self._warn_of_size(flows)
        drawn = sorted({f for flow in flows for graph in flow.graphs for f in graph.features})
        self.report = FeatureFlowReport(
            lm=self.lm.config.name_or_path,
            n_texts=seen.n_texts,
            n_tokens=seen.n_tokens,
            groups=seen.layers(),
            transitions=measure_transitions(saes, flow, seen.sample),
            cuts=cuts,
            steering=steering,
            relation=None if relation is None else relation.result,
            flows=flows,
            names=name_features(self.lm, seen.activity, drawn),
        )

    def _measure_relation(self) -> RelationMeasurement | None:
        if self.asked is None:
            return None
        tokenizer = self.lm.tokenizer
        n = min(self.hparams["n_subjects"], len(usable_strings(tokenizer)))
        subjects = sample_subjects(tokenizer, n, seed=self.hparams["seed"])
        return measure_relation(
            self.lm, self.by_hook_point, self._flow, self.asked, subjects, self.thresholds,
            self.hparams["k"], self._draw,
        )  # fmt: skip

    def _follow(self, start: Feature) -> FlowGraph:
        return self._flow.follow(start, thresholds=self.thresholds, k=self.hparams["k"])

    def _warn_of_size(self, flows: Iterable[DrawnFlow]) -> None:
        graphs = [graph for flow in flows for graph in flow.graphs]
        largest = max(graphs, key=lambda graph: len(graph.features), default=None)
        if largest is not None and len(largest.features) > _MOST_FEATURES:
            _log.warning(
                "the flow of %s has %d features, more than anybody can follow: raise "
                "model.thresholds (%s) or lower model.k (%d).",
                largest.start.id, len(largest.features), self.thresholds, self.hparams["k"],
            )  # fmt: skip

    def _answers_to_steer(self, found: RelationMeasurement) -> list[SteeredAnswer]:
        """Target answers that a feature carries, spread over the labels, and where it steers to."""
        target = found.features["target"]
        last = max(hook_point for hook_point in target if hook_point.kind == "residual")
        carried = [
            label
            for label in range(len(target[last].indices))
            if target[last].feature(label) and float(target[last].auroc[label]) >= LEAST_AUROC
        ]
        n = min(self.steering.n_answers, len(carried))
        spread = [carried[i * len(carried) // n] for i in range(n)]
        prompts = self.lm.rows(found.asked.target_prompts(found.subjects))
        answers = found.said.target.argmax(1)
        steered = []
        for label in spread:
            start = target[last].feature(label)
            assert start is not None
            others = [prompts[i] for i in (answers != label).nonzero()[:, 0].tolist()]
            domain = found.asked.target
            steered.append(
                SteeredAnswer(
                    domain.texts[label],
                    domain.token_ids[label],
                    # Top-1, a few features a layer, however many are drawn: adding most features
                    # of an LM at once steers nowhere.
                    self._flow.follow(start, thresholds=self.thresholds),
                    others[: self.steering.n_prompts],
                )
            )
        return steered

    def _flows(self, relation: RelationMeasurement | None) -> Iterable[DrawnFlow]:
        for start in self.starts:
            yield DrawnFlow(start.id, f"Flow of feature {start.id}", [self._follow(start)])
        if self.starts or relation is None:
            return
        for name, pair in chosen_starts(relation, _N_DRAWN):
            graphs = [self._follow(start) for start in pair]
            yield DrawnFlow(name, f"Flow of {name.replace('->', ' and ')}", graphs)

    def on_test_end(self) -> None:
        """Write the numbers, tables, graphs and figures."""
        self.write_study(self.report, saes=[hook_point.id for hook_point in self.by_hook_point])
