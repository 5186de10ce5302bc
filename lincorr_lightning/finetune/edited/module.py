"""Edits made elsewhere: what they did to an LM, from the LM before and after them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from lincorr_lightning.errors import ConfigError, LincorrError, require
from lincorr_lightning.finetune.batches import EditBatch, EditDataset
from lincorr_lightning.finetune.cases import CONTROLS, find_controls
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edited.results import edited_results
from lincorr_lightning.finetune.edits import reference_mask, vocabulary_nearness
from lincorr_lightning.knowledge import Domain
from lincorr_lightning.linear_map.fitting import fit_linear_map, sample_fitted_subjects
from lincorr_lightning.lm.config import TINY_WORLD_EDITED, LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_up_to
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
        n_neighbours: Number of sampled subjects without an edit, whose answers should stay.
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
        n_neighbours: int = 100,
        n_subjects: int = 2000,
        prefix: str = "",
    ) -> None:
        super().__init__(before, prefix)
        require("model.n_neighbours", n_neighbours, at_least=0)
        self.save_hyperparameters(logger=False)
        self.controls, self.n_neighbours, self.n_subjects = controls, n_neighbours, n_subjects
        self.edited = self.other_lm(lm)
        found = self.edited.checkpoint
        assert found is not None
        folder = Path((found.adapter or found).location)
        beside = folder / "edits.csv", folder.parent / "tables" / "edits.csv"
        #: File of edits in the folder of the edited LM, or of the fine-tune that saved it.
        self.edits_beside = next((str(path) for path in beside if path.is_file()), "")

    def data_arguments(self) -> dict[str, Any]:
        """Return the LM before the edits, and the file of edits that lies with the edited one."""
        return {**super().data_arguments(), "edits_beside": self.edits_beside}

    def setup(self, stage: str) -> None:
        """Refuse edited LMs that are other LMs than that before, before weights are read."""
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, EditsDataModule):
            return
        ends = [data.tokenized.source, data.tokenized.target]
        for where, path in [*data.lms.items()][: data.n_edits] or [("model.lm", "")]:
            try:
                _require_same_tokens(self._edited_lm(path), self.lm, ends)
            except LincorrError as error:
                raise ConfigError(f"{where}: {error}") from error

    def _edited_lm(self, path: str) -> LanguageModel:
        own = self.edited
        return self.other_lm(replace(own.config, name_or_path=path)) if path else own

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: an LM reads all edits at once, at the end."""

    @torch.inference_mode(False)  # in which weights that are read have no version
    def build_results(self) -> Results:
        """Read the LM before, and then the edited LMs, one after the other."""
        edits, lm = getattr(self.trainer.test_dataloaders, "dataset", None), self.lm
        if not isinstance(edits, EditDataset) or not edits.rows:
            raise ConfigError("EditedLM needs data.edits_file, the file of the LM's edits.")
        # An LM may have learned skipped rows, too.
        subjects = {x.subject for x in edits.edits} | {x.subject for x in edits.skipped}
        neighbours = sample_up_to(lm.tokenizer, self.n_neighbours, subjects, edits.seed)
        others = sample_fitted_subjects(lm.tokenizer, self.n_subjects, subjects.union(neighbours))
        controls = find_controls(self.controls, edits.relation, edits.catalogue, lm.tokenizer)
        domains = [edits.relation.source, edits.relation.target, *controls]
        paths, everyone = edits.edited_lms, [*range(len(edits.edits))]
        lm.load().to(self.device)
        asked, infos, after = _wordings(edits), [_info(lm)], list[dict[str, Tensor]]()
        before = _read(lm, domains, edits, everyone, asked, neighbours)
        linear_map = fit_linear_map(lm, edits.relation, others)
        maps = linear_map.weight(edits.relation.name), vocabulary_nearness(lm, edits.relation)
        del lm.model
        for path, ids in [(path, [i]) for i, path in enumerate(paths)] or [("", everyone)]:
            edited = self._edited_lm(path)
            _require_same_tokens(edited, lm, domains)
            edited.load().to(self.device)
            after.append(_read(edited, domains, edits, ids, asked, neighbours))
            infos.append(_info(edited))
            del edited.model
        self.lm_info = infos[1]
        joined = {name: torch.cat([one[name] for one in after]) for name in after[0]}
        names = [x.knowledge.name for x in controls]
        return edited_results(edits, before, joined, maps, names, infos, asked, neighbours)


def _require_same_tokens(edited: LanguageModel, lm: LanguageModel, domains: list[Domain]) -> None:
    """Refuse an edited LM in which the labels are other tokens than in the LM before."""
    ids = [token for domain in domains for token in domain.token_ids]
    pairs = zip(*(x.tokenizer.convert_ids_to_tokens(ids) for x in (lm, edited)), strict=True)
    if changed := [f"{a!r} is {b!r}" for a, b in pairs if a != b]:
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
    found, kinds = lm.checkpoint, set[str]()
    if found is not None and found.gguf_file is not None:
        from gguf import GGUFReader

        tensors = GGUFReader(Path(found.location) / found.gguf_file).tensors
        kinds = {one.tensor_type.name for one in tensors} - {"F64", "F32", "F16", "BF16"}
    return lm.info | ({"quantization": sorted(kinds)} if kinds else {})


def _wordings(edits: EditDataset) -> dict[str, list[Sequence[str]]]:
    """Return the prompts of each edit in other words, by the number that they are counted in."""
    subjects, asked = [edit.subject for edit in edits.edits], dict[str, list[Sequence[str]]]()
    ends = {"source_learned": edits.relation.source, "generalized": edits.relation.target}
    for name, end in ends.items():
        wordings = [replace(end.knowledge, template=text) for text in end.knowledge.paraphrases]
        asked[f"paraphrases_{name}"] = [[x.prompt(s) for x in wordings] for s in subjects]
    measured = map(edits.relation.source.knowledge.prompt, subjects)  # which a file may name, too
    rows = zip(edits.rows, asked["paraphrases_source_learned"], measured, strict=True)
    others = [[x for x in row.prompts if x != own] or wordings for row, wordings, own in rows]
    asked["paraphrases_source_learned"] = others
    asked["questions_generalized"] = [[x.prompt for x in row.questions] for row in edits.rows]
    return asked


def _read(
    lm: LanguageModel,
    domains: Sequence[Domain],
    edits: EditDataset,
    ids: Sequence[int],
    asked: Mapping[str, Sequence[Sequence[str]]],
    neighbours: Sequence[str],
) -> dict[str, Tensor]:
    """Return what an LM answers about edits and neighbours, as `edited_results` takes it."""
    made = [edits.edits[i] for i in ids]
    subjects, (source, target, *_) = [edit.subject for edit in made], domains
    labels, old = (torch.tensor([getattr(x, k) for x in made]) for k in ("label", "source_before"))
    reference = reference_mask(made, len(target.labels))
    known = one_hot(labels, len(source.labels)).bool()

    def read(prompts: Iterable[str], domain: Domain) -> Tensor:
        return lm.domain_logits(list(prompts), domain.token_ids).cpu()

    def hits(name: str) -> Tensor:
        is_of_source, prompts = name.endswith("source_learned"), [asked[name][i] for i in ids]
        domain, right = (source, known) if is_of_source else (target, reference)
        owners = [i for i, own in enumerate(prompts) for _ in own]
        return right[owners, read(chain.from_iterable(prompts), domain).argmax(1)]

    answers = {x.knowledge.name: read(map(x.knowledge.prompt, subjects), x) for x in domains}
    for end in (source.knowledge, source), (target.knowledge, target):
        answers[f"neighbours/{end[0].name}"] = read(map(end[0].prompt, neighbours), end[1])
    tokens = torch.tensor(source.token_ids)[torch.stack([labels, old], 1)]
    prompts = [source.knowledge.prompt(subject) for subject in subjects]
    return answers | {
        **{name: hits(name) for name in asked},
        "probability": lm.token_probabilities(prompts, tokens),
    }
