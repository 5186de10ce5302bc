"""Seconds per edit when LoRA edits are trained side by side, against one at a time with peft.

    python -m benchmarks.speed.stacked_edits

Every edit starts from the LM's own weights with a fresh adapter on all linear layers, and takes
AdamW steps on one answer token after its own prompt. With peft, the adapter is made once and reset
for each edit. The least of some repeats counts; what was learned is the same to rounding. Rows go
to ``benchmarks/results/speed/stacked_edits.csv`` and into docs/benchmarks.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jsonargparse import auto_cli
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import RESULTS, add_rows, place_tables, shown
from benchmarks.speed.reading import timed
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.knowledge import build_domain
from lincorr_lightning.lm import sample_subjects
from lincorr_lightning.results.table import Table, column

RANK = 8
N_ALONE = 16  # edits of which the time of one is measured


@dataclass(frozen=True)
class Speed:
    """Seconds per edit of a number of edits side by side; 0 is one at a time with peft."""

    lm: str = column("LM")
    device: str = column()
    side_by_side: int = column(format="d")
    seconds: float = column("seconds per edit", ".4f")
    faster: float = column("times as fast as peft", ".1f")
    differs: float | None = column("logits differ by", ".0e")


def last_logits(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    """Return the whole vocabulary's logits after each row, ``(n_rows, n_tokens)``."""
    last = rows["attention_mask"].sum(1) - 1
    return model(**rows, use_cache=False).logits[torch.arange(len(last)), last]


def train(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    rows: dict[str, Tensor],
    answers: Tensor,
    steps: int,
    learning_rate: float = 1e-3,
) -> Tensor:
    """Take some AdamW steps on each row's answer, and return the logits afterwards."""
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(last_logits(model, rows), answers, reduction="sum").backward()
        optimizer.step()
    with torch.no_grad():
        return last_logits(model, rows)


def least_time(work: Callable[[], Tensor], repeats: int, device: str) -> tuple[Tensor, float]:
    """Return what `work` returns, and its seconds: the least of some repeats after a first one."""
    results, seconds = zip(*(timed(work, device) for _ in range(1 + repeats)), strict=True)
    return results[-1], min(seconds[1:])


def main(
    side_by_side: tuple[int, ...] = (1, 8, 32, 64, 128),
    n_edits: int = 128,
    steps: int = 10,
    lm: str = "tiny-world",
    repeats: int = 3,
    device: str = "cpu",
) -> None:
    """Measure.

    Args:
        side_by_side: Numbers of edits trained at once.
        n_edits: Number of edits; with few side by side, fewer of them are measured.
        steps: AdamW steps of each edit.
        lm: The LM, a folder, hub id or tiny-world.
        repeats: Number of runs of each row.
        device: cpu or cuda.
    """
    language_model = LanguageModel.from_pretrained(lm)
    model = language_model.model.to(device)
    settings = AdapterSettings(rank=RANK, alpha=2.0 * RANK)
    city = Catalogue.load()["city"]
    tokens = build_domain(city, language_model.tokenizer).token_ids
    prompts = [city.prompt(x) for x in sample_subjects(language_model.tokenizer, n_edits)]
    answers = torch.tensor([tokens[i % len(tokens)] for i in range(n_edits)], device=device)

    def rows_of(edits: range) -> dict[str, Tensor]:
        rows = language_model.encode([prompts[i] for i in edits])
        return {name: ids.to(device) for name, ids in rows.items()}

    # The same starts for both: those of the stack.
    starts = StackedLoRA(copy.deepcopy(model), n_edits, settings)
    targets = list(starts.targets)

    def factors(i: int) -> dict[str, Tensor]:
        return {
            f"base_model.model.{name}.{factor}.weight": part[name.replace(".", "/")][i].detach()
            for name in targets
            for factor, part in (("lora_A", starts.lora_A), ("lora_B", starts.lora_B))
        }

    stacked: dict[int, tuple[Tensor, float]] = {}
    for n in side_by_side:
        frozen = copy.deepcopy(model)  # a stack stays on its LM
        stack = StackedLoRA(frozen, n, settings)

        def all_groups(stack: StackedLoRA = stack, model: nn.Module = frozen) -> Tensor:
            done = []
            for first in range(0, min(n_edits, max(stack.n, N_ALONE)), stack.n):
                group = range(first, min(first + stack.n, n_edits))
                stack.reset(group)
                with stack.rows(range(len(group))):
                    parameters = list(stack.parameters())
                    done.append(train(model, parameters, rows_of(group), answers[group], steps))
            return torch.cat(done)

        stacked[n] = least_time(all_groups, repeats, device)

    tuned = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets))
    parameters = [p for p in tuned.parameters() if p.requires_grad]

    def one_by_one() -> Tensor:
        done = []
        for i in range(min(n_edits, N_ALONE)):
            set_peft_model_state_dict(tuned, factors(i))
            edit = range(i, i + 1)
            done.append(train(tuned.eval(), parameters, rows_of(edit), answers[edit], steps))
        return torch.cat(done)

    expected, seconds = least_time(one_by_one, repeats, device)
    alone = seconds / len(expected)
    about = Path(lm).name, device if device == "cpu" else torch.cuda.get_device_name()
    rows = [Speed(*about, 0, alone, 1.0, None)]
    for n, (logits, seconds) in stacked.items():
        each = seconds / len(logits)
        both = min(len(logits), len(expected))
        error = (logits[:both] - expected[:both]).abs().max() / expected.abs().max()
        rows.append(Speed(*about, n, each, alone / each, float(error)))
    table = Table.of("stacked_edits", rows)
    print(table.markdown())
    table = add_rows(table, ("lm", "device", "side_by_side"), RESULTS / "speed")
    place_tables({"stacked edits": shown(table, "lm device side_by_side seconds faster")})


if __name__ == "__main__":
    auto_cli(main)
