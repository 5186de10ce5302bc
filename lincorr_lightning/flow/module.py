"""The feature-flow study: where the features of SAEs come from, and what depends on them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lincorr_lightning.data.texts import TextBlocks, TokenRows
from lincorr_lightning.errors import ConfigError, DomainError, SparseAutoencoderError, require
from lincorr_lightning.flow.deactivation import DeactivationSettings, measure_deactivation
from lincorr_lightning.flow.graph import DEFAULT_THRESHOLD, DecoderMatcher
from lincorr_lightning.flow.relation import RelationFlow, measure_relation
from lincorr_lightning.flow.steering import SteeringPoint, SteeringSettings, measure_steering
from lincorr_lightning.flow.text_statistics import TextStatistics
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import is_dry_run
from lincorr_lightning.sae.formats import check_fit, load_saes, save_saes
from lincorr_lightning.sae.forwards import rows_of
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from lincorr_lightning.sae.stacked import SAESettings, train_saes
from lincorr_lightning.study import LMStudy, as_settings, require_batch

_N_DRAWN = 3


class FeatureFlow(LMStudy):
    """Follows the features of sparse autoencoders (SAEs) through an LM.

    On texts it counts where features come from (groups), and tests by deactivation whether they do.
    For a relation it finds the features that carry its answers, follows them back to see whether
    they meet, removes what they share, and steers towards some of the answers (Laptev et al., 2025,
    arXiv 2502.03032).

    It is run by ``lincorr test`` in one process. Its batches are `TokenRows`. Without SAEs, a
    batch of `TextBlocks` comes first, on which small ones are trained.

    Args:
        lm: The LM.
        saes: Folder that holds a folder for each SAE, in any known format, such as a run's
            ``sparse_autoencoders/``; or the folders of the SAEs. None trains small ones first.
        training_tokens: Number of tokens that small SAEs are trained on; the program `lincorr`
            passes it to the `TextsDataModule`, which takes them from texts not read afterwards.
        sae: Size of small SAEs.
        relation: Relation, as ``city->country``, of whose answers; None skips it and steering.
        features: Features whose flow is drawn, as ``residual.1.37``; None draws those of answers.
        threshold: Minimum cosine of an edge of a flow graph.
        n_subjects: Number of subjects that the relation is measured on, if the vocabulary has them.
        answer_share: Share of the subjects that count as having a label as their answer, those with
            the highest logit of it relative to the mean of all labels. None takes those whose most
            likely answer it is, which are too few if the LM knows nothing of the subjects.
        deactivation: Settings of the deactivation test.
        steering: Settings of the steering test.
        knowledge_files: YAML files with more knowledge.
        seed: Seed of everything random.
        prefix: Text before each prompt, such as examples; with `lm.chat_template`, the user's turn.
    """

    study = "feature_flow"
    batch_type = TokenRows

    def __init__(
        self,
        lm: LMConfig = LMConfig(),
        saes: str | list[str] | None = None,
        training_tokens: int = 500_000,
        sae: SAESettings = SAESettings(n_features=1024),
        relation: str | None = "city->country",
        features: list[str] | None = None,
        threshold: float = DEFAULT_THRESHOLD,
        n_subjects: int = 2000,
        answer_share: float | None = None,
        deactivation: DeactivationSettings = DeactivationSettings(),
        steering: SteeringSettings = SteeringSettings(),
        knowledge_files: list[str] = [],  # noqa: B006
        seed: int = 0,
        prefix: str = "",
    ) -> None:
        require("model.training_tokens", training_tokens, at_least=1)
        require("model.threshold", threshold, at_least=-1, at_most=1)
        require("model.n_subjects", n_subjects, at_least=20)
        if answer_share is not None:
            require("model.answer_share", answer_share, above=0, at_most=0.5)
        super().__init__(lm, prefix)
        self.save_hyperparameters(logger=False)
        self.sae = as_settings(SAESettings, sae)
        self.deactivation = as_settings(DeactivationSettings, deactivation)
        self.steering = as_settings(SteeringSettings, steering)
        self.features = features or []
        self.threshold = threshold
        self.n_subjects = n_subjects
        self.answer_share = answer_share
        self.seed = seed
        self.relation: TokenizedRelation | None = None
        if relation is not None:
            catalogue = Catalogue.load(*knowledge_files)
            try:
                self.relation = TokenizedRelation.of(relation, catalogue, self.lm.tokenizer)
            except DomainError as error:
                raise DomainError(
                    f"{error} --model.relation null skips {relation} and steering."
                ) from error
        # A module of modules, so that Lightning moves them with the LM.
        self._saes = nn.ModuleList()
        self._trained: dict[HookPoint, SparseAutoencoder] = {}
        if saes is not None:
            self._add(load_saes(saes, self.lm))
        self.training_tokens = 0 if self._saes else training_tokens
        """Number of tokens to train SAEs on; 0 if there are SAEs."""

    def _add(self, saes: Mapping[HookPoint, SparseAutoencoder]) -> None:
        # Folded, so that an activation is the length of what a feature adds to the stream.
        folded = {at: sae.folded() for at, sae in saes.items()}
        self._matcher = DecoderMatcher(folded, self.threshold)
        self._saes.extend(self._matcher.saes.values()).requires_grad_(False)
        self._starts = [Feature.named(text) for text in self.features]
        for start in self._starts:
            self._matcher.check_start(start)
        if not any(map(self._matcher.predecessors, saes)):
            raise SparseAutoencoderError(
                f"there are SAEs for {', '.join(map(str, saes))} only, and no features of one "
                "can come from another. Pass the SAE of a residual stream and one of the layer "
                "below, or of the layer's MLP or attention."
            )

    def data_arguments(self) -> dict[str, Any]:
        """Return the LM, and the number of tokens that SAEs are trained on first."""
        return {**super().data_arguments(), "training_tokens": self.training_tokens}

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.trainer.world_size > 1:
            message = "FeatureFlow runs in one process, not {}. Pass --trainer.devices 1."
            raise ConfigError(message.format(self.trainer.world_size))

    def prepare_lm(self) -> None:
        check_fit(self._saes, self.lm)  # type: ignore[arg-type]

    def on_test_start(self) -> None:
        self._statistics: TextStatistics | None = None

    def test_step(
        self, batch: TextBlocks | TokenRows, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Train SAEs if none are given, or count the groups and the activity of features."""
        if isinstance(batch, TextBlocks):
            if not self._saes:
                steps = [batch[0]] if is_dry_run(self.trainer) else batch
                self._trained = train_saes(self.lm, steps, self.sae, self.seed)
                self._add(self._trained)
            return
        require_batch(self, batch, TokenRows)
        if not self._saes:
            raise ConfigError(
                "model.saes is null, so that SAEs are trained first, but the data has no batch of "
                "TextBlocks for that. Pass --data TextsDataModule, or SAEs as model.saes."
            )
        if self._statistics is None:
            n_kept = max(2 * self.deactivation.n_cases, self.steering.n_texts)
            self._statistics = TextStatistics(self.lm, self._matcher, n_kept)
        n_skipped = int((batch.attention_mask - batch.counted.long()).sum(1).max())
        self._statistics.update(rows_of(batch), n_skipped)

    def build_results(self) -> Results:
        """Measure what needs all texts or none."""
        from lincorr_lightning.flow.results import feature_flow_results

        statistics = self._statistics
        if statistics is None:
            raise ConfigError("the data has no batches of TokenRows. Pass --data TextsDataModule.")
        matcher = self._matcher
        generator = torch.Generator().manual_seed(self.seed)
        cuts = []
        for groups in statistics.groups.values() if self.deactivation.n_cases else ():
            cuts += measure_deactivation(statistics, groups, self.deactivation, generator)
        relation: RelationFlow | None = None
        steering: list[SteeringPoint] = []
        starts = {start.id: [start] for start in self._starts}
        if self.relation is not None:
            subjects = sample_up_to(self.lm.tokenizer, self.n_subjects, seed=self.seed)
            relation = measure_relation(
                self.lm, matcher, self.relation, subjects, generator, self.answer_share
            )
            starts = starts or relation.starts_to_draw(_N_DRAWN)
            answers = relation.answers_to_steer(self.lm, matcher, self.steering)
            steering = measure_steering(statistics, answers, self.steering, generator)
        flows = {
            name: [matcher.follow(feature) for feature in features]
            for name, features in starts.items()
        }
        return feature_flow_results(statistics, cuts, steering, relation, flows)

    def write_artifacts(self, folder: Path) -> None:
        save_saes(self._trained, folder)
