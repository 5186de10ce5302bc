"""Stacked adapters in peft, LanguageModel, autocast, Lightning, and copied."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import peft
import pytest
import torch

from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm.finder import causal_lm_of
from lincorr_lightning.lm.language_model import LanguageModel
from tests.finetune.test_stacked_lora import (
    ALPHA,
    RANK,
    last_logits,
    loss_of,
    make_stack,
    peft_state,
    randomize,
    relative,
)  # fmt: skip
from tests.launching import quiet_trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_of_a_language_model(
    dtype: torch.dtype, make_lm: Callable[..., Path], tmp_path: Path
) -> None:
    lm = LanguageModel.from_pretrained(str(make_lm(tmp_path)), tokens_per_forward=9)
    lm.model.to(dtype)
    stack = StackedLoRA(lm.model, 3, RANK, ALPHA)
    randomize(stack)
    prompts = ["Paris", "name3 lives in the city of", "name7 name8 speaks", "Oslo"] * 2
    which = [2, 0, -1, 1, 1, 2, 0, -1]
    tokens = [3, 7, 11, 20]
    base = lm.domain_logits(prompts, tokens)
    expected = base.clone()
    for row, (prompt, i) in enumerate(zip(prompts, which, strict=True)):
        if i != -1:
            with stack.rows([i]):
                expected[row] = lm.domain_logits([prompt], tokens)[0]
    ours = lm.logits_of_rows(
        lm.rows(prompts), tokens, context=lambda rows: stack.rows([which[row] for row in rows])
    )
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    is_base = torch.tensor(which) == -1
    assert ((ours - base).abs().amax(1) > 1e-3)[~is_base].all()
    assert [reading.name for reading in lm._logit_methods.values()] == ["ROWS"]


def test_autocast_equals_peft_under_autocast(small: SimpleNamespace) -> None:
    model = small.model(small.architectures["llama"]())
    base = copy.deepcopy(model)
    stack = StackedLoRA(model, 2, RANK, alpha=2 * RANK)  # a power of two rounds nowhere
    randomize(stack)
    ids = torch.tensor([small.ids("Lima lives in the city of")])
    with stack.rows([1]), torch.autocast("cpu", torch.bfloat16):
        ours = model(input_ids=ids).logits
        ours.float().sum().backward()
    gradient = stack.lora_B["model/layers/0/self_attn/q_proj"].grad
    assert gradient is not None and gradient.dtype == torch.float32
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    tuned = peft.get_peft_model(base, config).eval()
    peft.set_peft_model_state_dict(tuned, peft_state(stack, 1))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = tuned(input_ids=ids).logits
    theirs.float().sum().backward()
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert relative(ours.float(), theirs.float()) < 0.02
    layer = tuned.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"]
    assert relative(gradient[1], layer.weight.grad) < 0.1


class Tuner(L.LightningModule):
    """Trains two adapters on one prompt each."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.some_lm = model
        self.adapters = StackedLoRA(model, 2, RANK, ALPHA)

    def training_step(self, rows: list[int], index: int) -> torch.Tensor:
        del index
        with self.adapters.rows([0, 1]):
            return loss_of(last_logits(self.some_lm, [rows[:3], rows]), [5, 6])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


def test_inside_a_lightning_module(small: SimpleNamespace, tmp_path: Path) -> None:
    model = small.model(small.architectures["llama-tied"]())
    tuner = Tuner(model)
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    names = [name for name, p in tuner.named_parameters() if p.requires_grad]
    assert len(names) == len(set(names)) == 2 * len(tuner.adapters.targets)
    assert all(name.startswith("adapters.lora_") for name in names)
    assert len(list(tuner.parameters())) == len(names) + len(list(model.parameters()))
    assert causal_lm_of(tuner) is model
    start = {name: p.clone() for name, p in tuner.adapters.named_parameters()}
    loader = torch.utils.data.DataLoader(
        [small.ids(small.prompts[1])] * 4, collate_fn=lambda x: x[0]
    )
    quiet_trainer(tmp_path).fit(tuner, loader)
    assert all(torch.equal(p, weights[name]) for name, p in model.state_dict().items())
    for name, parameter in tuner.adapters.named_parameters():
        assert not torch.equal(parameter, start[name])


def test_copy_works_by_itself(small: SimpleNamespace) -> None:
    model, stack = make_stack(small)
    ids = [small.ids(prompt) for prompt in small.prompts[:2]]
    with stack.rows([4, 5]):
        expected = last_logits(model, ids)
    twin = copy.deepcopy(torch.nn.ModuleDict({"model": model, "stack": stack}))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.zero_()
    with twin["stack"].rows([4, 5]):
        assert torch.equal(last_logits(twin["model"], ids), expected)
    with stack.rows([4, 5]):  # the copy leaves the original alone
        assert relative(last_logits(model, ids), expected) > 1e-3
