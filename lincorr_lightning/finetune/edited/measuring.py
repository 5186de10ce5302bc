"""What an LM answers before and after edits, of any two LMs of the same tokens."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import one_hot

from lincorr_lightning.errors import ConfigError, LincorrError
from lincorr_lightning.finetune.cases import SIDES, concatenate, edit_domains
from lincorr_lightning.finetune.edited.results import Reading, edited_results
from lincorr_lightning.finetune.edits import ResolvedEdits, nearness, reference_mask, taught_labels
from lincorr_lightning.knowledge import Domain
from lincorr_lightning.linear_map.fitting import fit_linear_map, sample_fitted_subjects
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import SubjectKind, sample_up_to
from lincorr_lightning.results.results import Results


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
    """Return what edits did to an LM: the results of `EditedLM`, whose options these are.

    Args:
        edits: The edits, each with the folder of its own LM, or none.
        lm: The LM before.
        edited_lm: Function from such a folder, or an empty one, to the edited LM.
        held: Function from an LM to a context in which it is in memory; two never are at once.
        controls: Kinds of knowledge that must not change.
        n_others: Number of other people.
        others_kind: Which strings they are.
        n_subjects: Number of subjects that W is fitted on.
        seed: Seed of the other people.
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
        weight = linear_map.weight(edits.relation.name)
        maps = weight, nearness(lm.nearest_words(), edits.relation)
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
    return replace(
        edited_results(edits, before, joined, maps, infos, len(others)), lm=dict(infos[1])
    )


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
