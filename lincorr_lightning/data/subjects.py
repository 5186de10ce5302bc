"""The subjects X: sampled, split into two halves, and cut into the same batches everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from torch.utils.data import DataLoader

from lincorr_lightning.data.files import read_subjects
from lincorr_lightning.data.loaders import make_loader
from lincorr_lightning.distributed import batch_edges, gather, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError, require, require_one_of
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import SubjectKind, sample_subjects, sample_up_to
from lincorr_lightning.study import StudyData

Half = Literal["fit", "test"]

# Batches are of nearly equal size, and a fifth of each may be set apart to choose the ridge on:
# from 20 on each part has two rows or more, and so every row has another one as its partner.
MIN_BATCH_SIZE = 20
# Batches of that size can come down to this one where the number of subjects does not divide.
_MIN_ACTUAL_SIZE = MIN_BATCH_SIZE // 2


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class SubjectBatch:
    """A batch of subjects, as the studies of subjects read it from any DataLoader.

    `first` is the position of the first one within its half: ``fit`` for subjects that maps are
    fitted on, ``test`` for held-out ones. For `is_padding` see `make_loader`.
    """

    subjects: list[str]
    first: int
    half: Half
    is_padding: bool = False


def require_fit_half_first(batch: SubjectBatch, batch_idx: int) -> None:
    """Refuse a test that fits maps unless it begins with the fit half; all ranks must call it."""
    if batch_idx == 0 and "fit" not in gather(batch.half):
        raise ConfigError(
            "This study fits maps while it tests, and the first batches are of the held-out half. "
            "Set data.test_on to all."
        )


class SubjectsDataModule(StudyData):
    """Subjects of knowledge prompts: half to fit a map, half to test it (paper section 3.2).

    Subjects are arbitrary: vocabulary strings without special tokens, sampled without replacement.

    Args:
        lm: The LM from whose vocabulary subjects are sampled; `lincorr` passes that of the study.
        n_subjects: Number of subjects; null takes all there are, up to the paper's 10,000.
        words_per_subject: Vocabulary strings joined to one subject; 2 gives far more subjects.
        subject_kind: Which strings subjects are: ``any`` of the vocabulary, as in the paper;
            ``words``, strings of letters whose token begins a word; or ``names`` of people.
        fit_fraction: Fraction of the subjects that maps are fitted on; the others test them.
        batch_size: Subjects per batch at most; the LM cuts them further to what fits its memory.
            If there are fewer batches than ranks, batches are made smaller (at least 10 subjects).
        test_on: What ``lincorr test`` reads: the ``held_out`` half, or ``all`` subjects, those of
            the fit half first, for studies that fit maps while they test.
        seed: Seed of the sample.
        subjects_file: Text file with subjects of your own, one a line, or a relation file of LRE.
        predict_subjects: Subjects that ``lincorr predict`` reads; null takes the held-out half.
    """

    batch_type = SubjectBatch
    free_settings = frozenset({"subjects_file"})

    def __init__(
        self,
        lm: LanguageModel | None = None,
        n_subjects: int | None = None,
        words_per_subject: int = 1,
        subject_kind: SubjectKind = "any",
        fit_fraction: float = 0.5,
        batch_size: int = 256,
        test_on: Literal["held_out", "all"] = "held_out",
        seed: int = 0,
        subjects_file: str | None = None,
        predict_subjects: list[str] | None = None,
    ) -> None:
        super().__init__(lm)
        require("data.fit_fraction", fit_fraction, above=0, below=1)
        # The permuted baseline pairs the subjects of a batch.
        require("data.batch_size", batch_size, at_least=MIN_BATCH_SIZE)
        require_one_of("data.subject_kind", subject_kind, get_args(SubjectKind))
        require_one_of("data.test_on", test_on, ("held_out", "all"))
        self.save_hyperparameters(ignore=["lm"])
        self.halves: dict[Half, list[str]] = {}

    def setup(self, stage: str) -> None:
        """Sample the subjects and split them; the same on all ranks."""
        subjects = self._all_subjects()
        n_fit = round(len(subjects) * self.hparams["fit_fraction"])
        self.halves = {"fit": subjects[:n_fit], "test": subjects[n_fit:]}
        self.keep_contents(subjects_file=subjects)
        for half, members in self.halves.items():
            if len(members) < 2:
                raise SubjectsError(
                    f"{len(subjects)} subjects leave {len(members)} in the {half} half; each half "
                    "needs at least 2. Raise data.n_subjects, or change data.fit_fraction."
                )
            if stage != "predict":
                what = f"subjects of the {half} half"
                require_items(self.trainer, len(members), what, "raise data.n_subjects")

    def _all_subjects(self) -> list[str]:
        n, file, seed = (self.hparams[name] for name in ("n_subjects", "subjects_file", "seed"))
        if file is not None:
            subjects = read_subjects(file)
            if n is not None and n > len(subjects):
                raise SubjectsError(
                    f"data.n_subjects is {n}, but {file} has {len(subjects)}. "
                    f"Set data.n_subjects to null, which takes all, or to {len(subjects)} at most."
                )
            order = np.random.default_rng(seed).permutation(len(subjects))[:n]
            return [subjects[i] for i in order]
        tokenizer = self.language_model.tokenizer
        words, kind = (self.hparams[name] for name in ("words_per_subject", "subject_kind"))
        if n is None:
            # The paper's number at most.
            return sample_up_to(tokenizer, 10_000, seed=seed, kind=kind, words_per_subject=words)
        return sample_subjects(tokenizer, n, words, seed, kind)

    def _batches(self, half: Half, subjects: Sequence[str] | None = None) -> list[SubjectBatch]:
        """Return batches in which no subject is alone, without a permuted partner."""
        members = self.halves[half] if subjects is None else list(subjects)
        size = self.hparams["batch_size"]
        edges = batch_edges(self.trainer, len(members), size, least=_MIN_ACTUAL_SIZE)
        return [SubjectBatch(members[start:stop], start, half) for start, stop in pairwise(edges)]

    def train_dataloader(self) -> DataLoader[SubjectBatch]:
        return make_loader(self._batches("fit"), self.trainer)

    def val_dataloader(self) -> DataLoader[SubjectBatch]:
        return make_loader(self._batches("test"), self.trainer)

    def test_dataloader(self) -> DataLoader[SubjectBatch]:
        """Return a loader of the held-out half, or of both, see `test_on`."""
        before = self._batches("fit") if self.hparams["test_on"] == "all" else []
        return make_loader([*before, *self._batches("test")], self.trainer)

    def predict_dataloader(self) -> DataLoader[SubjectBatch]:
        """Return a loader of `predict_subjects`, or else of the held-out half."""
        subjects = self.hparams["predict_subjects"] or None
        return make_loader(self._batches("test", subjects), self.trainer)
