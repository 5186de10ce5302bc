"""Seconds per edit when LoRA edits are trained side by side, against one at a time with peft.

    python -m benchmarks.speed.stacked_edits

Every edit starts from the LM's own weights with a fresh adapter on all linear layers, and takes
AdamW steps on one answer token after its own prompt. With peft, the adapter is made once and reset
for each edit. The least of some repeats counts; that both learn the same is tested. Rows go to
``benchmarks/results/speed/stacked_edits.csv`` and into docs/benchmarks.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import common
from benchmarks.speed.reading import timed
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.knowledge import build_domain
from lincorr_lightning.lm import sample_subjects
from lincorr_lightning.lm.finder import target_layers
from lincorr_lightning.results.table import Table, column

RANK = 8
N_ALONE = 16  # edits of which the time of one is measured


@dataclass(frozen=True)
class EditSpeed:
    """Seconds per edit of a number of edits side by side; 0 is one at a time with peft."""

    lm: str = column("LM")
    device: str = column()
    side_by_side: int = column(format="d")
    seconds: float = column("seconds per edit", ".4f")
    faster: float = column("times as fast as peft", ".1f")


def train(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    rows: dict[str, Tensor],
    answers: Tensor,
    steps: int,
    learning_rate: float = 1e-3,
) -> None:
    """Take some AdamW steps on each row's answer."""
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    last = rows["attention_mask"].sum(1) - 1
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(**rows, use_cache=False).logits[torch.arange(len(last)), last]
        F.cross_entropy(logits, answers, reduction="sum").backward()
        optimizer.step()


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
        ids, mask = language_model.pad(language_model.rows([prompts[i] for i in edits]))
        return {"input_ids": ids, "attention_mask": mask}

    def groups_of(n: int) -> list[range]:
        measured = min(n_edits, max(n, N_ALONE))
        return [range(first, min(first + n, n_edits)) for first in range(0, measured, n)]

    def seconds(work: Callable[[], None], n: int) -> float:
        """Return the seconds per edit: the least of some repeats after a first one."""
        found = [timed(work, device)[1] for _ in range(1 + repeats)]
        return min(found[1:]) / sum(map(len, groups_of(n)))

    def stacked(n: int) -> float:
        frozen = copy.deepcopy(model)  # a stack stays on its LM
        stack = StackedLoRA(frozen, n, settings)

        def all_groups() -> None:
            for group in groups_of(n):
                stack.reset(group)
                with stack.rows(range(len(group))):
                    train(frozen, [*stack.parameters()], rows_of(group), answers[group], steps)

        return seconds(all_groups, n)

    by_size = {n: stacked(n) for n in side_by_side}
    targets = [*target_layers(model, None)]
    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets)
    )
    parameters = [p for p in tuned.eval().parameters() if p.requires_grad]
    fresh = copy.deepcopy(peft.get_peft_model_state_dict(tuned))

    def one_by_one() -> None:
        for edit in groups_of(1):
            peft.set_peft_model_state_dict(tuned, fresh)
            train(tuned, parameters, rows_of(edit), answers[edit], steps)

    alone = seconds(one_by_one, 1)
    about = Path(lm).name, device if device == "cpu" else torch.cuda.get_device_name()
    rows = [EditSpeed(*about, n, each, alone / each) for n, each in {0: alone, **by_size}.items()]
    table = Table.of("stacked_edits", rows)
    table = common.add_rows(table, "lm", "device", "side_by_side")
    common.place_tables(
        {"stacked edits": common.shown(table, "lm device side_by_side seconds faster")}
    )


if __name__ == "__main__":
    auto_cli(main)
