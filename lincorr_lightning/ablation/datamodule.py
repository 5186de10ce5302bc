"""The DataModule of the vocabulary ablation: paired texts of one subject (paper, section 6)."""

from __future__ import annotations

from lincorr_lightning.ablation.batches import PairedCorpus, PhaseDataset, TextBatch, TrainingPlan
from lincorr_lightning.ablation.mappings import pair_labels
from lincorr_lightning.ablation.paired_texts import read_paired_texts, resolve_texts, sample_texts
from lincorr_lightning.data.loaders import ResumableLoader
from lincorr_lightning.distributed import data_shard, require_items
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.loading import find_checkpoint, read_tokenizer
from lincorr_lightning.study import StudyData


class PairedTextsDataModule(StudyData):
    """Paired texts to compose knowledge from, and source texts of new subjects to learn.

    "X lives in the city of Shanghai" with "X lives in the country of China", and "Z lives in the
    city of Shanghai". A subject has either paired texts or a source text alone, and none has a
    token that is an answer. Subjects and their answers follow from the seeds of the study.

    Args:
        plan: Vocabulary, mappings, seeds and phases of the study, `VocabularyAblation.plan`; the
            program `lincorr` passes that of the study.
        relation: Relation that the texts state, as ``city->country``.
        n_paired: Number of subjects of paired texts.
        n_new: Number of new subjects, whose source text is learned and whose target is evaluated.
        max_source_labels: Number of source labels; null takes all that have a target.
        source_labels: Source answers to choose from; null takes all.
        texts_file: JSONL or CSV file with ``phase`` (compose or learn), ``subject`` and ``source``,
            instead of sampled subjects.
        knowledge_files: YAML files with additional knowledge.
        seed: Seed of the choice of source labels.

    Raises:
        KnowledgeError: There is no such relation.
        SubjectsError: The file of texts cannot be used; the message names the line.
        ConfigError: A setting is out of range.
    """

    batch_type = TextBatch

    def __init__(
        self,
        plan: TrainingPlan | None = None,
        relation: str = "city->country",
        n_paired: int = 1024,
        n_new: int = 128,
        max_source_labels: int | None = None,
        source_labels: list[str] | None = None,
        texts_file: str | None = None,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require("data.n_paired", n_paired, at_least=1)
        require("data.n_new", n_new, at_least=1)
        require("data.seed", seed, at_least=0)
        if max_source_labels is not None:
            require("data.max_source_labels", max_source_labels, at_least=2)
        self.save_hyperparameters(ignore=["plan"])
        self.relation, self.n_paired, self.n_new, self.seed = relation, n_paired, n_new, seed
        self.max_source_labels, self.source_labels = max_source_labels, source_labels
        self._plan = plan
        self._catalogue = Catalogue.load(*(knowledge_files or ()))
        self._catalogue.relation(relation)  # refuses an unknown one
        self._rows = None if texts_file is None else read_paired_texts(texts_file)
        self._corpus: PairedCorpus | None = None

    @property
    def plan(self) -> TrainingPlan:
        """The study's vocabulary, mappings, seeds and phases.

        Raises:
            ConfigError: There is no study.
        """
        if self._plan is None:
            raise ConfigError(
                "PairedTextsDataModule makes texts for a VocabularyAblation. Pass --model "
                "VocabularyAblation, or in Python plan=module.plan."
            )
        return self._plan

    @property
    def corpus(self) -> PairedCorpus:
        """All texts with their answers.

        Raises:
            ConfigError: `setup` was not called.
        """
        if self._corpus is None:
            raise ConfigError("PairedTextsDataModule has no texts yet; call its setup() first.")
        return self._corpus

    def setup(self, stage: str | None = None) -> None:
        """Choose labels and subjects, identical on all ranks."""
        del stage
        if self._corpus is not None:
            return
        plan, rows, only = self.plan, self._rows, self.source_labels
        tokenizer = read_tokenizer(find_checkpoint(plan.lm))
        relation = TokenizedRelation.of(self.relation, self._catalogue, tokenizer)
        if rows is not None and only is None:
            only = list(dict.fromkeys(row.source for row in rows))
        labels = pair_labels(relation, self.max_source_labels, only, self.seed)
        if rows is not None:
            texts = [resolve_texts(rows, labels, tokenizer)] * len(plan.seeds)
        else:
            texts = [
                sample_texts(labels, tokenizer, self.n_paired, self.n_new, seed)
                for seed in plan.seeds
            ]
        self._corpus = PairedCorpus(labels, texts, plan.mappings, plan.seeds, tokenizer)

    def train_dataloader(self) -> ResumableLoader:
        """Return the steps of all phases."""
        require_items(self.trainer, self.corpus.n_new, "new texts", "raise data.n_new")
        shard = data_shard(self.trainer)
        steps = PhaseDataset(self.corpus, self.plan.phases, shard.number, shard.n)
        return ResumableLoader(steps, self.trainer)
