"""Where the processor time of each study goes on a pretrained LM.

    OMP_NUM_THREADS=1 python benchmarks/profile_studies.py FOLDER --texts TEXTS

runs each study in a process of its own, samples its stacks of Python functions, and adds up the
time by what it was spent on. The LM's forward and backward passes are measured once more
afterwards, bare: the Hugging Face model alone, on as many rows and tokens. What they took beyond
that in the study is a part of its own. Each study's numbers go to
``benchmarks/results/profile_studies.json`` as soon as it ends; the table goes to
docs/benchmarks.md.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from documents import place_tables
from jsonargparse import auto_cli
from numbers_file import read_numbers, write_numbers
from sampler import Sampler, Stack
from torch import Tensor, nn

from lincorr_lightning.results.table import markdown_table

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "profile_studies.json"
LM = "LM forward and backward"
BACKWARD = "backward"
NETWORKS = "networks"
OTHER = "other"
SAES = "sparse autoencoders"
# Parts, and the files and functions whose time they are; of a stack, the innermost listed counts.
PARTS: dict[str, tuple[str, ...]] = {
    LM: ("/transformers/models/",),
    BACKWARD: ("/torch/autograd/", "/torch/_tensor.py:backward"),
    "head rows": ("/lm/head.py:_rows_product",),
    "prompts": (
        "/lm/encoding.py", "/lm/prompt_trees.py", "/lm/shared_prefixes.py", "/lm/batching.py",
        "/lm/vocabulary.py", "/lm/query_cache.py", "/transformers/tokenization_",
    ),
    "optimizer": ("/torch/optim/", "/finetune/optimizer_step.py"),
    "restore weights": ("/finetune/module.py:_restore",),
    NETWORKS: (
        "/lincorr_lightning/ablation/networks.py", "/lincorr_lightning/sae/sparse_autoencoder.py",
        "/lincorr_lightning/sae/sparse_products.py", "/lincorr_lightning/sae/stacked.py",
    ),
    "statistics": (
        "/lincorr_lightning/functional/", "/lincorr_lightning/metrics/",
        "/lincorr_lightning/linear_map/", "/lincorr_lightning/probe/",
        "/lincorr_lightning/geometry/", "/torchmetrics/",
        "/lincorr_lightning/ablation/scores.py", "/lincorr_lightning/flow/",
        "/lincorr_lightning/sae/scoring.py",
    ),
    "read the LM": (
        "/lm/loading.py", "/lm/fingerprint.py", "/ablation/checkpoint_tensors.py",
        "/transformers/modeling_utils.py:from_pretrained",
    ),
    "draw": (
        "/matplotlib/", "/figures.py", "/results/heat_maps.py", "/results/style.py",
        "/results/training_curves.py",
    ),
    "write": (
        "/lincorr_lightning/io.py", "/lincorr_lightning/results/", "/torch/serialization.py",
        "/torch/utils/tensorboard/", "/tensorboard/", "/lightning/pytorch/loggers/",
    ),
    "settings": ("/jsonargparse/", "/lincorr_lightning/knowledge/"),
    "Lightning": ("/lightning/pytorch/", "/lightning/fabric/"),
    "callbacks": ("/callbacks/",),
}  # fmt: skip


def studies(
    n_subjects: int, n_lora: int, n_full: int, layers: Sequence[int], texts: str, folder: Path
) -> dict[str, tuple[str, ...]]:
    """Return the command line of each study, without the LM; their runs are in a folder."""
    fitted = {"n_subjects": n_subjects}
    callbacks = [
        {"class_path": "Generalization", "init_args": {"controls": ["color"], **fitted}},
        {"class_path": "GradientCorrelation", "init_args": fitted},
        {"class_path": "GradientCorrelation", "init_args": {"relation": "city->color", **fitted}},
    ]
    of_texts = (f"--data.texts={texts}",) if texts else ()
    edits = (f"--trainer.callbacks={json.dumps(callbacks)}", "--model.forecast=false")
    return {
        "linear probe": (
            "fit", "--config=configs/linear_probe.yaml", f"--data.n_subjects={n_subjects}",
        ),
        "LoRA edits": (
            "fit", "--config=configs/source_finetune_lora.yaml", f"--data.n_edits={n_lora}", *edits,
        ),
        "full edits": (
            "fit", "--config=configs/source_finetune.yaml", f"--data.n_edits={n_full}", *edits,
            "--model.learning_rate=5e-6",
        ),
        "forecast": (
            "predict", "--config=configs/forecast.yaml", f"--data.n_edits={n_lora}",
            f"--model.n_subjects={n_subjects}",
        ),
        "repair": (
            "fit", "--config=configs/repair.yaml", f"--data.n_examples={n_lora}",
            f"--data.n_edits={n_full}", "--data.batch_size=8", "--trainer.max_epochs=1",
            "--trainer.check_val_every_n_epoch=1",
            f"--trainer.callbacks={json.dumps([formation(n_subjects)])}",
        ),
        "vocabulary ablation": ("fit", "--config=configs/vocabulary_ablation.yaml"),
        "token geometry": ("test", "--config=configs/token_geometry.yaml", "--data.n_texts=8"),
        "knowledge geometry": (
            "test", "--config=configs/knowledge_geometry.yaml", f"--data.n_subjects={n_subjects}",
        ),
        SAES: (
            "fit", "--config=configs/sparse_autoencoders.yaml", "--data.n_tokens=32768",
            "--data.n_held_out=8", "--data.eval_batch_size=32", f"--model.layers={list(layers)}",
            *of_texts,
        ),
        "feature flow": (
            "test", "--config=configs/feature_flow.yaml", "--data.n_texts=64",
            "--model.deactivation.n_cases=50",
            "--data.eval_batch_size=32", f"--model.n_subjects={n_subjects}",
            f"--model.saes={folder}/sparse_autoencoders/version_0/sparse_autoencoders",
            *of_texts,
        ),
    }  # fmt: skip


def formation(n_subjects: int) -> dict[str, Any]:
    """Return the callback that fits the maps before and after a repair."""
    settings = {"pairs": ["city->country", "city->color"], "n_subjects": n_subjects}
    return {"class_path": "Formation", "init_args": {**settings, "every_n_steps": 1000}}


def part_of(stack: Stack) -> str:
    """Return what the time of a stack was spent on."""
    if not stack or any(file.startswith("<frozen importlib") for file, _ in stack):
        return "imports"
    return next((part for part in map(_part_of_function, stack) if part is not None), OTHER)


@cache
def _part_of_function(function: tuple[str, str]) -> str | None:
    name = ":".join(function)
    found = (part for part, places in PARTS.items() if any(place in name for place in places))
    return next(found, None)


# Shape of the token ids, whether gradients are on, whether the weights are trained: times read.
FORWARDS: Counter[tuple[tuple[int, ...], bool, bool]] = Counter()


class CountForwards(L.Callback):
    """Counts the forward passes of the study's LM in `FORWARDS`."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Watch the token embedding, which each forward pass of the LM calls once."""
        del trainer, stage
        lm: Any = getattr(pl_module, "lm", None)

        def count(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not isinstance(module, nn.Embedding) or not getattr(lm, "is_loaded", False):
                return
            if module is lm.model.get_input_embeddings():
                trained = next(lm.model.parameters()).requires_grad
                FORWARDS[tuple(args[0].shape), torch.is_grad_enabled(), trained] += 1

        nn.modules.module.register_module_forward_pre_hook(count)


def bare_seconds(model: Any) -> float:
    """Return the processor time of the counted forward passes, and backward where gradients are."""

    def run(shape: tuple[int, ...], with_gradients: bool, trained: bool) -> float:
        model.requires_grad_(trained and with_gradients)
        ids = torch.randint(0, model.config.vocab_size, shape)
        start = time.process_time()
        with torch.set_grad_enabled(with_gradients):
            _run(model, ids, with_gradients)
        seconds = time.process_time() - start
        model.zero_grad()
        return seconds

    run(*next(iter(FORWARDS)))  # warm up
    return sum(n * run(*forward) for forward, n in FORWARDS.items())


def _run(model: Any, ids: Tensor, with_gradients: bool) -> None:
    if not with_gradients:
        model.base_model(input_ids=ids, use_cache=False)
        return
    states = model.get_input_embeddings()(ids)
    if not states.requires_grad:  # frozen weights: gradients of the states alone
        states.requires_grad_()
    model(inputs_embeds=states, use_cache=False, logits_to_keep=1).logits.sum().backward()


def measure(sampler: Sampler, args: Sequence[str], lm: str, output: str) -> None:
    """Run a study and write its numbers; `sampler` has been running since the process began."""
    from lincorr_lightning.cli import main as lincorr

    lincorr(list(args))
    sampler.stop()
    seconds: Counter[str] = Counter()
    functions: dict[str, Counter[str]] = {}
    for stack, spent in sampler.seconds.items():
        part = part_of(stack)
        seconds[part] += spent
        # The function of this package that it was spent in, for a closer look.
        own = (place for place in stack if "/lincorr_lightning/" in place[0])
        file, name = next(own, stack[0] if stack else ("", ""))
        functions.setdefault(part, Counter())[f"{Path(file).name}:{name}"] += spent
    # Where the LM is read without gradients, the backward passes are of other networks.
    of_lm = any(with_gradients for _, with_gradients, _ in FORWARDS)
    seconds[LM if of_lm else NETWORKS] += seconds.pop(BACKWARD, 0.0)
    numbers: dict[str, Any] = {"seconds": dict(seconds)}
    if FORWARDS:
        from lincorr_lightning import LanguageModel

        numbers["bare"] = bare_seconds(LanguageModel.from_pretrained(lm).model)
        numbers["forwards"] = sum(FORWARDS.values())
        numbers["tokens"] = sum(n * rows * size for ((rows, size), *_), n in FORWARDS.items())
    numbers["functions"] = {
        part: dict(found.most_common(6)) for part, found in functions.items() if part != "imports"
    }
    write_numbers(output, numbers)


def table(measured: Mapping[str, Any]) -> str:
    """Return the table of shares, a column for each study."""
    bare, beyond = "LM, bare", "LM, beyond bare"
    shares: dict[str, dict[str, float]] = {}
    for study, numbers in measured.items():
        seconds = dict(numbers["seconds"])
        spent = seconds.pop(LM, 0.0)
        seconds |= {bare: min(numbers.get("bare", 0.0), spent)}
        seconds |= {beyond: spent - seconds[bare]}
        shares[study] = {part: each / sum(seconds.values()) for part, each in seconds.items()}
    rows: list[list[str]] = [
        ["processor time", *(f"{sum(n['seconds'].values()):.0f} s" for n in measured.values())]
    ]
    for part in (bare, beyond, *(each for each in PARTS if each != LM), "imports", OTHER):
        found = [share.get(part, 0.0) for share in shares.values()]
        if max(found) >= 0.0005:
            rows.append([part, *(f"{share:.1%}" if share else "" for share in found)])
    return markdown_table(("", *measured), rows)


def main(
    lm: str,
    n_subjects: int = 2000,
    n_lora: int = 32,
    n_full: int = 8,
    layers: tuple[int, ...] = (14, 15),
    texts: str = "",
    only: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    show: bool = False,
    output: str = str(RESULT),
) -> None:
    """Run the studies, print the table, and put it into docs/benchmarks.md.

    Args:
        lm: Folder of the LM, a hub id or tiny-world.
        n_subjects: Subjects of the probe, the knowledge geometry and the feature flow, and of the
            maps that callbacks and forecasts fit.
        n_lora: Number of LoRA edits, of forecasts, and of examples of the repair.
        n_full: Number of full edits, and of edits of each part that measure the repair.
        layers: Layers of the SAEs.
        texts: File of texts for SAEs and feature flow, such as that of fetch_texts.py; empty takes
            sentences about the tiny world.
        only: Names of studies; empty runs all. The feature flow reads the SAEs that "sparse
            autoencoders" trains: name both.
        options: Options added to each command, such as --trainer.limit_test_batches=1.
        show: Whether to print the table of the numbers that there are, and run none.
        output: File of the numbers; the table of the packaged one is put into docs/benchmarks.md.
    """
    path = Path(output)
    measured: dict[str, Any] = read_numbers(path) if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        planned = studies(n_subjects, n_lora, n_full, layers, texts, Path(folder))
        unknown = set(only) - set(planned)
        if unknown or (show and not measured):
            raise SystemExit(f"there is no study {unknown}" if unknown else f"{path} is empty")
        for study, command in planned.items() if not show else ():
            if only and study not in only:
                continue
            found = Path(folder) / "found.json"
            arguments = [
                *command, f"--model.lm.name_or_path={lm}", *options,
                "--trainer.callbacks+=profile_studies.CountForwards",
                f"--trainer.default_root_dir={folder}",
            ]  # fmt: skip
            # As in `lincorr`, modules are imported without garbage collection.
            code = (
                "import gc, sys, sampler; gc.disable(); own = sampler.Sampler(); own.start()\n"
                "import profile_studies; profile_studies.measure_from(own, *sys.argv[1:])"
            )
            path_of_python = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
            subprocess.run(
                [sys.executable, "-c", code, json.dumps(arguments), lm, str(found)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path_of_python)},
                check=True,
            )
            measured[study] = read_numbers(found)
            write_numbers(path, measured)
    found_table = table(measured)
    print(found_table)
    if path == RESULT:
        place_tables({"profile": found_table})


def measure_from(sampler: Sampler, arguments: str, lm: str, output: str) -> None:
    """Call `measure` in a process that has just begun."""
    gc.freeze()
    gc.enable()
    sys.argv[1:] = []
    measure(sampler, json.loads(arguments), lm, output)


if __name__ == "__main__":
    auto_cli(main)
