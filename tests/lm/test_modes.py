"""Forward passes of half-precision LMs in float32."""

from typing import Any

import pytest
import torch

from lincorr_lightning.lm.modes import float32_forward
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
