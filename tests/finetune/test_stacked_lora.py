"""Stacked adapters against peft: one LM, one adapter, one unpadded prompt at a time."""

import copy
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from lincorr_lightning.errors import ConfigError, LanguageModelError
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.stacked_lora import StackedLoRA

N = 8
RANK, ALPHA = 3, 7.0
STEPS = 3
ANSWERS = [5, 30, 4, 17, 22, 9, 12, 7]
# peft does not support every layer of this one.
TARGETS = {"mamba": ["in_proj", "x_proj"]}


def double_model(small: SimpleNamespace, architecture: str) -> Any:
    return small.model(small.config(architecture)).double()


def batch(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    last = torch.tensor([len(row) - 1 for row in rows])
    return ids, (torch.arange(longest) <= last[:, None]).long(), last


def last_logits(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    ids, mask, last = batch(rows)
    logits = model(input_ids=ids, attention_mask=mask).logits
    return logits[torch.arange(len(rows)), last]


def loss_of(logits: torch.Tensor, answers: Sequence[int]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, torch.tensor(answers), reduction="sum")


def randomize(stack: StackedLoRA, seed: int = 1) -> None:
    """Let B be other than zero, or nothing of A would be seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in stack.lora_B.values():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.1)


def peft_run(
    model: Any,
    state: dict[str, torch.Tensor],
    targets: Any,
    ids: list[int],
    answer: int,
) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    """Logits before and after some steps of peft's own LoRA, from given factors."""
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM"
    )
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    loaded = peft.set_peft_model_state_dict(tuned, state)
    assert not loaded.unexpected_keys
    assert not [key for key in loaded.missing_keys if "lora" in key]
    trained = [p for p in tuned.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float64}
    names = {name for name, part in tuned.named_modules() if hasattr(part, "lora_A")}
    tuned.eval()
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    before = last_logits(tuned, [ids]).detach()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(last_logits(tuned, [ids]), [answer]).backward()
        optimizer.step()
    return before[0], last_logits(tuned, [ids]).detach()[0], names


def peft_state(stack: StackedLoRA, i: int) -> dict[str, torch.Tensor]:
    """An adapter's factors by peft's names."""
    return {
        f"base_model.model.{name}.{factor}.weight": held[name.replace(".", "/")][i].detach().clone()
        for name in stack.targets
        for factor, held in (("lora_A", stack.lora_A), ("lora_B", stack.lora_B))
    }


@torch.no_grad()
def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_stacked_training_equals_separate_peft_runs(architecture, small):
    model = double_model(small, architecture)
    base = copy.deepcopy(model)
    names = TARGETS.get(architecture)
    stack = StackedLoRA(model, N, AdapterSettings(RANK, ALPHA, names))
    randomize(stack)
    rows = [small.ids(prompt) for prompt in small.prompts[:N]]
    assert len(set(map(len, rows))) > 3
    # Some LMs compute a softmax in float32 whatever they are in, so that padding alone moves them.
    with torch.no_grad():
        padded, single = last_logits(model, rows), [last_logits(model, [row])[0] for row in rows]
    noise = max(relative(p, s) for p, s in zip(padded, single, strict=True))
    assert noise < 1e-12 or architecture in ("gemma2", "gptj", "bloom")
    tolerance = 1e-12 if noise < 1e-12 else 1e-6
    states = [peft_state(stack, i) for i in range(N)]
    assert all(factor.dtype == torch.float64 for state in states for factor in state.values())

    # Fused, as `SourceFinetune` has it.
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    with stack.rows(range(N)):
        before = last_logits(model, rows).detach()
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(last_logits(model, rows), ANSWERS).backward()
            optimizer.step()
        after = last_logits(model, rows).detach()

    for i in range(N):
        first, final, targets = peft_run(
            base, states[i], names or "all-linear", rows[i], ANSWERS[i]
        )
        assert targets == {f"base_model.model.{target}" for target in stack.targets}
        assert relative(before[i], first) <= tolerance
        assert relative(after[i], final) <= tolerance
        assert relative(after[i], first) >= 1e-2  # it did train


def make_stack(
    small: SimpleNamespace, architecture: str = "llama", n: int = N
) -> tuple[Any, StackedLoRA]:
    model = double_model(small, architecture)
    stack = StackedLoRA(model, n, AdapterSettings(RANK, ALPHA))
    randomize(stack)
    return model, stack


def test_gradient_of_an_adapter_is_of_its_own_rows_alone(small):
    model, stack = make_stack(small)
    rows = [small.ids(prompt) for prompt in small.prompts]

    def gradients(which: list[int], rows: list[list[int]], answers: list[int]) -> dict[str, Any]:
        stack.zero_grad()
        with stack.rows(which):
            loss_of(last_logits(model, rows), answers).backward()
        return {name: p.grad.clone() for name, p in stack.named_parameters()}

    # Adapter 3 has two rows, which are not side by side; 0, 1 and 4 are not there.
    mixed = gradients([3, 5, -1, 3, 2], rows[:5], ANSWERS[:5])
    others = gradients(
        [3, 6, 7, 3, -1],
        [rows[0], rows[7], rows[6], rows[3], rows[9]],
        [ANSWERS[0], 11, 12, ANSWERS[3], 13],
    )
    alone = gradients([3, 3], [rows[0], rows[3]], [ANSWERS[0], ANSWERS[3]])
    for name in mixed:
        for gradient in (mixed, others):
            torch.testing.assert_close(gradient[name][3], alone[name][3], rtol=1e-10, atol=1e-12)
        assert alone[name][3].abs().max() > 1e-6
        assert not mixed[name][[0, 1, 4, 6, 7]].any()
        assert not alone[name][[0, 1, 2, 4, 5, 6, 7]].any()
        assert mixed[name][[2, 5]].abs().flatten(1).amax(1).min() > 1e-6


def test_rows_in_any_order_and_number(architecture, small):
    model, stack = make_stack(small, architecture, n=3)
    ids = [small.ids(prompt) for prompt in small.prompts[:5]]
    base = last_logits(model, ids)
    single = {}
    for i in range(3):
        with stack.rows([i] * 5):
            single[i] = last_logits(model, ids)
        assert relative(single[i], base) > 1e-3
    for which in ([2, 0, 1, 0, 2], [0, 1, 2, -1, -1], torch.tensor([1] * 5), [0, 0, 1, 1], [1, 0]):
        with stack.rows(which):
            ours = last_logits(model, ids[: len(which)])
        for row, i in enumerate(torch.as_tensor(which).tolist()):
            expected = base[row] if i == -1 else single[i][row]
            torch.testing.assert_close(ours[row], expected, rtol=1e-10, atol=1e-10)
            if i == -1:
                assert torch.equal(ours[row], base[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_base_are_the_same_to_the_bit(dtype, architecture, small):
    model = small.model(small.config(architecture)).to(dtype).requires_grad_(False)
    ids = [small.ids(prompt) for prompt in small.prompts]
    untouched = last_logits(model, ids)
    keys = list(model.state_dict())
    stack = StackedLoRA(model, 2, AdapterSettings(RANK, ALPHA))
    randomize(stack)
    assert {p.dtype for p in stack.parameters()} == {torch.float32}
    which = [-1, 0, -1, -1, 1, -1, 0, 0, -1, -1]
    with stack.rows(which):
        mixed = last_logits(model, ids)
        with stack.rows([-1] * len(ids)):
            assert torch.equal(last_logits(model, ids), untouched)
        assert torch.equal(last_logits(model, ids), mixed)  # the outer context is back
    assert mixed.dtype == untouched.dtype
    is_base = torch.tensor(which) == -1
    assert torch.equal(mixed[is_base], untouched[is_base])
    assert not torch.equal(mixed[~is_base], untouched[~is_base])
    assert torch.equal(last_logits(model, ids), untouched)  # outside of rows
    assert list(model.state_dict()) == keys


def test_reset_depends_on_the_seed_alone(small):
    _, eight = make_stack(small)
    _, one = make_stack(small, n=1)
    random_state = torch.get_rng_state()
    eight.reset([7, 1, 2, 3, 4, 5, 6, 9])
    again = {name: p.clone() for name, p in eight.named_parameters()}
    for seed, place in ((9, 7), (7, 0)):
        one.reset([seed])
        for name, parameter in one.named_parameters():
            assert torch.equal(parameter[0], again[name][place])
    for name, parameter in eight.lora_A.items():
        n_in = parameter.shape[-1]
        assert 0.8 < parameter.abs().max() * math.sqrt(n_in) <= 1  # peft's: uniform to 1/sqrt(n)
        assert not torch.equal(parameter[0], parameter[1])
        assert not eight.lora_B[name].any()
    assert torch.equal(torch.get_rng_state(), random_state)
    with pytest.raises(ConfigError, match=r"9 edits, but at most 8 .* model.edits_per_step"):
        eight.reset(range(9))


def test_chosen_targets(small):
    model = small.model(small.config("llama"))
    stack = StackedLoRA(model, 2, AdapterSettings(RANK, ALPHA, ["q_proj", "1.mlp.up_proj"]))
    names = ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"]
    assert [name.removeprefix("model.") for name in stack.targets] == names
    for targets, message in (
        (["q_proj", "query"], "'query'.* q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down"),
        (["lm_head"], "'lm_head'.*output layer.* are: q_proj"),
    ):
        with pytest.raises(LanguageModelError, match=message):
            StackedLoRA(model, 2, AdapterSettings(RANK, ALPHA, targets))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable. is deprecated")
def test_forwards_that_do_not_fit(small):
    model, stack = make_stack(small)
    ids = torch.ones(3, 4, dtype=torch.long)

    def refused(message, which, call):
        with pytest.raises(LanguageModelError, match=message), stack.rows(which):
            call()

    refused(r"got 3 rows.* adapters of 2", [0, 1], lambda: model(input_ids=ids))
    refused("adapter 8; .* 0 to 7", [0, 8], lambda: None)
    layer = model.model.layers[0].mlp.up_proj
    with stack.rows([0, 1, 2]):
        model(input_ids=ids)
        # Some of the tokens, as an expert of a mixture gets them.
        with pytest.raises(LanguageModelError, match=r"mlp.up_proj gets .*cannot be separated"):
            layer(torch.zeros(5, 16, dtype=torch.float64))
        flat = torch.randn(3, 4, 16, dtype=torch.float64)
        torch.testing.assert_close(layer(flat.flatten(0, 1)), layer(flat).flatten(0, 1))
    model.train()
    model.gradient_checkpointing_enable()
    refused("gradient_checkpointing_disable", [0, 1, 2], lambda: model(input_ids=ids))
    assert model(input_ids=ids).logits.shape == (3, 4, small.vocab)


# -- in LanguageModel, autocast, Lightning, and copied ---------------------------------------


def test_autocast_equals_peft_under_autocast(small):
    model = small.model(small.config("llama"))
    base = copy.deepcopy(model)
    # A scale of a power of two rounds nowhere.
    stack = StackedLoRA(model, 2, AdapterSettings(RANK, 2.0 * RANK))
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


def test_copy_works_by_itself(small):
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
