"""Forward passes of half-precision LMs in float32, and of LMs that others have wrapped."""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from lincorr_lightning.lm.modes import float32_forward, reading
from tests.toys import ARCHITECTURES, toy_model

# Mamba casts its last hidden states to the head's dtype by itself, before the head runs.
NAMES = [name for name in ARCHITECTURES if name != "mamba"]
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_model_in_float32(name: str, dtype: torch.dtype) -> None:
    half = toy_model(name).to(dtype).requires_grad_(False)
    oracle = toy_model(name).to(dtype).float()
    with torch.no_grad():
        expected = oracle(input_ids=IDS).logits
        with float32_forward(half):
            logits = half(input_ids=IDS).logits
        rounded = half(input_ids=IDS).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert (rounded.float() - expected).abs().max() > 1e-3


def test_weights_are_restored_also_after_an_error() -> None:
    model = toy_model("llama-tied").bfloat16().requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"), float32_forward(model):
        model(input_ids=IDS)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.data_ptr() == addresses[name]
        assert torch.equal(parameter, before[name])


IN_BFLOAT16 = torch.autocast("cpu", torch.bfloat16)


def _by_accelerate(model: Any) -> None:
    AcceleratorState._reset_state(True)  # of another test's Trainer
    Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)


def _by_hand(model: Any) -> None:
    forward = model.forward

    def rounded(*args: Any, **kwargs: Any) -> Any:
        with IN_BFLOAT16:
            return forward(*args, **kwargs)

    model.forward = rounded


def _decorated(model: Any) -> None:
    model.forward = IN_BFLOAT16(model.forward)


def _decorated_backbone(model: Any) -> None:
    _decorated(model.model)


def _decorated_function_of_a_layer(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(IN_BFLOAT16(type(mlp).forward), mlp)


@pytest.mark.parametrize(
    "wrap",
    [_by_accelerate, _by_hand, _decorated, _decorated_backbone, _decorated_function_of_a_layer],
)
def test_mixed_precision_inside_of_a_forward_is_not_read(wrap: Callable[[Any], None]) -> None:
    model = toy_model("llama").eval()
    wrap(model)
    forwards = [vars(part).get("forward") for part in model.modules()]
    with torch.no_grad():
        expected = toy_model("llama").eval()(input_ids=IDS).logits
        rounded = model(input_ids=IDS).logits
        with reading(model, "cpu"):
            assert torch.equal(model(input_ids=IDS).logits, expected)
        assert torch.equal(model(input_ids=IDS).logits, rounded)
    assert not torch.equal(rounded, expected)
    assert [vars(part).get("forward") for part in model.modules()] == forwards


def test_a_steered_layer_is_read_as_steered() -> None:
    """With autocast around it, too: only what autocast decorates is taken off."""
    model = toy_model("llama").eval()
    mlp: Any = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = wraps(forward)(lambda states: 2 * forward(states))
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        _decorated(mlp)
        with reading(model, "cpu"):
            assert torch.equal(model(input_ids=IDS).logits, expected)
