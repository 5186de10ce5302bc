"""How time and memory of a probe grow.

    python -m benchmarks.speed.growth
    python -m benchmarks.speed.growth --only "[labels]" --n 3
    python -m benchmarks.speed.growth --only "[LM]" --lms "[FOLDER, OTHER]"
    python -m benchmarks.speed.growth --only "[studies]"

Each row is a `lincorr fit` in a process of its own on one thread: processor seconds and peak
memory. Subjects, labels and kinds of knowledge grow on the tiny world; parameters in LMs with
random weights, of Llama's shape and the tiny world's words. Exponents are those of
``constant + factor * size ** exponent``. The studies are the shipped configs (`CUT` shortens some,
not their peak).

Numbers are kept in ``benchmarks/results/growth.json``, from which the documents' tables are made.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from jsonargparse import auto_cli
from scipy.optimize import nnls

from benchmarks import common
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.lm import LMConfig, usable_strings
from lincorr_lightning.results.saved_run import config_verb

Rows = Iterator[tuple[str, tuple[str, ...]]]
RESULT = common.RESULTS / "growth.json"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
LINCORR = (sys.executable, "-m", "lincorr_lightning")
PROBE = (
    "fit",
    "--config=linear_probe.yaml",
    "--model.ridge=0",
    "--model.require_reference=[]",
    common.QUIET,
)
TWO = "--model.knowledge=[city, country]"
SHAPES = {"15M": (320, 9), "135M": (768, 14), "500M": (1280, 19), "1.5B": (2048, 22)}
"""Width and number of layers."""
STUDIES = (
    "linear_probe",
    "correlation_matrix",
    "resilience",
    "source_finetune",
    "source_finetune_lora",
    "forecast",
    "vocabulary_ablation",
    "token_geometry",
    "pretraining",
    "sparse_autoencoders",
    "feature_flow",
)
CUT = {
    "pretraining": ("--trainer.max_steps=100", "--trainer.limit_val_batches=2"),
}


def sweep(name: str, folder: Path, lms: Sequence[str]) -> Rows:
    """Yield the sizes of a sweep, each with the options of its run."""
    if name == "subjects":
        for n in (1000, 2000, 5000, 10_000):
            yield f"{n:,}", (TWO, f"--data.n_subjects={n}", "--data.words_per_subject=2")
    elif name == "labels":
        words = usable_strings(LanguageModel(LMConfig()).tokenizer, whole_words=True)
        for n in (20, 60, 180, 500, 1000):
            path = folder / f"{n}.yaml"
            path.write_text(knowledge_of(words[:n]), encoding="utf-8")
            yield (
                f"{n:,}",
                (
                    f"--model.knowledge_files=[{path}]",
                    "--model.knowledge=[first, second]",
                    "--data.n_subjects=2200",
                ),
            )
    elif name == "kinds":
        names = list(Catalogue.load().select(["attribute"]))
        for n in (2, 5, 10, 23, 67):
            chosen = ", ".join(kind.name for kind in names[:n]) if n < 67 else "all"
            yield f"{n}", (f"--model.knowledge=[{chosen}]", "--data.n_subjects=400")
    elif name == "LM":
        for lm in lms:
            yield Path(lm).name, (f"--model.lm.name_or_path={lm}", "--data.n_subjects=200")
        for shape in () if lms else SHAPES:
            lm = str(stored_lm(shape, folder))
            yield shape, (TWO, f"--model.lm.name_or_path={lm}", "--data.n_subjects=100")
    else:
        raise SystemExit(f"{name} does not grow; --only has subjects, labels, kinds, LM")


def knowledge_of(words: Sequence[str]) -> str:
    """Return a file with two kinds of knowledge whose answers are these words."""
    places = {"city": "first", "country": "second"}
    kinds = {
        name: {
            "family": "attribute",
            "language": "en",
            "answers": "word",
            "template": f"{{}} lives in the {place} of",
        }
        for place, name in places.items()
    }
    entities = {"word": {word: {} for word in words}}
    return json.dumps(
        {"version": 1, "source": "vocabulary", "entities": entities, "knowledge": kinds}
    )


def stored_lm(shape: str, folder: Path, lm: str = "tiny-world") -> Path:
    """Return the folder of an LM with random weights and the tokenizer of another LM."""
    tokenizer, (width, n_layers) = LanguageModel(LMConfig(lm)).tokenizer, SHAPES[shape]
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=n_layers,
        num_attention_heads=width // 64,
    )
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for part in (model, tokenizer):
        part.save_pretrained(folder / shape)
    return folder / shape


def measure(name: str, lms: Sequence[str], repeats: int) -> dict[str, dict[str, float]]:
    """Return what each size of a sweep takes: the least of some runs."""
    found = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for size, options in sweep(name, folder, lms):
            root = folder / "runs" / size
            command = [*LINCORR, *PROBE, *options, f"--trainer.default_root_dir={root}"]
            runs = [common.cost_of(command, cwd=folder, env=ONE_THREAD) for _ in range(repeats)]
            results = json.loads(next(root.rglob("results.json")).read_text(encoding="utf-8"))
            is_lm = name == "LM"
            found[size] = {
                "size": results["lm"]["n_parameters"] if is_lm else float(size.replace(",", "")),
                "seconds": min(run.processor for run in runs),
                "MiB": min(run.peak_mib for run in runs),
            }
    return found


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """Return the exponent of ``constant + factor * size ** exponent``, by relative least squares.

    None of costs that do not grow, by less than a twentieth, and of fewer than three sizes.

    Example:
        >>> exponent([1, 2, 4, 8], [5 + 3 * n**2 for n in (1, 2, 4, 8)])
        2.0
    """
    x, y = np.array(sizes) / max(sizes), np.array(costs)
    if len(y) < 3 or np.ptp(y) < y.min() / 20:
        return None

    def misfit(power: float) -> float:
        parts = np.stack([np.ones_like(x), x**power], 1) / y[:, None]
        return float(nnls(parts, np.ones_like(y))[1])

    return min((round(0.05 * i, 2) for i in range(2, 61)), key=misfit)


def growth_table(content: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return all sweeps, and the exponents of each in its first row."""
    rows = []
    for name, sizes in content.items():
        x = [one["size"] for one in sizes.values()]
        for size, one in sizes.items():
            is_first = one is next(iter(sizes.values()))
            slopes = [
                exponent(x, [each[key] for each in sizes.values()]) if is_first else None
                for key in ("seconds", "MiB")
            ]
            rows.append(
                [
                    name,
                    size,
                    f"{one['seconds']:,.0f}",
                    common.two(slopes[0]),
                    f"{one['MiB']:,.0f}",
                    common.two(slopes[1]),
                ]
            )
    return common.markdown_table(
        [
            "grows",
            "size",
            "processor, s",
            "exponent",
            "peak, MiB",
            "exponent",
        ],
        rows,
    )


def studies_table() -> str:
    """Return the peak memory of each study as it ships."""
    libraries = common.cost_of([sys.executable, "-c", "import lincorr_lightning.cli.lightning_cli"])
    rows = [["(libraries alone)", f"{libraries.peak_mib:.0f} MiB", f"{libraries.wall:.0f}"]]
    for study in STUDIES:
        text = (common.ROOT / "configs" / f"{study}.yaml").read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            command = [*LINCORR, config_verb(text), f"--config={study}.yaml", common.QUIET]
            where = f"--trainer.default_root_dir={folder}"
            cost = common.cost_of([*command, where, *CUT.get(study, ())])
        name = f"{study} (cut short)" if study in CUT else study
        rows.append([name, f"{cost.peak_mib:.0f} MiB", f"{cost.wall:.0f}"])
    return common.markdown_table(("study", "peak memory", "seconds"), rows)


def main(
    n: int = 1,
    only: tuple[str, ...] = ("subjects", "labels", "kinds", "LM"),
    lms: tuple[str, ...] = (),
) -> None:
    """Measure, and put the tables into the documents.

    Args:
        n: Runs of each size, of which the least counts.
        only: What grows, or studies, which is printed alone.
        lms: Folders of LMs that are measured in place of the shapes.
    """
    tables = {}
    for name in only:
        if name == "studies":
            print(studies_table())
        else:
            known: dict[str, Any] = common.read_numbers(RESULT) if RESULT.exists() else {}
            key = "real LM" if lms else name
            common.write_numbers(RESULT, known | {key: measure(name, lms, n)})
            tables["growth"] = growth_table(common.read_numbers(RESULT))
    print("\n\n".join(tables.values()))
    common.place_tables(tables)


if __name__ == "__main__":
    auto_cli(main)
