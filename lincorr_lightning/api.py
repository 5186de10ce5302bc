"""Three functions for any LM: how linear is its knowledge, and what do edits of it do?

They compute what `LinearProbe`, `EditForecast` and `EditedLM` do, without a Trainer and without
files, also in a notebook or inside of a training loop. An LM is a name or folder, a
`LanguageModel`, or a transformers model in memory with its `tokenizer`, also inside a peft or
compiled one. One in memory is read as it is and where it is: its weights, modes and hooks, and
random number generators are the same after. Each process that calls a function computes alone.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lincorr_lightning.data.subjects import SubjectsDataModule
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edit_files import Edits, read_edits
from lincorr_lightning.finetune.edited_lm import EditedLM, in_memory, measure_edits
from lincorr_lightning.finetune.edits import ListedEdits, nearness, plan_edits, resolve_edits
from lincorr_lightning.finetune.forecasts import forecast_edits, forecast_results
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map.fitting import Ridge
from lincorr_lightning.linear_map.layout import domain_rows
from lincorr_lightning.lm import products
from lincorr_lightning.lm.language_model import AnyLM, LanguageModel
from lincorr_lightning.lm.modes import own_torch_settings
from lincorr_lightning.probe.accumulation import ProbeSums
from lincorr_lightning.probe.module import LinearProbe, score_probe, warn_of_few_subjects
from lincorr_lightning.probe.results import probe_results
from lincorr_lightning.progress import progress
from lincorr_lightning.results.results import Results
from lincorr_lightning.study import plain

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedTokenizerBase


@contextmanager
def _as_the_program() -> Iterator[None]:
    """Compute as the program does, whatever settings of torch the caller is under."""
    with own_torch_settings(), torch.no_grad(), products.fastest():
        yield


@_as_the_program()
def correlate(
    lm: AnyLM,
    pairs: str | Sequence[str],
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    knowledge_files: Sequence[str] = (),
    n_subjects: int | None = 2000,
    ridge: Ridge = "auto",
    seed: int = 0,
) -> Results:
    """Measure how linearly kinds of knowledge are correlated, and how precise W is.

    The numbers are those of ``lincorr fit --config configs/linear_probe.yaml``. Takes pairs such as
    ``city->country``, or one; for the other arguments see `LinearProbe` and `SubjectsDataModule`.

    Example:
        >>> results = correlate("tiny-world", "city->country", n_subjects=200)
        >>> results.table("summary").frame["pair"].tolist()
        ['city->country']
    """
    names = [pairs] if isinstance(pairs, str) else list(pairs)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"pairs is {pairs!r}. Name one or more, such as 'city->country'.")
    lm = LanguageModel.of(lm, tokenizer)
    options: dict[str, Any] = {"pairs": names, "knowledge_files": [*knowledge_files]}
    probe = LinearProbe(lm, ridge=ridge, prefix=lm.prompt_prefix, **options)
    data = SubjectsDataModule(lm, n_subjects=n_subjects, seed=seed)
    data.setup("fit")
    # The loaders themselves would draw from torch's generator.
    loaders: list[Any] = [data.train_dataloader(), data.val_dataloader()]
    batches = [batch for loader in loaders for batch in loader.dataset]
    fitted = None
    with in_memory(lm, lm.is_loaded):
        # The ranks of a run that calls this are not to wait for each other.
        sums = ProbeSums(probe.layout, ridge == "auto", distributed_available_fn=lambda: False)
        sums.to(lm.model.device)
        for batch in progress(batches, "reading subjects, batch"):
            rows = domain_rows(lm, probe.layout.reads_of(batch.half), batch.subjects)
            if batch.half == "fit":
                sums.add("fit", rows, batch.first)
                continue
            if fitted is None:
                fitted = sums.fit_maps(ridge)
                warn_of_few_subjects(fitted)
            sums.add_test(rows, batch.first, fitted)
        assert fitted is not None
        scored = fitted, sums.test.gather(), sums.instance_r(), sums.take_kept(of_all_ranks=False)
        findings = score_probe(*scored, lm, probe.random_labels, data.halves)
        results = probe_results(findings, lm.config.name_or_path, ridge)
        return replace(results, settings=_settings(probe.hparams, data.hparams), lm=dict(lm.info))


@_as_the_program()
def forecast(
    lm: AnyLM,
    edits: Edits,
    relation: str = "city->country",
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    knowledge_files: Sequence[str] = (),
) -> "DataFrame":
    """Forecast whether the target of each edit will follow, by the LM's head alone.

    Of a name or folder only the tokenizer and that matrix are read, as by ``lincorr predict
    --config configs/forecast.yaml``. The edits are a file or its rows: a DataFrame, mappings with
    ``subject``, ``answer`` and perhaps ``reference``, or pairs of subject and answer. Returns the
    fields of `NearestWord`, a row per edit; what is no edit is left out with a warning.

    Example:
        >>> table = forecast("tiny-world", [("Emma", "Rome"), ("Victor", "Lyon")])
        >>> table[["answer", "nearest", "right"]].values.tolist()
        [['Rome', 'Turkey', False], ['Lyon', 'France', True]]
    """
    lm = LanguageModel.of(lm, tokenizer)
    tokenized = TokenizedRelation.of(relation, Catalogue.load(*knowledge_files), lm.tokenizer)
    planned = plan_edits(ListedEdits(read_edits(edits), "edits"), tokenized, lm)
    words = forecast_edits(nearness(lm.nearest_words(), tokenized), planned.edits, tokenized)
    return (
        forecast_results("forecast", words, tokenized.name, planned.skipped).table("forecast").frame
    )


@_as_the_program()
def score(
    before: AnyLM,
    after: AnyLM,
    edits: Edits,
    relation: str = "city->country",
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    knowledge_files: Sequence[str] = (),
    n_others: int = 100,
    n_subjects: int = 2000,
    seed: int = 0,
) -> Results:
    """Measure what edits did to an LM: what it learned, what followed, and what else they reach.

    The numbers are those of ``lincorr test --config configs/edited_lm.yaml``. Takes edits as
    `forecast` does; for the other arguments see `EditedLM`. An LM by name is loaded only while it
    is read.

    Example:
        >>> edits = [("Ryba", "Berlin"), ("Puroa", "Athens")]
        >>> results = score("tiny-world", "tiny-world-edited", edits, n_others=5, n_subjects=100)
        >>> results.values["source_learned"], results.values["generalized"]
        (1.0, 1.0)
    """
    require("n_others", n_others, at_least=0)
    lm, edited = lms = [
        LanguageModel.of(one, tokenizer if isinstance(one, nn.Module) else None)
        for one in (before, after)
    ]
    if lm.lead_in != edited.lead_in:
        raise ConfigError("before and after have other prefixes. Give both the same one.")
    options = {"n_others": n_others, "n_subjects": n_subjects, "prefix": lm.prompt_prefix}
    study = _arguments(EditedLM, lm=edited, before=lm, **options)
    data = _arguments(
        EditsDataModule,
        relation=relation,
        edits_file=str(edits) if isinstance(edits, (str, Path)) else None,
        knowledge_files=[*knowledge_files],
        n_edits=None,
        seed=seed,
    )
    catalogue = Catalogue.load(*knowledge_files)
    tokenized = TokenizedRelation.of(relation, catalogue, lm.tokenizer)
    listed = ListedEdits(read_edits(edits), "edits")
    loaded = [one for one in lms if one.is_loaded]
    resolved = replace(resolve_edits(listed, tokenized, lm.load()), catalogue=catalogue)
    results = measure_edits(
        resolved, lm, lambda _: edited, lambda one: in_memory(one, one in loaded), study, seed
    )
    return replace(results, settings=_settings(study, data))


def _arguments(kind: type, **given: Any) -> dict[str, Any]:
    """Return the hyper-parameters of a study or of its data: `given` ones, and defaults."""
    parameters = inspect.signature(kind).parameters.values()
    return {one.name: one.default for one in parameters} | given


def _settings(study: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of results as those of a run are."""
    own = {name: data[name] for name in data if name not in ("lm", "training", "edits_of_lm")}
    return dict(plain({**study, "data": own, "matmul_precision": products.precision()}))
