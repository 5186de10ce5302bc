"""The query cache evaluates what all callbacks read in one forward pass."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.query_cache import Query, QueryCache


def test_reads_and_prefetched_queries_share_one_forward(small_lm):
    lm = LanguageModel.from_pretrained(small_lm)
    holder = torch.nn.Module()
    holder.language_model = lm
    cache = QueryCache.of(holder, lm.model)
    assert cache.lm is lm
    n_forwards = []
    lm.model.model.register_forward_pre_hook(lambda *_: n_forwards.append(1))
    one, other = Query("name1 lives"), Query("name2 lives in the")
    cache.register_tokens([5, 6, 7])
    cache.read([([one], [5])])  # the first read selects the logit method
    n_forwards.clear()
    cache.prefetch([other, one])
    cache.read([([one], [5])])
    assert n_forwards == [], "known already, and prefetched for later"
    cache.start_pause(weights_changed=True)
    (first,) = cache.read([([one], [7, 5])])
    (second,) = cache.read([([other, one], [6])])
    assert n_forwards == [1]
    expected = lm.domain_logits([one.prompt, other.prompt], [5, 6, 7])
    torch.testing.assert_close(first, expected[:1, [2, 0]])
    torch.testing.assert_close(second, expected[[1, 0]][:, [1]])
    n_forwards.clear()
    cache.start_pause()
    cache.read([([one], [5]), ([one], [6])])
    assert n_forwards == [], "another pause, with the same weights"
    assert cache.read([([], [5, 6])])[0].shape == (0, 2)


def change_least(weight):
    words = torch.int32 if weight.element_size() == 4 else torch.int16
    weight.data.view(words)[7, 3] += 1


WRITES = {
    "by an operation": lambda weight: weight.mul_(1.5),
    "least": change_least,
    "rows exchanged": lambda weight: weight.data.copy_(weight.data.roll(1, 0)),
    "another tensor": lambda weight: setattr(weight, "data", weight.data + 1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_any_write_to_the_weights_is_noticed(small_lm, write, dtype):
    """And none is seen where nothing was written."""
    lm = LanguageModel.from_pretrained(small_lm, dtype=dtype)
    cache, weight = QueryCache(lm), lm.model.model.layers[0].mlp.up_proj.weight
    query = Query("name1 lives in the city of")
    (before,) = cache.read([([query], [5, 6, 7])])
    version = cache.weights_version()
    cache.start_pause()
    assert cache.weights_version() == version
    WRITES[write](weight)
    assert cache.weights_version() == version, "within a pause nothing is written"
    cache.start_pause()
    assert cache.weights_version() != version
    (after,) = cache.read([([query], [5, 6, 7])])
    fresh = QueryCache(lm).read([([query], [5, 6, 7])])[0]
    assert torch.equal(after, fresh)
    assert write == "least" or not torch.equal(after, before)


ADAPTERS = {
    "LoRA": peft.LoraConfig(r=2, target_modules=["q_proj"]),
    "IA3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "VeRA": peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "OFT": peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"]),
    "LNTuning": peft.LNTuningConfig(target_modules=["input_layernorm"]),
}
SWITCHES = {
    "disabled": lambda wrapped: wrapped.base_model.disable_adapter_layers(),
    "switched": lambda wrapped: wrapped.set_adapter("other"),
    "deleted": lambda wrapped: wrapped.delete_adapter("first"),
    "merged": lambda wrapped: wrapped.base_model.merge_adapter(),
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_that_are_switched_are_noticed(small_lm, kind, switch):
    base = AutoModelForCausalLM.from_pretrained(small_lm)
    tokenizer = AutoTokenizer.from_pretrained(small_lm)
    wrapped = peft.get_peft_model(base, ADAPTERS[kind], adapter_name="first")
    wrapped.add_adapter("other", ADAPTERS[kind])
    for seed, parameter in enumerate(wrapped.parameters()):
        torch.manual_seed(seed)
        parameter.data += 0.3 * torch.randn_like(parameter)
    wrapped.eval().requires_grad_(False)
    lm = LanguageModel.from_module(base, tokenizer)
    cache = QueryCache(lm)
    prompt = "name1 lives in the city of"
    read, expected = [], []
    for change in (lambda _: None, SWITCHES[switch]):
        change(wrapped)
        cache.start_pause()
        read.append((cache.read([([Query(prompt)], [5, 6, 7])])[0], lm.fingerprint["weights"]))
        logits = base(**tokenizer(prompt, return_tensors="pt")).logits
        expected.append(logits[:, -1, 5:8].double())
    torch.testing.assert_close([logits for logits, _ in read], expected, rtol=1e-4, atol=1e-5)
    assert read[0][1] != read[1][1]


def test_trained_half_precision_weights_are_not_exchanged(small_lm: str) -> None:
    """DistributedDataParallel's gradient hooks would be lost with them."""
    lm = LanguageModel.from_pretrained(small_lm, dtype="bfloat16")
    weight = lm.model.model.layers[0].mlp.down_proj.weight.requires_grad_()
    called = []
    accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: called.append(True))
    QueryCache(lm).read([([Query("name1 lives in the city of")], [5])])
    weight.float().sum().backward()
    assert called


TEMPLATES = ["{} lives in the city of", "{} lives in the country of", "{} speaks the language"]


def test_prompts_of_a_subject_are_read_together_and_adapters_apart(small_lm: str) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    adapters = StackedLoRA(lm.model, 2, AdapterSettings(2, 4.0))
    for factors in adapters.lora_B.values():
        torch.nn.init.normal_(factors, std=0.3)
    queries = [
        Query(template.format(name), adapter, name)
        for adapter in (0, None, 1)
        for template in TEMPLATES
        for name in ("name1", "name2 name3")
    ]
    cache = QueryCache(lm, adapters.rows)
    # The first read selects the logit method, and tests whether the LM can share prefixes.
    cache.read([(queries[:4], [5])])
    n_tokens = []
    lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: n_tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    (ours,) = cache.read([(queries, [5, 6, 7])])
    together, n_alone = sum(n_tokens), 0
    for query, logits in zip(queries, ours, strict=True):
        ids = lm.tokenizer(query.prompt, return_tensors="pt")["input_ids"]
        n_alone += ids.numel()
        which = [-1 if query.adapter_id is None else query.adapter_id]
        with torch.no_grad(), adapters.rows(which):
            expected = lm.model(input_ids=ids).logits[0, -1, [5, 6, 7]].double()
        # Another adapter or prompt changes them by tenths; rounding, by up to 2e-5.
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert together < 0.8 * n_alone
