import pytest
import torch
from tokenizers import normalizers
from torch import nn

from lincorr_lightning.lm.encoding import PromptEncoder
from lincorr_lightning.lm.fingerprint import (
    fingerprint_config,
    fingerprint_tokenizer,
    fingerprint_weights,
)
from tests.lm.small_lms import ARCHITECTURES, config_of, small_tokenizer


class Weights(nn.Module):
    def __init__(self, *tensors: torch.Tensor, tie: bool = False) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            self.register_parameter(f"p{index}", nn.Parameter(tensor, requires_grad=False))
        if tie:
            self.tied = self.p0
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("passing", torch.randn(2), persistent=False)


def one_ulp(tensor: torch.Tensor, index: int) -> torch.Tensor:
    changed = tensor.clone()
    bits = {4: torch.int32, 2: torch.int16, 8: torch.int64}[tensor.element_size()]
    changed.view(-1).view(bits)[index] += 1
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (4093, 2), (8, 8192)])
def test_one_unit_in_the_last_place_anywhere(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape).to(dtype)
    first = fingerprint_weights(Weights(tensor))
    assert first == fingerprint_weights(Weights(tensor.clone()))
    n = tensor.numel()
    for index in {0, n // 3, n // 2, n - 1}:
        assert fingerprint_weights(Weights(one_ulp(tensor, index))) != first
    zero = one_ulp(tensor, n - 1)
    zero.view(-1)[n // 2] = -0.0 if tensor.view(-1)[n // 2] == 0 else 0.0
    assert fingerprint_weights(Weights(zero)) != first


def test_order_name_shape_dtype_and_buffers_count() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(6, 8192)
    first = fingerprint_weights(Weights(tensor))
    swapped = tensor[[1, 0, 2, 3, 4, 5]]
    halves = torch.cat([tensor[:, 4096:], tensor[:, :4096]], 1)
    other_type = tensor.view(torch.int32)
    for other in (swapped, halves, tensor.reshape(8192, 6), other_type):
        assert fingerprint_weights(Weights(other)) != first
    renamed = Weights(tensor)
    renamed.q0 = renamed.p0
    del renamed.p0
    assert fingerprint_weights(renamed) != first
    assert fingerprint_weights(Weights(tensor[:3], tensor[3:])) != first
    changed = Weights(tensor)
    changed.kept[1] = 7
    assert fingerprint_weights(changed) != first
    changed = Weights(tensor)
    changed.passing[1] = 7  # rotary tables and the like, which no checkpoint holds
    assert fingerprint_weights(changed) == first


def test_tied_weights_and_views() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(40, 41)
    tied, apart = Weights(tensor, tie=True), Weights(tensor)
    apart.tied = nn.Parameter(tensor.clone())
    assert fingerprint_weights(tied) != fingerprint_weights(apart)
    # Where a tensor lies in memory does not matter.
    whole = torch.randn(1 + tensor.numel(), dtype=torch.float32)
    view = whole[1:].view(40, 41)
    view.copy_(tensor)
    assert fingerprint_weights(Weights(view)) == fingerprint_weights(Weights(tensor))
    strided = torch.stack([tensor, -tensor], 2).view(-1)[::2]
    assert strided.stride() == (2,)
    flat = Weights(tensor.view(-1))
    assert fingerprint_weights(Weights(strided)) == fingerprint_weights(flat)
    transposed = tensor.t().contiguous().t()
    assert fingerprint_weights(Weights(transposed)) == fingerprint_weights(Weights(tensor))


def test_known_value() -> None:
    """A stored fingerprint must be the same with every later release."""
    weights = Weights(torch.arange(20_000, dtype=torch.float32))
    assert fingerprint_weights(weights) == "5e98f8f218e4b1e04e5ca9656ca0914b"


def test_tokenizer_fingerprint() -> None:
    def of(tokenizer: object) -> str:
        return fingerprint_tokenizer(tokenizer, PromptEncoder(tokenizer).prefix)

    first = of(small_tokenizer())
    used = small_tokenizer(pad_token="<pad>")
    used(["Paris", "Paris lives in"], padding=True, truncation=True, max_length=2)
    assert of(used) == first
    assert of(small_tokenizer(None)) != first
    larger = small_tokenizer()
    larger.add_tokens(["Zork"])
    assert of(larger) != first
    lowered = small_tokenizer()
    lowered.backend_tokenizer.normalizer = normalizers.Replace("city", "country")
    assert of(lowered) != first


def test_config_fingerprint() -> None:
    prints = {fingerprint_config(config_of(name)) for name in ARCHITECTURES}
    assert len(prints) == len(ARCHITECTURES)
    config = config_of("gemma2")
    config.final_logit_softcapping = 9.0
    assert fingerprint_config(config) not in prints
    for key, value in {"rms_norm_eps": 0.5, "hidden_act": "relu", "attention_bias": True}.items():
        assert fingerprint_config(config_of("llama", **{key: value})) not in prints
    rope = {"rope_type": "default", "rope_theta": 77.0}
    assert fingerprint_config(config_of("llama", rope_parameters=rope)) not in prints
    config = config_of("llama")
    config.transformers_version, config.use_cache, config.dtype = "9", False, torch.float16
    config.attention_dropout, config.initializer_range = 0.5, 0.5
    assert fingerprint_config(config) in prints
