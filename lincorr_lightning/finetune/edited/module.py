"""Edits made elsewhere: what they did to an LM, from the LM before and after them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from lincorr_lightning.errors import ConfigError, require, require_one_of
from lincorr_lightning.finetune.batches import EditBatch, EditDataset
from lincorr_lightning.finetune.cases import CONTROLS
from lincorr_lightning.finetune.edited.measuring import measure_edits
from lincorr_lightning.lm.config import TINY_WORLD_EDITED, LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import SubjectKind
from lincorr_lightning.results.results import Results
from lincorr_lightning.study import LMStudy


class EditedLM(LMStudy):
    """Measures what edits that were made elsewhere did to an LM.

    ``lincorr test`` reads the LM before the edits and then the edited one; only one is in memory at
    a time. Measured are which edits were learned, generalized to the target or hallucinated (paper,
    section 5), in which other wordings they hold, and whether subjects without an edit keep their
    answers. With ``data.edited_lms``, each edit is measured in an LM of its own.

    Takes an `EditDataset` of the edits of a file, such as that of `EditsDataModule`.

    Args:
        lm: The edited LM.
        before: The LM that was edited.
        controls: Kinds of knowledge that must not change; one without labels in the LM's
            vocabulary is left out with a warning.
        n_others: Number of other people: sampled subjects without an edit, whose answers should
            stay; 0 for none.
        others_kind: Which strings they are, see `EditsDataModule`: ``any`` or ``names``, for
            instance.
        n_subjects: Number of subjects that W of `before` is fitted on, or as many as there are.
        prefix: Text before each prompt, such as examples; with `lm.chat_template`, the user's turn.
    """

    study = "edited_lm"
    batch_type = EditBatch

    def __init__(
        self,
        lm: LMConfig = LMConfig(TINY_WORLD_EDITED),
        before: LMConfig = LMConfig(),
        controls: list[str] = list(CONTROLS),  # noqa: B006
        n_others: int = 100,
        others_kind: SubjectKind = "any",
        n_subjects: int = 2000,
        prefix: str = "",
    ) -> None:
        super().__init__(before, prefix)
        require("model.n_others", n_others, at_least=0)
        require_one_of("model.others_kind", others_kind, get_args(SubjectKind))
        self.save_hyperparameters(logger=False)
        self.controls = controls
        self.n_others = n_others
        self.others_kind: SubjectKind = others_kind
        self.n_subjects = n_subjects
        self.edited = self.other_lm(lm)

    def data_arguments(self) -> dict[str, Any]:
        """Return the LM before the edits, and the file of edits that lies with the edited one.

        It is in the folder of the edited LM, or of the fine-tune that saved it.
        """
        checkpoint = self.edited.checkpoint
        assert checkpoint is not None
        folder = Path((checkpoint.adapter or checkpoint).location)
        files = folder / "edits.csv", folder.parent / "tables" / "edits.csv"
        edits = next((str(path) for path in files if path.is_file()), "")
        return {**super().data_arguments(), "edits_of_lm": edits}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: an LM reads all edits at once, at the end."""

    @torch.inference_mode(False)  # in which weights that are read have no version
    def build_results(self) -> Results:
        dataset = getattr(self.trainer.test_dataloaders, "dataset", None)
        if not isinstance(dataset, EditDataset) or not dataset.resolved.rows:
            raise ConfigError("EditedLM needs data.edits_file, the file of the LM's edits.")
        results = measure_edits(
            dataset.resolved,
            self.lm,
            self._edited_lm,
            self._held,
            controls=self.controls,
            n_others=self.n_others,
            others_kind=self.others_kind,
            n_subjects=self.n_subjects,
            seed=dataset.seed,
        )
        self.lm_info = results.lm
        return results

    @contextmanager
    def _held(self, lm: LanguageModel) -> Iterator[None]:
        lm.load().to(self.device)
        yield
        del lm.model

    def _edited_lm(self, folder: str) -> LanguageModel:
        if not folder:
            return self.edited
        return self.other_lm(replace(self.edited.config, name_or_path=folder))
