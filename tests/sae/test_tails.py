"""Reading the ends of texts: it gives what a forward over the whole text does."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MistralConfig

from lincorr_lightning.flow.suffix_rerun import rerun_suffixes, supports_suffix_rerun
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited

N_VARIANTS = 3
TEXTS = ["name1 lives in the city of Paris", "red blue", "name2 lives in the city of", "Rome"]


def _shift(texts, begin, variants, positions):
    """Variant v adds v at the position, in one direction."""
    at = torch.tensor([positions[text] - begin for text in texts])

    def edit(x):
        x = x.clone()
        x[torch.arange(len(x)), at, 0] += torch.tensor(variants, dtype=x.dtype)
        return x

    return edit


def _compare(lm: LanguageModel, layer: int, hook_point: HookPoint) -> set[int]:
    """Hold every variant against a whole forward of its own; at which positions tails began."""
    rows = lm.rows(TEXTS)
    positions = [min(3, len(row) - 1) for row in rows]
    last = HookPoint(
        len(lm.model.model.layers) - 1 if hasattr(lm.model, "model") else 1, "residual"
    )
    found, told, begins = {}, [], set()

    def look(forward, begin):
        begins.add(begin)
        for i, number in enumerate(forward.cases):
            n = int(forward.mask[i].sum())
            found[number] = (begin, forward.logits[i, :n], forward.at[last][i, :n])

    def edits(numbers, begin):
        return {
            hook_point: _shift([n // N_VARIANTS for n in numbers], begin,
                          [n % N_VARIANTS for n in numbers], positions)
        }  # fmt: skip

    rerun_suffixes(lm, rows, positions, N_VARIANTS, layer, look, hook_points=[last], edits=edits,
              done=told.append)  # fmt: skip
    assert sum(told) == len(found) == len(rows) * N_VARIANTS
    for number, (begin, logits, stream) in found.items():
        text, variant = divmod(number, N_VARIANTS)
        edit = _shift([text], 0, [variant], positions)
        with (
            torch.no_grad(),
            edited(lm.model, {hook_point: edit}),
            captured(lm.model, [last]) as at,
        ):
            whole = lm.model(input_ids=torch.tensor([rows[text]])).logits[0, begin:]
        torch.testing.assert_close(logits, whole, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(stream, at[last][0, begin:], atol=2e-5, rtol=1e-4)
    changed = found[2][1] - found[0][1]
    assert changed.abs().max() > 1e-3, "an edit is felt"
    return begins


@pytest.mark.parametrize(
    ("layer", "hook_point"),
    [
        (0, HookPoint(0, "attention_out")),
        (1, HookPoint(0, "residual")),
        (1, HookPoint(1, "mlp_out")),
    ],
)
def test_ends_are_read_as_within_the_whole_text(
    small_lm: str, layer: int, hook_point: HookPoint
) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    before = lm.fingerprint
    assert supports_suffix_rerun(lm, layer, 20)
    assert max(_compare(lm, layer, hook_point)) == 3, "not from the beginning"
    assert not any("forward" in module.__dict__ for module in lm.model.modules())
    assert lm.fingerprint == before


def test_layers_below_and_beginnings_are_not_run_again(small_lm: str) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    rows = lm.rows(["name1 lives in the city of Paris"])
    seen = {0: 0, 1: 0}

    def count(layer):
        def hook(module, args, output):
            seen[layer] += len(args[0]) * args[0].shape[1]

        return lm.model.model.layers[layer].mlp.register_forward_hook(hook)

    handles = [count(0), count(1)]
    assert supports_suffix_rerun(lm, 1, 20)
    tried = dict(seen)
    rerun_suffixes(lm, rows, [4], 10, 1, lambda forward, begin: None, edits=lambda n, b: {})
    for handle in handles:
        handle.remove()
    # It is tried again; then every token is read once, and the end ten times in the second layer.
    n, n_tail = len(rows[0]), len(rows[0]) - 4
    assert seen == {0: 2 * tried[0] + n, 1: 2 * tried[1] + n + 10 * n_tail}


def _random(config, folder: Path, small_lm: str) -> LanguageModel:
    torch.manual_seed(0)
    lm = LanguageModel.from_pretrained(small_lm)
    config.vocab_size = len(lm.tokenizer)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return LanguageModel.from_pretrained(str(folder))


def test_other_architectures_and_those_that_see_a_window(small_lm: str, tmp_path: Path) -> None:
    gpt = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64)
    lm = _random(gpt, tmp_path / "gpt", small_lm)
    assert supports_suffix_rerun(lm, 1, 20)
    assert max(_compare(lm, 1, HookPoint(1, "attention_out"))) == 3
    mistral = MistralConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                            num_attention_heads=2, num_key_value_heads=2,
                            sliding_window=4)  # fmt: skip
    lm = _random(mistral, tmp_path / "mistral", small_lm)
    assert not supports_suffix_rerun(lm, 1, 20)
    assert _compare(lm, 1, HookPoint(0, "residual")) == {0}, "whole texts"


def test_an_lm_that_cannot_be_entered_reads_whole_texts(small_lm: str) -> None:
    """Its second layer adds what the first left beside the stream."""
    lm = LanguageModel.from_pretrained(small_lm)
    first, second = lm.model.model.layers
    left = {}
    first.mlp.register_forward_hook(lambda m, a, out: left.update(out=out))

    def add(module, args, out):
        return out + left["out"] if left["out"].shape == out.shape else out

    second.mlp.register_forward_hook(add)
    assert not supports_suffix_rerun(lm, 1, 20)
    assert _compare(lm, 1, HookPoint(0, "residual")) == {0}, "whole texts"
