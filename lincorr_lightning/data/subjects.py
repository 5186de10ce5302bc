"""The subjects X of a linear probe: sampled, split in halves, batched the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lincorr_lightning.data.samplers import ConsecutiveBatches, make_loader
from lincorr_lightning.distributed import batch_edges, data_shard, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.lm import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings

PAPER_N_SUBJECTS = 10_000
# Batches are of nearly equal size, and a fifth of each may be set apart to choose the ridge on:
# from 20 on each part has two rows or more, and so every row another one as its partner.
MIN_BATCH_SIZE = 20
# What batches of that size come down to where the number of X's does not divide.
_LEAST = MIN_BATCH_SIZE // 2


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class SubjectBatch:
    """A batch of subjects.

    Attributes:
        inputs: The X's.
        first: Position of the first one within its half.
        is_padding: The batch only keeps a process in step with the others: its forward runs (an
            LM in pieces needs every process in it), its numbers do not count.
    """

    inputs: list[str]
    first: int
    is_padding: bool = False


class SubjectsDataModule(L.LightningDataModule):
    """Subjects X for a linear probe: half to fit the map, half to test it (paper section 3.2).

    Subjects are arbitrary: vocabulary strings without special tokens, sampled without replacement.

    Args:
        lm: The LM from whose vocabulary subjects are sampled; the program `lincorr` passes the LM
            of the study.
        n_subjects: How many X's; null takes all there are, up to the paper's 10,000.
        words_per_subject: Vocabulary strings joined to one X; 2 gives far more X's than the
            vocabulary has strings.
        fit_fraction: Share of the X's that the map is fitted on; the others test it.
        batch_size: X's per batch at most; the LM cuts them further to what fits its memory. Where
            there are more processes than batches, these are smaller, but not below 10 X's.
        seed: Seed of the sample.
        subjects_file: A text file of your own X's, one a line, instead of sampled ones.
        predict_subjects: X's that `lincorr predict` answers for; null takes the held-out half.
        num_workers: Processes that prepare batches; X's are short strings, so 0 is fastest.

    Raises:
        SubjectsError: More X's than can be sampled, fewer than two in a half, or an unreadable file.
    """

    def __init__(
        self,
        lm: LanguageModel | None = None,
        n_subjects: int | None = None,
        words_per_subject: int = 1,
        fit_fraction: float = 0.5,
        batch_size: int = 256,
        seed: int = 0,
        subjects_file: str | None = None,
        predict_subjects: list[str] | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if not 0 < fit_fraction < 1:
            raise ConfigError(f"data.fit_fraction is {fit_fraction}; it must lie between 0 and 1.")
        if batch_size < MIN_BATCH_SIZE:
            raise ConfigError(
                f"data.batch_size is {batch_size}; it must be at least {MIN_BATCH_SIZE}, because "
                "the permuted baseline pairs the rows of a batch."
            )
        self.save_hyperparameters(ignore=["lm"])
        self._lm = lm
        self.halves: dict[str, list[str]] = {}

    def setup(self, stage: str) -> None:
        """Sample the X's and split them; the same on every process.

        Raises:
            SubjectsError: A half has too few X's, or fewer than there are processes.
        """
        inputs = self._all_inputs()
        n_fit = round(len(inputs) * self.hparams["fit_fraction"])
        self.halves = {"fit": inputs[:n_fit], "test": inputs[n_fit:]}
        for half, members in self.halves.items():
            if len(members) < 2:
                raise SubjectsError(
                    f"{len(inputs)} X's with data.fit_fraction {self.hparams['fit_fraction']} "
                    f"leave {len(members)} in the {half} half; each half needs at least 2. "
                    "Raise data.n_subjects."
                )
            if stage != "predict":
                what = f"X's of the {half} half"
                require_items(self.trainer, len(members), what, "raise data.n_subjects")
                self._tell_idle(len(members), what)

    def _tell_idle(self, n: int, what: str) -> None:
        n_batches = len(self._edges(n)) - 1
        n_processes = data_shard(self.trainer).n
        if n_batches < n_processes:
            rank_zero_warn(
                f"{n_processes - n_batches} of {n_processes} processes have nothing to do: the {n} "
                f"{what} make {n_batches} batches, of {_LEAST} or more. Raise data.n_subjects, or "
                "lower trainer.devices."
            )

    def _edges(self, n: int, in_step: bool = False) -> list[int]:
        """Of batches of nearly equal size; no row is alone in one, without a permuted partner."""
        size = self.hparams["batch_size"]
        return batch_edges(self.trainer, n, size, least=_LEAST, in_step=in_step)

    def _all_inputs(self) -> list[str]:
        seed, n = self.hparams["seed"], self.hparams["n_subjects"]
        if self.hparams["subjects_file"] is not None:
            inputs = _read_inputs(Path(self.hparams["subjects_file"]))
            if n is not None and n > len(inputs):
                raise SubjectsError(
                    f"data.n_subjects asks for {n} X's, {self.hparams['subjects_file']} has "
                    f"{len(inputs)}. Lower data.n_subjects or add lines."
                )
            order = np.random.default_rng(seed).permutation(len(inputs))[:n]
            return [inputs[i] for i in order]
        words = self.hparams["words_per_subject"]
        tokenizer = self._tokenizer()
        if n is None:
            n = min(PAPER_N_SUBJECTS, len(usable_strings(tokenizer)) ** words)
        return sample_subjects(tokenizer, n, words_per_subject=words, seed=seed)

    def _tokenizer(self) -> Any:
        if self._lm is None:
            raise ConfigError(
                "SubjectsDataModule samples subjects from an LM's vocabulary: pass lm=module.lm, or "
                "give data.subjects_file instead."
            )
        return self._lm.tokenizer

    def table(self) -> list[tuple[str, str]]:
        """Every X with its half: the rows of ``tables/inputs.csv``."""
        return [(x, half) for half, members in self.halves.items() for x in members]

    def _loader(self, inputs: Sequence[str], in_step: bool = False) -> DataLoader[SubjectBatch]:
        edges = self._edges(len(inputs), in_step)
        batches = ConsecutiveBatches(SubjectBatch, list(inputs), edges)
        return make_loader(batches, self.trainer, self.hparams["num_workers"])

    def train_dataloader(self) -> DataLoader[SubjectBatch]:
        """The fit half; for a study that `shares_steps` each process has a batch at each step."""
        module = None if self.trainer is None else self.trainer.lightning_module
        return self._loader(self.halves["fit"], bool(getattr(module, "shares_steps", False)))

    def val_dataloader(self) -> DataLoader[SubjectBatch]:
        """The test half."""
        return self._loader(self.halves["test"])

    def test_dataloader(self) -> DataLoader[SubjectBatch] | list[DataLoader[SubjectBatch]]:
        """The test half; after the fit half for a study that `reads_both_halves`."""
        module = None if self.trainer is None else self.trainer.lightning_module
        if getattr(module, "reads_both_halves", False):
            return [self._loader(self.halves["fit"]), self._loader(self.halves["test"])]
        return self._loader(self.halves["test"])

    def predict_dataloader(self) -> DataLoader[SubjectBatch]:
        """The X's asked for, else the test half."""
        return self._loader(self.hparams["predict_subjects"] or self.halves["test"])


def _read_inputs(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SubjectsError(f"data.subjects_file {path} cannot be read: {error}.") from error
    inputs = [line.strip() for line in lines if line.strip()]
    seen: set[str] = set()
    for number, x in enumerate(inputs, 1):
        if x in seen:
            raise SubjectsError(
                f"data.subjects_file {path} holds {x!r} twice (X number {number}); an X in both "
                "halves would be tested on what it was fitted on. Remove one."
            )
        seen.add(x)
    return inputs
