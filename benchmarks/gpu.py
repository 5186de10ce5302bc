"""What needs a GPU, in one call that runs unattended: speed, strategies, memory, a whole page.

    python benchmarks/gpu.py --lm path/to/checkpoint
    python benchmarks/gpu.py --device cpu --seconds 200    # tries the script
    python benchmarks/gpu.py --show true                   # prints the table

Each part is a process of its own. Its tables, seconds and peak memory go to
``benchmarks/results/gpu.json`` as soon as it ends; what fails, or does not end in the time that is
left, is a row that says so. Runs of `lincorr fit` are compared with the same run on the CPU.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
from jsonargparse import auto_cli
from numbers_file import read_numbers, write_numbers

from lincorr_lightning.results.table import markdown_table

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu.json"
PROBE = ("fit", "--config", "configs/linear_probe.yaml", "--trainer.enable_progress_bar=false")
LORA = ("fit", "--config", "configs/source_finetune_lora.yaml",
        "--trainer.enable_progress_bar=false")  # fmt: skip
# Reads prompts with less and less memory until batches are halved.
HALVING = """
import logging, sys, torch
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.lm.vocabulary import sample_up_to
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
lm = LanguageModel.from_pretrained(sys.argv[1], dtype="bfloat16")
lm.model.to("cuda")
prompts = [Catalogue.load()["city"].prompt(x) for x in sample_up_to(lm.tokenizer, 8192, seed=0)]
labels = list(range(100, 200))
expected = lm.domain_logits(prompts, labels)
peak = torch.cuda.max_memory_allocated()
loaded = torch.cuda.memory_allocated()
torch.cuda.empty_cache()
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((loaded + (peak - loaded) / 3) / total)
found = lm.domain_logits(prompts, labels)
print("| tokens per forward | largest difference |\\n| --- | --- |")
print(f"| {lm._batches.adapted} | {(found - expected).abs().max():.2g} |")
"""


class Part(NamedTuple):
    """A process.

    Attributes:
        name: What it measures.
        command: Its command line, after ``python``.
        run: Folder of its run, whose numbers are compared with those of the CPU.
    """

    name: str
    command: tuple[str, ...]
    run: Path | None = None


def parts(lm: str, device: str, folder: Path) -> Iterator[Part]:
    """Yield all parts, the most important first."""
    on_gpu = device == "cuda"
    shape, n, published = ("llama-3-8b", 10_000, 200) if on_gpu else ("small", 200, 20)
    yield Part(
        f"reading, shape {shape}",
        ("benchmarks/logits.py", "--device", device, "--shape", shape, "--n_subjects", str(n),
         "--dtypes", "[bfloat16]", "--published", str(published)),
    )  # fmt: skip
    yield Part(
        "LoRA edits",
        ("benchmarks/stacked_edits.py", "--lm", lm, "--device", device, "--side_by_side",
         "[1,64]" if on_gpu else "[1,8]", "--n_edits", "64" if on_gpu else "8"),
    )  # fmt: skip
    probe = (*PROBE, "--model.knowledge=attribute", "--data.n_subjects=2000")
    yield from _runs("probe", probe, lm, device, folder)
    yield from _runs("LoRA edits, callbacks", (*LORA, "--data.n_edits=32"), lm, device, folder)
    if on_gpu:
        yield Part("memory runs out", ("-c", HALVING, lm))
    yield Part(
        "the whole paper",
        ("-m", "lincorr_lightning", "reproduce", "--lm", lm, "--size",
         "paper" if on_gpu else "quick", "--output", str(folder / "page"),
         *(("--overlays", "trainer/gpu.yaml") if on_gpu else ("--only", "figure10"))),
    )  # fmt: skip


def _runs(
    name: str, command: tuple[str, ...], lm: str, device: str, folder: Path
) -> Iterator[Part]:
    """Yield one study with several strategies, that on the CPU first."""
    strategies: dict[str, tuple[str, ...]] = {"CPU": ()}
    if device == "cuda":
        strategies |= {
            "one GPU": ("--config", "configs/trainer/gpu.yaml"),
            "one GPU, torch.compile": (
                "--config", "configs/trainer/gpu.yaml", "--model.lm.compile=true",
            ),
            "ddp": ("--config", "configs/trainer/ddp.yaml"),
            "fsdp": ("--config", "configs/trainer/fsdp.yaml"),
        }  # fmt: skip
    for strategy, options in strategies.items():
        where = folder / f"{name}_{strategy}".replace(" ", "_").replace(",", "")
        yield Part(
            f"{name}: {strategy}",
            ("-m", "lincorr_lightning", *command, *options, f"--model.lm.name_or_path={lm}",
             f"--trainer.default_root_dir={where}"),
            where,
        )  # fmt: skip


def execute(part: Part, seconds: float) -> dict[str, Any]:
    """Run a part: its tables, seconds, and the most memory that the device had in use."""
    ended, used = Event(), [0]

    def watch() -> None:
        while not ended.wait(0.1):
            free, total = torch.cuda.mem_get_info()
            used.append(total - free)

    watcher = Thread(target=watch, daemon=True)
    if torch.cuda.is_available():
        watcher.start()
    start = time.perf_counter()
    found: dict[str, Any] = {}
    process = subprocess.Popen(
        [sys.executable, *part.command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": "."}, cwd=HERE.parent, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=seconds)
        found["tables"] = [line for line in output.splitlines() if line.startswith("|")]
        if process.returncode:
            found["error"] = (errors.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks that it launched, too
        process.communicate()
        found["error"] = f"not finished after {seconds:.0f} s"
    ended.set()
    found["seconds"] = time.perf_counter() - start
    found["peak_gib"] = max(used) / 2**30
    return found


def numbers_of(folder: Path) -> dict[str, float]:
    """The numbers of a run that do not depend on the machine, by their path in results.json."""
    (path,) = folder.rglob("results.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    found: dict[str, float] = {}

    def collect(value: Any, place: str) -> None:
        if isinstance(value, dict):
            for key, entry in value.items():
                collect(entry, f"{place}.{key}")
        elif isinstance(value, list):
            for i, entry in enumerate(value):
                collect(entry, f"{place}[{i}]")
        elif isinstance(value, float):
            found[place] = value

    for key in ("pairs", "gradients", "generalized", "hallucinated"):
        collect(content.get(key), key)
    return found


def difference(run: Path, reference: Path) -> float:
    """Return the largest difference of a run's numbers from those of another.

    Raises:
        ValueError: They do not have the same numbers.
    """
    ours, theirs = numbers_of(run), numbers_of(reference)
    if not theirs or ours.keys() != theirs.keys():
        raise ValueError(f"{run} and {reference} do not have the same numbers")
    return max(abs(ours[key] - theirs[key]) for key in theirs)


def table(content: dict[str, Any]) -> str:
    """All parts: seconds, memory, and how far their numbers are from those of the CPU."""
    rows = [
        [name, f"{one['seconds']:.0f}", f"{one['peak_gib']:.1f}",
         f"{one['difference']:.1e}" if "difference" in one else "", one.get("error", "")]
        for name, one in content["parts"].items()
    ]  # fmt: skip
    heading = f"{content['device']}, torch {content['torch']}, {content['lm']}\n\n"
    text = heading + markdown_table(
        ["part", "seconds", "peak GiB", "largest difference from the CPU", "error"], rows
    )
    for name, one in content["parts"].items():
        if one.get("tables"):
            text += f"\n\n{name}\n\n" + "\n".join(one["tables"])
    return text


def main(
    lm: str = "tiny-world",
    device: str = "cuda",
    seconds: float = 570.0,
    show: bool = False,
    output: str = str(RESULTS),
) -> None:
    """Measure all parts.

    Args:
        lm: The LM of all parts but the first, which has random weights.
        device: cuda, or cpu to try the script with small sizes.
        seconds: Time for all parts together.
        show: Whether to print the table of the results that there are, and measure nothing.
        output: File of the results.
    """
    if show:
        print(table(read_numbers(Path(output))))
        return
    end = time.perf_counter() + seconds
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    content: dict[str, Any] = {
        "device": name, "torch": torch.__version__, "lm": Path(lm).name, "parts": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        references: dict[str, Path] = {}
        for part in parts(lm, device, Path(folder)):
            left = end - time.perf_counter()
            found = execute(part, left) if left > 5 else {
                "error": "no time was left", "seconds": 0.0, "peak_gib": 0.0,
            }  # fmt: skip
            if part.run is not None and "error" not in found:
                study = part.name.partition(":")[0]
                reference = references.setdefault(study, part.run)
                try:
                    found["difference"] = difference(part.run, reference)
                except ValueError as error:
                    found["error"] = str(error)
            content["parts"][part.name] = found
            write_numbers(output, content)
    print(table(read_numbers(Path(output))))


if __name__ == "__main__":
    auto_cli(main)
