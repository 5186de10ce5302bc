"""A step along an edit's first update, against copies of the LM that are moved the plain way."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lincorr_lightning.errors import NonFiniteError
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.optimizer_step import logits_after_step
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm.language_model import LanguageModel

SOURCES = ["Paris lives in the city of", "One day Oslo lives in the city of"]
TARGETS = ["Paris lives in the country of", "Oslo"]
TOKENS = [17, 22, 30]
EDITS = [
    Edit("Paris", "a", (7,), 0, (0,), 0, 0),
    Edit("Oslo", "b c", (9, 12), 1, (1,), 0, 0),
]
FULL = EditTraining("full", learning_rate=0.01, n_steps=10)
LORA = EditTraining("lora", 0.5, 10, AdapterSettings(rank=2, alpha=6.0, seed=5))


def language_model(
    small: SimpleNamespace, architecture: str, dtype: torch.dtype = torch.float64
) -> LanguageModel:
    model = small.model(small.config(architecture)).to(dtype)
    model.requires_grad_(False)
    return LanguageModel.from_module(model, small.tokenizer())


def steps(lm: LanguageModel, training: EditTraining, which: Any = (0, 1), **options: Any) -> Tensor:
    relation: Any = SimpleNamespace(
        source_prompts=lambda _: [SOURCES[i] for i in which],
        target_prompts=lambda _: [TARGETS[i] for i in which],
        target=SimpleNamespace(token_ids=TOKENS),
    )
    return logits_after_step(lm, [EDITS[i] for i in which], relation, training, **options)


def loss_of(model: Any, source: list[int], answer: tuple[int, ...]) -> Tensor:
    """The mean cross-entropy of the answer's tokens, written out."""
    logits = model(input_ids=torch.tensor([[*source, *answer]]), use_cache=False).logits[0]
    parts = [
        logits[len(source) - 1 + i].logsumexp(0) - logits[len(source) - 1 + i, token]
        for i, token in enumerate(answer)
    ]
    return torch.stack(parts).mean()


@torch.no_grad()
def target_logits(model: Any, row: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1, TOKENS].double()


def full_step(lm: LanguageModel, source: list[int], edit: Edit, scale: float) -> Any:
    """A copy of the LM after torch's own AdamW has made one step of the length."""
    model: Any = copy.deepcopy(lm.model).requires_grad_(True)
    loss = loss_of(model, source, edit.tokens)
    loss.backward()
    slope = sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)
    length = min(scale * loss.item() / slope, FULL.n_steps * FULL.learning_rate)
    torch.optim.AdamW(model.parameters(), lr=length, weight_decay=0.0).step()
    return model, length


def test_all_weights_move_as_adamw_moves_them(architecture, small):
    lm = language_model(small, architecture)
    lengths = []
    for scale in (0.5, 2.0, 1e6):
        ours = steps(lm, FULL, scale=scale)
        for i, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
            model, length = full_step(lm, small.ids(source), EDITS[i], scale)
            lengths.append(length)
            expected = target_logits(model, small.ids(target))
            torch.testing.assert_close(ours[i], expected, rtol=1e-5, atol=1e-5)
    assert lengths[0] < lengths[2] <= lengths[4] == FULL.n_steps * FULL.learning_rate


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "opt"])
def test_adapters_move_as_the_product_of_their_factors(name, small):
    lm = language_model(small, name)
    scale = 0.7
    ours = steps(lm, LORA, scale=scale)
    for i, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        stack = StackedLoRA(lm.model, 1, LORA.adapter)
        stack.reset([5 + i])  # of the adapter's seed and the edit's position
        reads = {k.replace("/", "."): factor[0].double() for k, factor in stack.lora_A.items()}
        stack.remove()
        model: Any = copy.deepcopy(lm.model).requires_grad_(True)
        loss = loss_of(model, small.ids(source), EDITS[i].tokens)
        loss.backward()
        gradients, slope = {}, 0.0
        for layer, read in reads.items():
            weight = model.get_submodule(layer).weight
            # GPT-2's layers hold their matrices transposed.
            whole = weight.grad.T if name == "gpt2" else weight.grad
            gradients[layer] = 3.0 * whole @ read.T
            slope += float(gradients[layer].abs().sum())
        length = scale * loss.item() / slope
        assert length < 2 * LORA.n_steps * LORA.learning_rate
        with torch.no_grad():
            for layer, gradient in gradients.items():
                weight = model.get_submodule(layer).weight
                change = -3.0 * length * gradient.sign() @ reads[layer]
                weight += change.T if name == "gpt2" else change
        expected = target_logits(model, small.ids(target))
        torch.testing.assert_close(ours[i], expected, rtol=1e-4, atol=1e-4)


def test_adapters_go_at_most_twice_as_far_as_their_optimizer(small):
    lm = language_model(small, "llama")
    near = EditTraining("lora", 1e-5, 10, LORA.adapter)
    capped = steps(lm, near, scale=1e9)
    twice = steps(lm, EditTraining("lora", 1e-5, 20, LORA.adapter), scale=1e9)
    before = lm.domain_logits(TARGETS, TOKENS)
    # So short a step is linear in its length.
    torch.testing.assert_close(twice - before, 2 * (capped - before), rtol=0.02, atol=1e-6)
    assert (capped - before).abs().max() > 1e-5


@pytest.mark.parametrize("training", [FULL, LORA], ids=["full", "lora"])
def test_together_as_one_by_one(small, training):
    lm = language_model(small, "llama")
    together = steps(lm, training)
    torch.testing.assert_close(steps(lm, training, [0]), together[:1])
    assert together.shape == (2, 3)
    assert steps(lm, training, []).shape == (0, 3)
    if training is LORA:
        stack = StackedLoRA(lm.model, 1, LORA.adapter)  # of the run, and fewer than edits
        torch.testing.assert_close(steps(lm, LORA, adapters=stack), together)
        assert all(not factor.any() for factor in stack.lora_B.values())


def test_only_what_is_trained_moves(small):
    lm = language_model(small, "llama")
    layer = lm.model.get_submodule("model.layers.0.mlp.down_proj")
    layer.requires_grad_(True)
    ours = steps(lm, FULL, [0], scale=1.0)
    model: Any = copy.deepcopy(lm.model)
    loss = loss_of(model, small.ids(SOURCES[0]), EDITS[0].tokens)
    (gradient,) = torch.autograd.grad(loss, [model.model.layers[0].mlp.down_proj.weight])
    length = min(float(loss / gradient.abs().sum()), 0.1)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight -= length * gradient.sign()
    expected = target_logits(model, small.ids(TARGETS[0]))
    torch.testing.assert_close(ours[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("training", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "bloom"])
def test_an_lm_is_left_as_it_was(name, small, training):
    model = small.model(small.config(name)).requires_grad_(False)
    lm = LanguageModel.from_module(model, small.tokenizer())
    calm = steps(lm, training)
    model.train()
    list(model.modules())[-1].eval()

    def state() -> list[Any]:
        return [
            [(p.data_ptr(), p._version, p.requires_grad, p.grad) for p in model.parameters()],
            [(module.training, len(module._forward_hooks)) for module in model.modules()],
            torch.get_rng_state().tolist(),
        ]

    weights, before = copy.deepcopy(model.state_dict()), state()
    # Neither dropout nor autocast changes the forecast; Lightning predicts in inference mode.
    for context in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
        with context, torch.no_grad():
            assert torch.equal(calm, steps(lm, training))
        assert state() == before
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in weights.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, small):
    # Untied, so that most embeddings have no gradient.
    lm = language_model(small, "gpt2-untied", dtype)
    before, ours = lm.domain_logits(TARGETS, TOKENS), steps(lm, FULL)
    lm.model.double()
    exact_before, exact = lm.domain_logits(TARGETS, TOKENS), steps(lm, FULL)
    change, exact_change = ours - before, exact - exact_before
    assert float((change - exact_change).norm() / exact_change.norm()) < 0.3


@pytest.mark.parametrize("training", [FULL, LORA], ids=["full", "lora"])
def test_an_edit_that_is_not_finite_is_named(small, training):
    lm = language_model(small, "gpt2")
    day = small.ids("day")[-1]  # in the second edit only

    def spoil(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return output.masked_fill((args[0] == day).unsqueeze(-1), torch.nan)

    lm.model.get_input_embeddings().register_forward_hook(spoil)
    with pytest.raises(NonFiniteError, match=r"edit 1 \('Oslo' -> 'b c'\).* its loss .*float32"):
        steps(lm, training)
