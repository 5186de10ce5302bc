"""Seconds per edit when LoRA edits are trained side by side, against one at a time with peft.

    python -m benchmarks.speed.stacked_edits

Every edit starts from the LM's own weights with a fresh adapter on all linear layers, and takes
AdamW steps on one answer token after its own prompt. With peft, the adapter is made once and reset
for each edit. The least of some repeats is shown; what was learned is the same to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from jsonargparse import auto_cli
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import least_time, markdown_table
from lincorr_lightning import Catalogue, LanguageModel
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.knowledge import build_domain
from lincorr_lightning.lm import sample_subjects

LEARNING_RATE = 1e-3


def last_logits(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    """The whole vocabulary's logits after each row, ``(n_rows, n_tokens)``."""
    last = rows["attention_mask"].sum(1) - 1
    return model(**rows, use_cache=False).logits[torch.arange(len(last)), last]


def train(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    rows: dict[str, Tensor],
    answers: Tensor,
    steps: int,
) -> Tensor:
    """Some AdamW steps on each row's answer; the logits afterwards."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(last_logits(model, rows), answers, reduction="sum").backward()
        optimizer.step()
    with torch.no_grad():
        return last_logits(model, rows)


def main(
    side_by_side: tuple[int, ...] = (1, 8, 32, 64, 128),
    n_edits: int = 128,
    steps: int = 10,
    rank: int = 8,
    lm: str = "tiny-world",
    repeats: int = 3,
    device: str = "cpu",
) -> None:
    """Measure.

    Args:
        side_by_side: Numbers of edits trained at once.
        n_edits: Number of edits; with few side by side, fewer of them are measured.
        steps: AdamW steps of each edit.
        rank: Rank of the adapters.
        lm: The LM, a folder, hub id or tiny-world.
        repeats: Number of runs of each row.
        device: cpu or cuda.
    """
    language_model = LanguageModel.from_pretrained(lm)
    model = language_model.model.to(device)
    taught = Catalogue.load()["city"]
    tokens = build_domain(taught, language_model.tokenizer).token_ids
    prompts = [taught.prompt(x) for x in sample_subjects(language_model.tokenizer, n_edits)]
    answers = torch.tensor([tokens[i % len(tokens)] for i in range(n_edits)], device=device)

    def rows_of(edits: range) -> dict[str, Tensor]:
        rows = language_model.encode([prompts[i] for i in edits])
        return {name: ids.to(device) for name, ids in rows.items()}

    print(
        f"{lm}, {device}, {steps} AdamW steps, rank {rank}, {torch.get_num_threads()} thread(s), "
        f"torch {torch.__version__}\n"
    )
    # The same starts for both: those of the stack.
    starts = StackedLoRA(copy.deepcopy(model), n_edits, AdapterSettings(rank, 2.0 * rank))
    targets = list(starts.targets)
    factors = [
        {
            f"base_model.model.{name}.{factor}.weight": held[name.replace(".", "/")][i].detach()
            for name in targets
            for factor, held in (("lora_A", starts.lora_A), ("lora_B", starts.lora_B))
        }
        for i in range(n_edits)
    ]

    stacked: dict[int, tuple[Tensor, float]] = {}
    for n in side_by_side:
        frozen = copy.deepcopy(model)  # a stack stays on its LM
        stack = StackedLoRA(frozen, n, AdapterSettings(rank, 2.0 * rank))
        measured = range(0, min(n_edits, max(n, 16)), n)

        def all_groups(
            stack: StackedLoRA = stack, starts: range = measured, model: nn.Module = frozen
        ) -> Tensor:
            done = []
            for first in starts:
                group = range(first, min(first + stack.n, n_edits))
                stack.reset(group)
                with stack.rows(range(len(group))):
                    parameters = list(stack.parameters())
                    done.append(train(model, parameters, rows_of(group), answers[group], steps))
            return torch.cat(done)

        all_groups()  # warm up
        logits, seconds = least_time(all_groups, repeats, device)
        stacked[n] = logits, seconds / len(logits)

    tuned = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    parameters = [p for p in tuned.parameters() if p.requires_grad]

    def one_by_one() -> Tensor:
        done = []
        for i in range(min(n_edits, 16)):
            set_peft_model_state_dict(tuned, factors[i])
            edit = range(i, i + 1)
            done.append(train(tuned.eval(), parameters, rows_of(edit), answers[edit], steps))
        return torch.cat(done)

    one_by_one()  # warm up
    theirs, seconds = least_time(one_by_one, repeats, device)
    alone = seconds / len(theirs)
    rows = [["one at a time, peft", f"{alone:.4f}", f"{1 / alone:.0f}", "1x", ""]]
    for n, (ours, each) in stacked.items():
        both = min(len(ours), len(theirs))
        difference = float((ours[:both] - theirs[:both]).abs().max() / theirs.abs().max())
        rows.append(
            [
                f"{n} side by side",
                f"{each:.4f}",
                f"{1 / each:.0f}",
                f"{alone / each:.1f}x",
                f"{difference:.0e}",
            ]
        )
    columns = ("trained", "seconds per edit", "edits per second", "faster", "logits differ by")
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    auto_cli(main)
