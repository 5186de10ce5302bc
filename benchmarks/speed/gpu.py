"""What needs a GPU, in one call that runs unattended: speed, strategies, a whole page.

    python -m benchmarks.speed.gpu --lm path/to/checkpoint
    python -m benchmarks.speed.gpu --device cpu --seconds 200    # tries the script

It covers each code path that differs by device (docs/many_gpus.md). Each part is a process of its
own. Tables and seconds go to ``benchmarks/results/gpu.json``, those of a trial nowhere; what fails
or does not end in time is a row that says so. Runs are compared with the same ones on the CPU.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import auto_cli

from benchmarks import common

PROBE = ("fit", "--config", "configs/linear_probe.yaml", "--model.ridge=0", common.QUIET)
LORA = ("fit", "--config", "configs/source_finetune_lora.yaml", common.QUIET)
STUDIES = {  # on the tiny world
    "edited LM": ("test", "--config", "configs/edited_lm.yaml", common.QUIET),
    "ablation": ("fit", "--config", "configs/vocabulary_ablation.yaml", common.QUIET),
    "causal": ("fit", "--config", "configs/causal.yaml", common.QUIET),
    "token geometry": ("test", "--config", "configs/token_geometry.yaml", common.QUIET),
    "feature flow": ("test", "--config", "configs/feature_flow.yaml", common.QUIET),
}
# What results.json has that does not depend on the machine.
NUMBERS = (
    "pairs",
    "gradients",
    "generalized",
    "hallucinated",
    "runs",
    "intervention",
    "shuffles",
    "spearman",
    "groups",
)


class Part(NamedTuple):
    """A process: what it measures, its command line after ``python``, and its run's folder.

    The numbers of a run are compared with those of the CPU.
    """

    name: str
    command: tuple[str, ...]
    run: Path | None = None


def parts(lm: str, device: str, folder: Path) -> Iterator[Part]:
    """Yield all parts, the most important first."""
    on_gpu = device == "cuda"
    shape, n = ("llama-3-8b", 8192) if on_gpu else ("small", 200)
    yield Part(
        f"reading, shape {shape}",
        (
            "-m",
            "benchmarks.speed.reading",
            f"--device={device}",
            f"--shape={shape}",
            f"--n_subjects={n}",
            "--dtype=bfloat16",
            "--n_published=8",
            f"--part_size={2048 if on_gpu else 64}",
        ),
    )
    yield Part(
        "LoRA edits",
        (
            "-m",
            "benchmarks.speed.stacked_edits",
            "--lm",
            lm,
            "--device",
            device,
            "--side_by_side",
            "[1,64]" if on_gpu else "[1,8]",
            "--n_edits",
            "64" if on_gpu else "8",
        ),
    )
    probe = (*PROBE, "--model.knowledge=attribute", "--data.n_subjects=2000")
    lora = (*LORA, "--data.n_edits=32", f"--model.lm.name_or_path={lm}")
    yield from _runs("probe", (*probe, f"--model.lm.name_or_path={lm}"), device, folder)
    yield from _runs("LoRA edits, callbacks", lora, device, folder)
    yield Part(
        "the whole paper",
        (
            "-m",
            "lincorr_lightning",
            "reproduce",
            "--lm",
            lm,
            "--output",
            str(folder / "page"),
            *(("--overlays", "trainer/gpu.yaml") if on_gpu else ("--only", "figure10")),
        ),
    )
    for name, command in STUDIES.items():
        yield from _runs(f"{name} (tiny world)", command, device, folder)


def _runs(name: str, command: tuple[str, ...], device: str, folder: Path) -> Iterator[Part]:
    """Yield one study with several strategies, the CPU first; on the tiny world, with few."""
    strategies: dict[str, tuple[str, ...]] = {"CPU": ()}
    own: tuple[str, ...] = ()
    if device == "cuda":
        strategies["one GPU"] = own = "--config", "configs/trainer/gpu.yaml"
        if "tiny world" not in name:
            strategies["ddp"] = "--config", "configs/trainer/ddp.yaml"
    if device == "cuda" and name == "probe":
        strategies["fsdp"] = "--config", "configs/trainer/fsdp.yaml"
        strategies["one GPU, torch.compile"] = *own, "--model.lm.compile=true"
    if name == "probe":
        states = (*own, f"--model.lm.state_cache={folder / 'states'}")
        strategies |= {f"{device}, states written": states, f"{device}, states read": states}
    for strategy, options in strategies.items():
        where = folder / re.sub(r"\W+", "_", f"{name} {strategy}")
        root = f"--trainer.default_root_dir={where}"
        words = "-m", "lincorr_lightning", *command, *options, root
        yield Part(f"{name}: {strategy}", words, where)


def execute(part: Part, seconds: float) -> dict[str, Any]:
    """Run a part, and return its tables and seconds, and its error if it has one."""
    start = time.perf_counter()
    found: dict[str, Any] = {}
    process = subprocess.Popen(
        [sys.executable, *part.command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=common.ROOT,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
        found["tables"] = [line for line in output.splitlines() if line.startswith("|")]
        if process.returncode:
            found["error"] = (errors.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks that it launched, too
        process.communicate()
        found["error"] = f"not finished after {seconds:.0f} s"
    return found | {"seconds": time.perf_counter() - start}


def numbers_in(value: Any) -> Iterator[float]:
    """Yield the numbers with a fraction within lists and mappings, in their order."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(entry)


def difference(run: Path, reference: Path) -> tuple[float, float]:
    """Return how far a run's numbers are from another's: at most, and in the mean.

    Those that do not depend on the machine are compared; ValueError if they are not the same ones.
    """
    contents = (
        common.read_numbers(next(folder.rglob("results.json"))) for folder in (run, reference)
    )
    own, other = ([*numbers_in([found.get(key) for key in NUMBERS])] for found in contents)
    if not other or len(own) != len(other):
        raise ValueError(f"{run} and {reference} do not have the same numbers")
    found = [abs(a - b) for a, b in zip(own, other, strict=True)]
    return max(found), sum(found) / len(found)


def table(content: dict[str, Any]) -> str:
    """Return all parts: seconds, and how far their numbers are from those of the CPU."""
    rows = []
    for name, one in content["parts"].items():
        seconds = f"{one['seconds']:.0f}" if "seconds" in one else ""
        apart = " / ".join(f"{x:.0e}" for x in one.get("difference", ()))
        rows.append([name, seconds, apart, one.get("error", "")])
    text = (
        f"{content['device']}, torch {content['torch']}, {content['lm']}\n\n"
        + common.markdown_table(
            ["part", "seconds", "difference from the CPU, largest / mean", "error"], rows
        )
    )
    for name, one in content["parts"].items():
        if one.get("tables"):
            text += f"\n\n{name}\n\n" + "\n".join(one["tables"])
    return text


def main(
    lm: str = "tiny-world",
    device: str = "cuda",
    seconds: float = 570.0,
    only: tuple[str, ...] = ("",),
) -> None:
    """Measure all parts.

    Args:
        lm: The LM of all parts but the first, which has random weights.
        device: cuda, or cpu to try the script with small sizes.
        seconds: Time for all parts together.
        only: Beginnings of the names of the parts that are measured; others stay as they are.
    """
    end = time.perf_counter() + seconds
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    about = {"device": name, "torch": torch.__version__}
    content: dict[str, Any] = {"lm": Path(lm).name, "parts": {}}
    with tempfile.TemporaryDirectory() as folder:
        file = (common.RESULTS if device == "cuda" else Path(folder)) / "gpu.json"
        content = (common.read_numbers(file) if file.exists() else content) | about
        references: dict[str, Path] = {}
        for part in (x for x in parts(lm, device, Path(folder)) if x.name.startswith(only)):
            left = end - time.perf_counter()
            late = {"error": "no time was left", "seconds": 0.0}
            found = execute(part, left) if left > 5 else late
            if part.run is not None and "error" not in found:
                study, _, strategy = part.name.partition(": ")
                if strategy == "CPU":
                    references[study] = part.run
                elif study in references:
                    try:
                        found["difference"] = difference(part.run, references[study])
                    except ValueError as error:
                        found["error"] = str(error)
            content["parts"][part.name] = found
            common.write_numbers(file, content)
    text = table(content)
    print(text)
    if device == "cuda":
        common.place_tables({"gpu": text})


if __name__ == "__main__":
    auto_cli(main)
