"""The query cache evaluates what all callbacks read in one forward pass."""

import copy

import torch

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
    cache.read([([one], [5])], 0)  # the first read selects the logit method
    n_forwards.clear()
    cache.prefetch([other, one], 0)
    cache.read([([one], [5])], 0)
    assert n_forwards == [], "known already, and prefetched for later"
    (first,) = cache.read([([one], [7, 5])], 1)
    (second,) = cache.read([([other, one], [6])], 1)
    assert n_forwards == [1]
    expected = lm.domain_logits([one.prompt, other.prompt], [5, 6, 7])
    torch.testing.assert_close(first, expected[:1, [2, 0]])
    torch.testing.assert_close(second, expected[[1, 0]][:, [1]])
    n_forwards.clear()
    cache.read([([one], [5]), ([one], [6])], 2)
    assert n_forwards == [1], "another step"
    with torch.no_grad():
        lm.model.model.embed_tokens.weight.mul_(1.5)
    assert not torch.equal(cache.read([([one], [7, 5])], 2)[0], first), "weights changed in between"
    assert cache.read([([], [5, 6])], 2)[0].shape == (0, 2)


def test_frozen_lms_in_half_precision_are_read_in_float32(small_lm: str) -> None:
    half = LanguageModel.from_pretrained(small_lm, dtype="bfloat16")
    exact = copy.deepcopy(half.model).float()
    queries, tokens = [Query("name1 lives in the city of")], [5, 6, 7, 8]
    (ours,) = QueryCache(half).read([(queries, tokens)], step=0)
    ids = half.tokenizer(queries[0].prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = exact(input_ids=ids).logits[0, -1, tokens].double()
        rounded = half.domain_logits([queries[0].prompt], tokens)[0]
    torch.testing.assert_close(ours[0], expected, atol=1e-5, rtol=0)
    assert (rounded - expected).abs().max() > 1e-3


def test_trained_half_precision_weights_are_not_exchanged(small_lm: str) -> None:
    """DistributedDataParallel's gradient hooks would be lost with them."""
    lm = LanguageModel.from_pretrained(small_lm, dtype="bfloat16")
    weight = lm.model.model.layers[0].mlp.down_proj.weight.requires_grad_()
    called = []
    accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *_: called.append(True))
    QueryCache(lm).read([([Query("name1 lives in the city of")], [5])], step=0)
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
    cache.read([(queries[:4], [5])], step=0)
    n_tokens = []
    lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: n_tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    (ours,) = cache.read([(queries, [5, 6, 7])], step=1)
    together, n_alone = sum(n_tokens), 0
    for query, logits in zip(queries, ours, strict=True):
        ids = lm.tokenizer(query.prompt, return_tensors="pt")["input_ids"]
        n_alone += ids.numel()
        which = [-1 if query.adapter_id is None else query.adapter_id]
        with torch.no_grad(), adapters.rows(which):
            expected = lm.model(input_ids=ids).logits[0, -1, [5, 6, 7]].double()
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert together < 0.8 * n_alone
