"""Next-token logits and logit lenses beside other packages, on small random LMs.

A logit lens of ours is the final norm and the head on the states that token geometry reads. Those
of other packages have a row more: they begin with the embeddings.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lincorr_lightning import LanguageModel
from lincorr_lightning.geometry.token_clouds import read_layers
from lincorr_lightning.lm.head import logits_of_states
from tests.real_writers.conftest import Write
from tests.real_writers.peer_lms import LMS, PROMPTS

pytestmark = pytest.mark.nightly
CAPPED, WITHOUT_BOS = "gemma2", "qwen2"  # of TransformerLens, by default
PARTS = ("logits", "lens")


class Written(NamedTuple):
    folder: Path
    arrays: dict[str, Tensor]


Read = Callable[[str], Written]


class Ours(NamedTuple):
    logits: Tensor  # (n_prompts, n_vocabulary)
    lens: Tensor  # (n_prompts, n_layers, n_vocabulary)
    uncapped: Tensor  # the same without what the LM makes of its logits


@cache
def ours(folder: Path, add_bos: bool | None = None) -> Ours:
    lm = LanguageModel.from_pretrained(str(folder), add_bos=add_bos)
    tokens = torch.arange(lm.vocab_size)
    backbone = lm.model.base_model
    norm = backbone.ln_f if hasattr(backbone, "ln_f") else backbone.norm
    lens: list[Tensor] = []
    uncapped: list[Tensor] = []
    for prompt, row in zip(PROMPTS, lm.rows(PROMPTS), strict=True):
        own = torch.tensor([row[len(lm.prefix) :]])
        (hidden,), _ = read_layers(lm, own, [prompt])
        with torch.no_grad():
            states = torch.cat([norm(hidden[:-1, -1]), hidden[-1:, -1]])
        lens.append(logits_of_states(lm.model, [(states, tokens)], is_product=False))
        uncapped.append(logits_of_states(lm.model, [(states, tokens)], is_product=True))
    return Ours(lm.domain_logits(PROMPTS, tokens), torch.stack(lens), torch.stack(uncapped))


def assert_same(found: Tensor, expected: Tensor) -> None:
    """To the rounding of float32."""
    atol = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=atol)


def differ(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) > 1e-2 * float(other.abs().max())


@pytest.fixture(scope="module")
def written(write: Write) -> Read:
    """What a writer wrote."""

    @cache
    def read(name: str) -> Written:
        folder = write(name)
        arrays = np.load(folder / "computed.npz")
        return Written(folder, {key: torch.from_numpy(arrays[key]) for key in arrays})

    return read


HOWS = ("by default", "without BOS", "folded")
PADDED = [f"{what}, {side}" for what in ("texts", "tokens") for side in ("left", "right")]
TUNED = ("gpt2", "llama")  # those that tuned-lens knows
CASES = {
    "transformer_lens": {f"{name}, {how}: {part}" for name in LMS for how in HOWS for part in PARTS}
    | {f"{name}, {how}: logits" for name in LMS for how in PADDED},
    "nnsight": {
        f"{name}, {way}: {part}" for name in LMS for way in ("alone", "batch") for part in PARTS
    },
    "tuned_lens": {*TUNED},
}


@pytest.mark.parametrize("writer", CASES)
def test_cases(writer: str, written: Read) -> None:
    assert set(written(writer).arrays) == CASES[writer]


@pytest.mark.parametrize("name", LMS)
@pytest.mark.parametrize("how", ["by default", "without BOS"])
def test_transformer_lens(written: Read, name: str, how: str) -> None:
    """It puts BOS before prompts, whether the tokenizer does or not; its recipe has no soft cap."""
    folder, arrays = written("transformer_lens")
    add_bos = how == "by default" and name != WITHOUT_BOS
    expected = ours(folder / name, add_bos)
    assert_same(arrays[f"{name}, {how}: logits"], expected.logits)
    lens = arrays[f"{name}, {how}: lens"][:, 1:]
    assert_same(lens, expected.uncapped)
    assert differ(lens, expected.lens) == (name == CAPPED)
    assert differ(ours(folder / name, not add_bos).logits, expected.logits)


@pytest.mark.parametrize("name", LMS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_of_transformer_lens(written: Read, name: str, side: str) -> None:
    """Given token ids without a mask, it reads padding on the left as part of the prompts."""
    folder, arrays = written("transformer_lens")
    expected = ours(folder / name, name != WITHOUT_BOS).logits
    assert_same(arrays[f"{name}, texts, {side}: logits"], expected)
    by_tokens = arrays[f"{name}, tokens, {side}: logits"]
    if side == "right":
        assert_same(by_tokens, expected)
    else:
        assert_same(by_tokens[:1], expected[:1])  # the longest, which is not padded
        assert all(differ(*pair) for pair in zip(by_tokens[1:], expected[1:], strict=True))


@pytest.mark.parametrize("name", LMS)
def test_folded_weights_of_transformer_lens(written: Read, name: str) -> None:
    """Its compatibility mode takes the mean off logits, but for those with a soft cap."""
    folder, arrays = written("transformer_lens")
    expected = ours(folder / name, name != WITHOUT_BOS)
    for part, own in (("logits", expected.logits), ("lens", expected.uncapped)):
        found = arrays[f"{name}, folded: {part}"]
        centred = own if name == CAPPED else own - own.mean(-1, keepdim=True)
        assert_same(found[:, 1:] if part == "lens" else found, centred)


@pytest.mark.parametrize("name", LMS)
@pytest.mark.parametrize("way", ["alone", "batch"])
def test_nnsight(written: Read, name: str, way: str) -> None:
    """What its lens lacks is the cap."""
    folder, arrays = written("nnsight")
    expected = ours(folder / name)
    assert_same(arrays[f"{name}, {way}: logits"], expected.logits)
    assert_same(arrays[f"{name}, {way}: lens"], expected.uncapped)


@pytest.mark.parametrize("name", TUNED)
def test_tuned_lens(written: Read, name: str) -> None:
    """Log probabilities from the embeddings on; the last are the LM's own."""
    folder, arrays = written("tuned_lens")
    expected = ours(folder / name)
    assert_same(arrays[name][:, 1:], expected.lens.log_softmax(-1))
    assert_same(arrays[name][:, -1], expected.logits.log_softmax(-1))
