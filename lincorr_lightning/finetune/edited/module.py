"""Edits made elsewhere: what they did to an LM, from the LM before and after them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lincorr_lightning.errors import ConfigError, LincorrError, require, require_one_of
from lincorr_lightning.finetune.batches import EditBatch, EditDataset
from lincorr_lightning.finetune.cases import CONTROLS, SIDES, concatenate, edit_domains
from lincorr_lightning.finetune.edited.results import Reading, edited_results
from lincorr_lightning.finetune.edits import ResolvedEdits, nearness, reference_mask, taught_labels
from lincorr_lightning.knowledge import Domain
from lincorr_lightning.linear_map.fitting import fit_linear_map, sample_fitted_subjects
from lincorr_lightning.lm.config import TINY_WORLD_EDITED, LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import SubjectKind, sample_up_to
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


def measure_edits(
    edits: ResolvedEdits,
    lm: LanguageModel,
    edited_lm: Callable[[str], LanguageModel],
    held: Callable[[LanguageModel], AbstractContextManager[object]],
    *,
    controls: Sequence[str],
    n_others: int,
    others_kind: SubjectKind,
    n_subjects: int,
    seed: int,
) -> Results:
    """Return what edits did to an LM, with the options of `EditedLM`.

    `edited_lm` returns the LM of a folder, or the edited one if there is none; `held` a context in
    which an LM is in memory, never two at once.
    """
    # An LM may have learned skipped rows, too.
    subjects = {*edits.subjects, *(row.subject for row in edits.skipped)}
    others = sample_up_to(lm.tokenizer, n_others, subjects, seed, others_kind)
    fitted = sample_fitted_subjects(lm.tokenizer, n_subjects, subjects.union(others))
    domains = edit_domains(edits.relation, controls, edits.catalogue, lm.tokenizer)
    folders: dict[str, list[int]] = {}  # edits by folder, which is empty for the one edited LM
    for i, row in enumerate(edits.rows):
        folders.setdefault(row.lm, []).append(i)
    for folder, ids in folders.items():
        try:
            _require_same_tokens(edited_lm(folder), lm, list(domains.values()))
        except LincorrError as error:
            where = edits.rows[ids[0]].where if folder else "model.lm"
            raise ConfigError(f"{where}: {error}") from error
    with held(lm):
        before = _read(lm, domains, edits, range(len(edits.edits)), others)
        linear_map = fit_linear_map(lm, edits.relation, fitted)
        near = nearness(lm.nearest_words(), edits.relation)
        maps = linear_map.weight(edits.relation.name), near
        infos = [_info(lm)]
    after = []
    for folder, ids in folders.items():
        edited = edited_lm(folder)
        with held(edited):
            after.append(_read(edited, domains, edits, ids, others))
            infos.append(_info(edited))
    joined = Reading(
        concatenate([part.logits for part in after]),
        concatenate([part.paraphrases for part in after]),
    )
    results = edited_results(edits, before, joined, maps, infos, len(others))
    return replace(results, lm=infos[1])


def _require_same_tokens(edited: LanguageModel, lm: LanguageModel, domains: list[Domain]) -> None:
    """Refuse an edited LM in which the labels are other tokens than in the LM before."""
    ids = [token for domain in domains for token in domain.token_ids]
    pairs = zip(*(x.tokenizer.convert_ids_to_tokens(ids) for x in (lm, edited)), strict=True)
    changed = [f"{a!r} is {b!r}" for a, b in pairs if a != b]
    if changed:
        raise ConfigError(
            f"{len(changed)} of {len(ids)} labels of model.before are other tokens in "
            f"{edited.config.name_or_path}: {', '.join(changed[:3])}. Pass the LM that was edited "
            "as model.before.name_or_path, or its tokenizer as model.lm.tokenizer."
        )
    needed = min(lm.vocab_size, max(lm.tokenizer.get_vocab().values()) + 1)
    if edited.vocab_size < needed:
        raise ConfigError(
            f"{edited.config.name_or_path} has {edited.vocab_size:,} tokens, and model.before has "
            f"{needed:,}. Pass the LM that was edited as model.before.name_or_path."
        )


def _info(lm: LanguageModel) -> dict[str, Any]:
    """Return the `info` of an LM, with the types of quantized weights in its GGUF file."""
    checkpoint = lm.checkpoint
    if checkpoint is None or checkpoint.gguf_file is None:
        return dict(lm.info)
    from gguf import GGUFReader

    tensors = GGUFReader(Path(checkpoint.location) / checkpoint.gguf_file).tensors
    kinds = {tensor.tensor_type.name for tensor in tensors} - {"F64", "F32", "F16", "BF16"}
    return {**lm.info, **({"quantization": sorted(kinds)} if kinds else {})}


def _read(
    lm: LanguageModel,
    domains: Mapping[str, Domain],
    edits: ResolvedEdits,
    ids: Sequence[int],
    others: Sequence[str],
) -> Reading:
    """Return what an LM answers about some edits, in other words, and about other subjects.

    Wordings of the source are those of the edit's row, if it has others than the measured one.
    """
    chosen = [edits.edits[i] for i in ids]
    subjects = [edit.subject for edit in chosen]
    is_right = {
        "source": one_hot(taught_labels(chosen), len(domains["source"].labels)).bool(),
        "target": reference_mask(chosen, len(domains["target"].labels)),
    }

    def read(name: str, prompts: Sequence[str]) -> Tensor:
        return lm.domain_logits(prompts, domains[name].token_ids).cpu()

    logits = {
        name: read(name, [domain.knowledge.prompt(subject) for subject in subjects])
        for name, domain in domains.items()
    }
    paraphrases = {}
    for side in SIDES:
        knowledge = domains[side].knowledge
        if others:
            leading = read(side, [knowledge.prompt(subject) for subject in others]).argmax(1)
            logits[f"others/{side}"] = leading.expand(len(chosen), -1)
        wordings = [replace(knowledge, template=text) for text in knowledge.paraphrases]
        prompts = []
        for row, i in enumerate(ids):
            texts = [wording.prompt(subjects[row]) for wording in wordings]
            measured = knowledge.prompt(subjects[row])
            of_row = [text for text in edits.rows[i].prompts if text != measured]
            prompts += [(row, text) for text in (side == "source" and of_row) or texts]
        leading = read(side, [text for _, text in prompts]).argmax(1)
        paraphrases[side] = is_right[side][[row for row, _ in prompts], leading]
    return Reading(logits, paraphrases)
