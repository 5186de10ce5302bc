"""What the studies cost on an LM of Llama-3 8B's size, from measured rates and counted prompts.

    python -m benchmarks.docs_tables.costs

puts the table into docs/costs.md, which says what is measured and what is not, and its summary into
README.md. Rates are those of benchmarks/results/speed; how many prompts a study reads follows from
its config.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml
from jsonargparse import auto_cli

from benchmarks.common import RESULTS, ROOT, place_tables, read_csv
from lincorr_lightning import Catalogue
from lincorr_lightning.reproduce.plan import plan_data
from lincorr_lightning.results.table import Table, column

N_EDITS = 100
FORWARDS_PER_STEP = 3  # a backward pass takes about two forward passes
EDIT_BYTES = 16  # of a parameter of an adapter: it, its gradient, two moments of AdamW
GIB = 2**30


def measured(file: str, **row: Any) -> Any:
    """Return the row of a file of benchmarks/results/speed with some values."""
    rows = read_csv(RESULTS / "speed" / f"{file}.csv", thousands=",")
    for name, value in row.items():
        rows = rows[rows[name] == value]
    return rows.iloc[0]


def config(name: str) -> dict[str, Any]:
    """Return the options of the model, the data and the callbacks of a packaged config, as one."""
    content = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    parts = [content["model"], content["data"], *content["trainer"].get("callbacks", [])]
    return {key: x for part in reversed(parts) for key, x in part.get("init_args", {}).items()}


LORA = config("source_finetune_lora")


@dataclass(frozen=True)
class Machine:
    """What reads an LM: prompts per second in batches, and seconds that a training step adds."""

    lm: str
    device: str
    bytes: float  # of the LM's weights
    load: float  # bytes per second from the disk
    layers: int = 32
    step: float = 0.0  # seconds of the calls of a training step, per layer

    def rate(self, way: str) -> float:
        """Return the prompts per second that were measured for a way to read."""
        about = {"lm": self.lm, "device": self.device, "kinds": 4, "way": way}
        return float(measured("reading", **about).rate)


@dataclass(frozen=True)
class Work:
    """What a study does."""

    study: str
    prompts: int  #: Read by a frozen LM.
    start: float  #: Seconds of everything that is not the LM's, as on the tiny world.
    loads: int = 1
    batches: tuple[int, ...] = ()  #: Edits of runs, trained side by side.
    gpus: tuple[int, ...] = (1, 8)

    def seconds(self, machine: Machine, gpus: int = 1) -> float:
        """Return how long it takes; GPUs share prompts and edits, and nothing else."""
        at_once, steps = LORA["edits_per_step"] * gpus, LORA["steps_per_edit"]
        reading = self.prompts / machine.rate("shared prefixes")
        edit_steps = sum(self.batches) * steps
        training = FORWARDS_PER_STEP * edit_steps / machine.rate("prompts one by one")
        turns = sum(steps * math.ceil(n / at_once) for n in self.batches)
        loading = self.loads * machine.bytes / machine.load
        calls = turns * machine.layers * machine.step
        return self.start + loading + calls + (reading + training) / gpus


@dataclass(frozen=True)
class StudyCost:
    """A row of the table."""

    study: str
    prompts: int | None = column("prompts read", ",d")
    loads: int | None = column("times loaded", "d")
    gpus: int = column("GPUs", "d")
    memory: float = column("memory of each, GiB", ".0f")
    minutes: float = column("minutes", ".1f")
    hours: float = column("GPU-hours", ".2f")


def probe(start: float) -> Work:
    """Return the work of the main job: each prompt and the unrelated one, of each subject."""
    options = config("linear_probe")
    kinds = len(options["knowledge"]) + 1
    return Work("probe, ten kinds", options["n_subjects"] * kinds, start)


def edits(start: float) -> Work:
    """Return the work of LoRA edits: maps of three callbacks, and readings of each edit."""
    maps = 3 * 2 * 2000  # the callbacks' n_subjects
    gradients = 3 * (LORA["steps_per_edit"] + 1)  # source, target and color
    outcomes = len(LORA["edit_steps"]) * (3 + LORA["n_others"])
    prompts = maps + N_EDITS * (gradients + outcomes)
    return Work(f"{N_EDITS} LoRA edits", prompts, start, batches=(N_EDITS,))


def edited(start: float, loads: int, study: str) -> Work:
    """Return the work of an edited LM: each edit in all wordings, and other people, in two LMs."""
    options = config("edited_lm")
    catalogue = Catalogue.load()
    wordings = sum(1 + len(catalogue[name].paraphrases) for name in ("city", "country"))
    of_lm = N_EDITS * (wordings + 1) + 2 * options["n_others"]
    of_edited = of_lm if loads == 2 else N_EDITS * (wordings + 1 + 2 * options["n_others"])
    prompts = of_lm + of_edited + 2 * options["n_subjects"]
    return Work(study, prompts, start, loads, gpus=(1,))


def paper() -> Work:
    """Return the work of ``lincorr reproduce --size quick``."""
    content = yaml.safe_load((ROOT / "configs" / "reproduce.yaml").read_text(encoding="utf-8"))
    sizes = content["sizes"]["quick"]
    groups = plan_data()["groups"]
    families = [kind.family for kind in Catalogue.load().values()]
    probes = [name.removeprefix("probe_") for name in groups["PROBES"]]
    kinds = [families.count(family) + 1 for family in probes] + [3]  # and beginnings of words
    runs = len({*groups["GRADIENTS"], *groups["EDITS"]}) + 2  # and two that tables need alone
    n_edits = sizes["edits"]["options"]["data.n_edits"]
    of_edit = 3 * 2 + 2 * (3 + LORA["n_others"])  # at its first step, and at its end
    prompts = sum(kinds) * sizes["probe"]["options"]["data.n_subjects"] + runs * n_edits * of_edit
    start = measured("commands", command="lincorr reproduce --size quick").wall
    return Work("the paper, quick", prompts, start, len(kinds) + runs, (n_edits,) * runs)


def adapter_bytes(width: int = 4096, values: int = 1024, mlp: int = 14336) -> float:
    """Return what the adapters take that are trained side by side, of Llama-3 8B's 32 layers."""
    shapes = [(width, width)] * 2 + [(width, values)] * 2 + [(width, mlp)] * 3
    n = 32 * LORA["adapter"]["rank"] * sum(sum(shape) for shape in shapes)
    return float(EDIT_BYTES * LORA["edits_per_step"] * n)


def costs(machine: Machine) -> Iterable[StudyCost]:
    """Yield the rows of the table."""
    forecast = measured("forecast", lm="llama-3-8b")
    minutes = forecast.seconds / 60
    yield StudyCost("forecast, 150 edits", None, None, 0, forecast.peak / 1024, minutes, 0.0)
    start = measured("commands", command="main job").wall
    each = f"{N_EDITS} LMs of one edit"
    works = [
        probe(start),
        edits(start),
        edited(start, 2, f"edited LM, {N_EDITS} edits"),
        edited(start, 1 + N_EDITS, each),
        paper(),
    ]
    # Of a forward pass of 32,768 tokens, four tensors of an MLP are the largest part.
    passes = 32768 * 14336 * 2 * 4
    for work in works:
        for gpus in work.gpus:
            seconds = work.seconds(machine, gpus)
            memory = machine.bytes + passes + (adapter_bytes() if work.batches else 0)
            about = work.study, work.prompts, work.loads, gpus, memory / GIB
            yield StudyCost(*about, seconds / 60, gpus * seconds / 3600)


def tables(gigabytes_per_second: float = 1.0) -> dict[str, str]:
    """Return the documents' parts."""
    load = 1e9 * gigabytes_per_second
    stacked = measured("stacked_edits", device="NVIDIA H200", side_by_side=64)
    step = 64 * stacked.seconds / 10 / 4  # ten steps; the tiny world has four layers
    table = Table.of(
        "costs", costs(Machine("llama-3-8b", "NVIDIA H200", 2 * 8.03e9, load, step=step)), StudyCost
    )
    forecast, probe_, edits_, edited_, _, paper_ = table.frame[table.frame.gpus < 2].minutes.map(
        "{:.1f}".format
    )
    cpu = Machine("smollm2-135m", "2 CPU threads", 4 * 135e6, load)
    return {
        "costs": f"On one H200, an LM of 8 billion parameters takes about {probe_} minutes for a "
        f"probe, {edits_} for {N_EDITS} LoRA edits,\n{edited_} for an edited LM and {paper_} for "
        f"`lincorr reproduce`; a forecast {forecast} without a GPU ([costs](docs/costs.md)).",
        "costs table": table.markdown(),
        "costs check": f"The same sum for SmolLM2-135M on two CPU cores gives "
        f"{paper().seconds(cpu) / 60:.0f} minutes for *the paper, quick*, which\ntook "
        "[19](reproduce.md#an-example).",
    }


def main(gigabytes_per_second: float = 1.0) -> None:
    """Compute, and put the tables into the documents.

    Args:
        gigabytes_per_second: How fast the LM's 16 GB are read from the disk.
    """
    place_tables(tables(gigabytes_per_second))


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
