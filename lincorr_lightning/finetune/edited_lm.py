"""Edits made elsewhere, such as by ROME or MEMIT: an LM before and after them, and its results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn.functional import one_hot

from lincorr_lightning.errors import ConfigError, LincorrError, require, require_one_of
from lincorr_lightning.finetune import cases as edit_outcomes
from lincorr_lightning.finetune.batches import EditBatch, EditDataset
from lincorr_lightning.finetune.cases import CONTROLS, SIDES, EditAnswers, Logits, concatenate
from lincorr_lightning.finetune.edits import (
    ResolvedEdits,
    nearness,
    reference_mask,
    skip_counts,
    taught_labels,
)
from lincorr_lightning.finetune.results import edits_results, summary_table
from lincorr_lightning.functional import Outcome
from lincorr_lightning.knowledge import Domain
from lincorr_lightning.linear_map.fitting import fit_linear_map, sample_fitted_subjects
from lincorr_lightning.lm.config import TINY_WORLD_EDITED, LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_data
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import SubjectKind, sample_up_to
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table, column, number
from lincorr_lightning.study import LMStudy

_WORDINGS = "wordings/"  # before a side: whether a right label leads in other words


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
            lambda lm: in_memory(lm.load().to(self.device)),
            self.hparams,
            dataset.seed,
        )
        self.lm_info = results.lm
        return results

    def _edited_lm(self, folder: str) -> LanguageModel:
        if not folder:
            return self.edited
        return self.other_lm(replace(self.edited.config, name_or_path=folder))


@contextmanager
def in_memory(lm: LanguageModel, stays: bool = False) -> Iterator[None]:
    """Load an LM that is not loaded; after a ``with`` block it `stays`, or its weights go."""
    lm.load()
    try:
        yield
    finally:
        if not stays:
            del lm.model


def measure_edits(
    edits: ResolvedEdits,
    lm: LanguageModel,
    edited_lm: Callable[[str], LanguageModel],
    held: Callable[[LanguageModel], AbstractContextManager[object]],
    options: Mapping[str, Any],
    seed: int,
) -> Results:
    """Return what edits did to an LM, with the `options` of `EditedLM`; `seed` is that of others.

    `edited_lm` returns the LM of a folder, or the edited one if there is none; `held` a context in
    which an LM is in memory, never two at once.
    """
    # An LM may have learned skipped rows, too.
    subjects = {*edits.subjects, *(row.subject for row in edits.skipped)}
    n, kind = options["n_others"], options["others_kind"]
    others = sample_up_to(lm.tokenizer, n, subjects, seed, kind)
    fitted = sample_fitted_subjects(lm.tokenizer, options["n_subjects"], subjects.union(others))
    domains = edit_outcomes.edit_domains(
        edits.relation, options["controls"], edits.catalogue, lm.tokenizer
    )
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
    results = _results(edits, before, concatenate(after), maps, infos, len(others))
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
) -> Logits:
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
        logits[_WORDINGS + side] = is_right[side][[row for row, _ in prompts], leading]
    return logits


@dataclass(frozen=True)
class ReachRow:
    """What edits reach, a row of the table ``reach`` for each kind of prompts."""

    prompts: str
    n: int | None = column("", ",d")
    n_target: int | None = column("n target", ",d")
    source_learned: float | None = column("learned", ".0%")
    generalized: float | None = column("", ".0%")
    source_unchanged: float | None = column("source stays", ".0%")
    target_unchanged: float | None = column("target stays", ".0%")


def _results(
    edits: ResolvedEdits,
    before: Logits,
    after: Logits,
    maps: tuple[Tensor, Tensor | None],
    lms: Sequence[Mapping[str, Any]],
    n_others: int,
) -> Results:
    """Return the results; `maps` are W and the `nearness`, `lms` infos of the LM before first."""
    relation = edits.relation
    answers = EditAnswers.of(edits.edits, before, after)
    cases = edit_outcomes.edit_cases(relation, edits.edits, answers, *maps)
    unedited = replace(answers, after=before).means()
    warning = _warning(*lms)
    if warning:
        rank_zero_warn(warning)
    values: dict[str, Any] = {
        **edit_outcomes.outcome_values(relation.name, answers, cases, n_others),
        "paraphrases": _paraphrases(after),
        "before": {
            "source_learned": number(unedited["generalization/source_learned"]),
            "generalized": number(unedited["generalization/right_before"]),
            "paraphrases": _paraphrases(before),
        },
        "skipped": skip_counts(edits.skipped),
        "lm_before": lms[0],
        "warning": warning,
        "edited_lms": {
            "n": len(lms) - 1,
            "fingerprint": fingerprint_data([lm["fingerprint"] for lm in lms[1:]]),
        },
    }
    scalars = {f"test/{name}": values[name] for name in ("source_learned", *Outcome)}
    # Of an answer of several tokens, the first is its label.
    labels = {
        "source_label": answers.labels,
        "source_before": before["source"].argmax(1),
        "source_after": after["source"].argmax(1),
    }
    texts = relation.source.texts
    columns = {name: [texts[label] for label in of_edits] for name, of_edits in labels.items()}
    ids = [row.id for row in edits.rows]
    results = edits_results("edited_lm", values, cases, scalars, edits.skipped, id=ids, **columns)
    tables = [summary_table([results]), _reach_table(values), *results.tables]
    return replace(results, tables=tables, verdict=[*filter(None, [warning]), *results.verdict])


def _paraphrases(logits: Logits) -> dict[str, Any]:
    learned, generalized = (logits[_WORDINGS + side].double() for side in SIDES)
    return {
        "source_learned": number(learned.mean().item()),
        "generalized": number(generalized.mean().item()),
        "n": len(learned),
        "n_target": len(generalized),
    }


def _warning(before: Mapping[str, Any], *edited: Mapping[str, Any]) -> str:
    """Return what is wrong with the edited LMs, or with some of them; empty if nothing."""
    kinds = ("dtype", "quantization")
    weights = before["fingerprint"]["weights"]
    wrong = {
        "different dtypes or quantizations: part of what changed is rounding.": [
            lm for lm in edited if any(lm.get(kind) != before.get(kind) for kind in kinds)
        ],
        "the same weights: nothing was edited.": [
            lm for lm in edited if lm["fingerprint"]["weights"] == weights
        ],
    }
    return " ".join(
        f"model.before and {len(lms)} of {len(edited)} edited LMs, such as "
        f"{lms[0]['name_or_path']}, have {what}"
        for what, lms in wrong.items()
        if lms
    )


def _reach_table(values: Mapping[str, Any]) -> Table:
    before = values["before"]
    n = {"n": values["n_edits"]}
    rows = [
        {"prompts": "before", **before, **n},
        {"prompts": "after", **values, **n},
        {"prompts": "paraphrases before", **before["paraphrases"]},
        {"prompts": "paraphrases", **values["paraphrases"]},
        {"prompts": "neighbours", **values.get("neighbours", {"n": 0})},
    ]
    n_skipped = sum(values["skipped"].values())
    notes = [
        "paraphrases: other wordings of source (n) and target (n target); neighbours: subjects "
        "without an edit. generalized: of before and of paraphrases, all right targets. The "
        "editing literature calls learned paraphrases generalization, and neighbours that stay "
        "locality.",
        f"Rows that are no edit: {n_skipped} (tables/skipped.csv)." if n_skipped else "",
        values["warning"],
    ]
    return Table.of(
        "reach",
        [row for row in rows if row["n"]],
        ReachRow,
        f"What the edits of {values['relation']} reach.",
        " ".join(filter(None, notes)),
        headline=True,
    )
