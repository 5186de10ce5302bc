"""Three functions for any LM: how linear is its knowledge, and what do edits of it do?

They compute what `LinearProbe`, `EditForecast` and `EditedLM` do, without a Trainer and without
files, also in a notebook or inside of a training loop. The LM is a name or folder, `LMConfig`, a
`LanguageModel`, or a module in memory with its ``tokenizer``: a transformers model, also inside a
peft or compiled one. One in memory is read where it is and as it is: weights, modes, hooks,
gradients and random number generators are the same after. With several processes, each that calls
a function computes alone.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lincorr_lightning.data.subjects import SubjectsDataModule
from lincorr_lightning.errors import ConfigError, LanguageModelError, require
from lincorr_lightning.finetune.cases import CONTROLS
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edit_files import Edits, read_edits
from lincorr_lightning.finetune.edited.measuring import measure_edits
from lincorr_lightning.finetune.edited.module import EditedLM
from lincorr_lightning.finetune.edits import ListedEdits, nearness, plan_edits, resolve_edits
from lincorr_lightning.finetune.forecasts import forecast_edits, forecast_results
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map.fitting import Ridge, fit_maps
from lincorr_lightning.linear_map.layout import domain_rows
from lincorr_lightning.lm import products
from lincorr_lightning.lm.language_model import AnyLM, LanguageModel
from lincorr_lightning.lm.nearest_words import NearestWords
from lincorr_lightning.lm.stored_rows import stored_head
from lincorr_lightning.lm.vocabulary import SubjectKind
from lincorr_lightning.probe.accumulation import ProbeSums
from lincorr_lightning.probe.module import LinearProbe
from lincorr_lightning.probe.results import probe_results
from lincorr_lightning.probe.scoring import score_probe, warn_of_few_subjects
from lincorr_lightning.progress import progress
from lincorr_lightning.results.results import Results
from lincorr_lightning.study import plain

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedTokenizerBase

__all__ = ["correlate", "forecast", "score"]


@contextmanager
def _as_in_a_study() -> Iterator[None]:
    """Compute as the program does, whatever settings of torch the caller is under."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            nullcontext() if device.type == "cpu" else torch.device("cpu"),
            products.fastest(),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


@_as_in_a_study()
def correlate(
    lm: AnyLM,
    pairs: str | Sequence[str],
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    knowledge_files: Sequence[str | Path] = (),
    n_subjects: int | None = 2000,
    ridge: Ridge = "auto",
    seed: int = 0,
) -> Results:
    """Measure how linearly kinds of knowledge are correlated, and how precise W is.

    The numbers are those of ``lincorr fit --config configs/linear_probe.yaml`` for these pairs.

    Args:
        lm: The LM, see `lincorr_lightning.api`.
        pairs: Ordered pairs, such as ``city->country``, or one.
        tokenizer: That of a model in memory.
        knowledge_files: YAML files with knowledge of your own, and relation files of LRE.
        n_subjects: Number of subjects, half of which W is fitted on; None takes all there are, up
            to 10,000.
        ridge: Penalty on ``|W|^2``, see `Ridge`; 0 is the paper's map.
        seed: Seed of the sample of subjects.

    Example:
        >>> results = correlate("tiny-world", "city->country", n_subjects=200)
        >>> results.values["n_fit"], results.table("summary").frame["pair"].tolist()
        (100, ['city->country'])
    """
    names = [pairs] if isinstance(pairs, str) else list(pairs)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"pairs is {pairs!r}. Pass one such as 'city->country', or a list.")
    lm = LanguageModel.of(lm, tokenizer)
    files = [str(path) for path in knowledge_files]
    probe = LinearProbe(
        lm, pairs=names, knowledge_files=files, ridge=ridge, prefix=lm.prompt_prefix
    )
    data = SubjectsDataModule(lm, n_subjects=n_subjects, seed=seed)
    data.setup("fit")
    fitted = None
    with _in_memory(lm, stays=lm.is_loaded):
        # The ranks of a run that calls this are not to wait for each other.
        sums = ProbeSums(probe.layout, ridge == "auto", distributed_available_fn=lambda: False)
        sums.to(lm.model.device)
        # Not the loaders themselves, which draw from torch's generator.
        loaders: list[Any] = [data.train_dataloader(), data.val_dataloader()]
        batches = [batch for loader in loaders for batch in loader.dataset]
        for batch in progress(batches, "reading subjects, batch"):
            rows = domain_rows(lm, probe.layout.reads, batch.subjects)
            if batch.half == "fit":
                sums.add("fit", rows, batch.first)
                continue
            if fitted is None:
                fitted = fit_maps(sums.gather_fit(), probe.layout, ridge)
                warn_of_few_subjects(fitted)
            sums.add_test(rows, batch.first, fitted)
        assert fitted is not None
        instance, test = sums.instance_r(), sums.test.gather()
        findings = score_probe(
            fitted, test, instance, sums.kept, lm, probe.random_labels, data.halves
        )
        results = probe_results(findings, lm.config.name_or_path, ridge)
        return replace(results, settings=_settings(probe.hparams, data.hparams), lm=dict(lm.info))


@_as_in_a_study()
def forecast(
    lm: AnyLM,
    edits: Edits,
    relation: str = "city->country",
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    knowledge_files: Sequence[str | Path] = (),
) -> "DataFrame":
    """Forecast whether the target of each edit will follow, by the LM's head alone.

    Of a name or folder only the tokenizer and that matrix are read, as by ``lincorr predict
    --config configs/forecast.yaml``.

    Args:
        lm: The LM before the edits, see `lincorr_lightning.api`.
        edits: A file of edits; or rows as a DataFrame, as mappings with ``subject``, ``answer``
            and, where it is not the relation's, ``reference``, or as pairs of subject and answer.
        relation: Source that is taught and target that should follow.
        tokenizer: That of a model in memory.
        knowledge_files: YAML files with knowledge of your own.

    Returns:
        A row per edit, with the columns of `NearestWord`. Rows that are no edit are left out with a
        warning.

    Example:
        >>> table = forecast("tiny-world", [("Emma", "Rome"), ("Victor", "Osaka")])
        >>> table[["answer", "nearest", "right"]].values.tolist()
        []
    """
    lm = LanguageModel.of(lm, tokenizer)
    catalogue = Catalogue.load(*knowledge_files)
    tokenized = TokenizedRelation.of(relation, catalogue, lm.tokenizer)
    planned = plan_edits(ListedEdits(read_edits(edits), "edits"), tokenized, lm)
    if lm.is_loaded:
        head = lm.head_rows()
    else:
        assert lm.checkpoint is not None
        head = stored_head(lm.checkpoint, lm.tokenizer)
    if head is None:
        raise LanguageModelError(
            f"the head of {lm.config.name_or_path} multiplies by more than its weight, as a "
            "quantized one does, so that its tokens have no rows. Pass the LM that it was made "
            "from."
        )
    near = nearness(NearestWords(head, lm.config.name_or_path), tokenized)
    assert near is not None
    words = forecast_edits(near, planned.edits, tokenized)
    return forecast_results(words, tokenized.name, planned.skipped).table("forecast").frame


@_as_in_a_study()
def score(
    before: AnyLM,
    after: AnyLM,
    edits: Edits,
    relation: str = "city->country",
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    knowledge_files: Sequence[str | Path] = (),
    controls: Sequence[str] = CONTROLS,
    n_others: int = 100,
    others_kind: SubjectKind = "any",
    n_subjects: int = 2000,
    seed: int = 0,
) -> Results:
    """Measure what edits did to an LM: what it learned, what followed, and what else they reach.

    The numbers are those of ``lincorr test --config configs/edited_lm.yaml``.

    Args:
        before: The LM that was edited, see `lincorr_lightning.api`. An LM that is given by name is
            loaded only while it is read, so that one of two is in memory at a time.
        after: The edited LM.
        edits: The edits, see `forecast`.
        relation: Source that was edited and target that should follow.
        tokenizer: That of models in memory.
        knowledge_files: YAML files with knowledge of your own.
        controls: Kinds of knowledge that must not change.
        n_others: Number of other people: sampled subjects without an edit, whose answers should
            stay.
        others_kind: Which strings they are: ``any`` of the vocabulary, ``words``, or ``names``.
        n_subjects: Number of subjects that W of the LM before is fitted on.
        seed: Seed of the other people.

    Example:
        >>> edits = [("Emma", "Rome"), ("Victor", "Osaka")]
        >>> results = score("tiny-world", "tiny-world-edited", edits, n_others=5, n_subjects=100)
        >>> results.values["n_edits"], results.values["source_learned"]
        (2, 0.0)
    """
    require("n_others", n_others, at_least=0)
    lms = [
        LanguageModel.of(lm, tokenizer if isinstance(lm, nn.Module) else None)
        for lm in (before, after)
    ]
    lm, edited = lms
    if lm.lead_in != edited.lead_in:
        raise ConfigError(
            f"before reads prompts after {lm.lead_in!r}, and after reads them after "
            f"{edited.lead_in!r}. Give both the same prefix and chat template."
        )
    catalogue = Catalogue.load(*knowledge_files)
    tokenized = TokenizedRelation.of(relation, catalogue, lm.tokenizer)
    listed = ListedEdits(read_edits(edits), "edits")
    measured: dict[str, Any] = {
        "controls": list(controls),
        "n_others": n_others,
        "others_kind": others_kind,
        "n_subjects": n_subjects,
    }
    loaded = [one for one in lms if one.is_loaded]
    resolved = replace(resolve_edits(listed, tokenized, lm.load()), catalogue=catalogue)

    def held(one: LanguageModel) -> AbstractContextManager[None]:
        return _in_memory(one, stays=one in loaded)

    results = measure_edits(resolved, lm, lambda _: edited, held, seed=seed, **measured)
    study = _arguments(EditedLM, lm=edited, before=lm, prefix=lm.prompt_prefix, **measured)
    data = {
        "relation": relation,
        "n_edits": None,
        "edits_file": str(edits) if isinstance(edits, (str, Path)) else None,
        "knowledge_files": [str(path) for path in knowledge_files],
        "seed": seed,
    }
    return replace(results, settings=_settings(study, _arguments(EditsDataModule, **data)))


@contextmanager
def _in_memory(lm: LanguageModel, stays: bool) -> Iterator[None]:
    """Load an LM that is not loaded; after a ``with`` block it `stays`, or its weights go."""
    lm.load()
    try:
        yield
    finally:
        if not stays:
            del lm.model


def _arguments(kind: type, **given: Any) -> dict[str, Any]:
    """Return the hyper-parameters of a study or of its data: `given` ones, and defaults."""
    parameters = inspect.signature(kind).parameters.values()
    return {one.name: one.default for one in parameters} | given


def _settings(study: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of results as those of a run are."""
    own = {name: value for name, value in data.items() if name not in ("lm", "training")}
    settings = plain({**study, "data": own, "matmul_precision": products.precision()})
    return dict(settings)
