"""Activations against the LM's own hidden states, the sums of the stream, and forwards by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lincorr_lightning.errors import LanguageModelError, SparseAutoencoderError
from lincorr_lightning.sae import KINDS, HookPoint
from lincorr_lightning.sae.hooks import captured, edited, find_hook_points, width_of
from tests.toys import toy_model

N_LAYERS = 3
# Those whose layers add an attention's and an MLP's output to the stream.
ADDING = (
    "llama gpt2 gpt-neox gpt-neox-serial opt gemma2 gemma3 qwen2 mistral mixtral phi cohere gptj "
    "falcon"
).split()
# Those whose layers do something else with the stream, and options that make them do so.
OTHERS: dict[str, dict[str, Any]] = {
    "opt-350m": {},
    "bert-decoder": {},
    "bloom": {},
    "mamba": {},
    "granite": {"residual_multiplier": 0.3},
}
IDS = torch.randint(4, 50, (3, 7), generator=torch.Generator().manual_seed(0))


def _model(name: str, **changes: Any) -> Any:
    if name == "mixtral":  # as many experts as layers: the list of layers is the outer one
        changes["num_local_experts"] = N_LAYERS
    model = toy_model(name, std=0.3, **{"num_hidden_layers": N_LAYERS} | changes)
    model(IDS, output_hidden_states=True)  # transformers hangs hooks of its own for these
    model.hooks = _hooks_in(model)
    return model


def _hooks_in(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", ADDING)
def test_activations_are_the_lms_own_hidden_states_and_add_up(name: str) -> None:
    model = _model(name)
    hook_points = find_hook_points(model)
    assert hook_points == sorted(
        HookPoint(layer, kind) for layer in range(N_LAYERS) for kind in KINDS
    )
    with captured(model, hook_points) as read:
        output = model(IDS, output_hidden_states=True, use_cache=False)
    assert set(read) == set(hook_points)
    for activation in read.values():
        assert activation.shape == (*IDS.shape, width_of(model)) == (*IDS.shape, 16)
        assert not activation.requires_grad

    states = output.hidden_states
    before = states[0]
    for layer in range(N_LAYERS):
        residual = read[HookPoint(layer, "residual")]
        if layer < N_LAYERS - 1:  # of the last layer, transformers gives what the final norm makes
            torch.testing.assert_close(residual, states[layer + 1].detach())
        attention_out, mlp_out = (
            read[HookPoint(layer, kind)] for kind in ("attention_out", "mlp_out")
        )
        torch.testing.assert_close(residual - before, attention_out + mlp_out, atol=1e-4, rtol=1e-4)
        assert attention_out.norm() > 0.01
        assert mlp_out.norm() > 0.01
        before = residual
    assert _hooks_in(model) == model.hooks


def test_which_of_the_two_is_the_attention() -> None:
    # An MLP treats each token by itself; what comes before a token moves only its attention.
    for name in ("gpt-neox", "cohere", "gemma2", "opt"):
        model = _model(name)
        hook_points = find_hook_points(model, layers=[0])
        changed = IDS.clone()
        changed[:, 0] = (IDS[:, 0] + 5) % 50
        reads = []
        for ids in (IDS, changed):
            with captured(model, hook_points) as read:
                model(ids)
            reads.append({hook_point.kind: tensor[:, -1] for hook_point, tensor in read.items()})
        assert not torch.allclose(reads[0]["attention_out"], reads[1]["attention_out"], atol=1e-5)
        if name in ("gpt-neox", "cohere"):  # side by side with the attention
            torch.testing.assert_close(reads[0]["mlp_out"], reads[1]["mlp_out"])


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_give_the_residual_and_an_error_for_the_rest(name: str) -> None:
    model = _model(name, **OTHERS[name])
    hook_points = find_hook_points(model, ["residual"])
    assert hook_points == [HookPoint(layer, "residual") for layer in range(N_LAYERS)]
    with captured(model, hook_points) as read:
        states = model(IDS, output_hidden_states=True).hidden_states
    # transformers' Mamba leaves its embedding out of them.
    torch.testing.assert_close(read[hook_points[0]], states[name != "mamba"].detach())
    with pytest.raises(
        SparseAutoencoderError, match=rf"mlp_out of layer 1.*{type(model).__name__}"
    ):
        find_hook_points(model, ["mlp_out"], layers=[1])
    assert _hooks_in(model) == model.hooks


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "opt", "gemma2"])
def test_an_intervention_changes_the_stream_from_there_on(name: str) -> None:
    model = _model(name)
    hook_points = find_hook_points(model)
    push = torch.randn(16)
    with captured(model, hook_points) as before:
        model(IDS)
    for kind in KINDS:
        hook_point = HookPoint(1, kind)
        with edited(model, {hook_point: lambda x: x + push}), captured(model, hook_points) as after:
            model(IDS)
        torch.testing.assert_close(after[hook_point], before[hook_point] + push)
        lower = HookPoint(0, "residual")
        torch.testing.assert_close(after[lower], before[lower])
        # The layer's end is what its parts add up to.
        gained = after[HookPoint(1, "residual")] - before[HookPoint(1, "residual")]
        if kind != "attention_out" or name == "gpt-neox":
            torch.testing.assert_close(gained, push.expand_as(gained), atol=1e-4, rtol=1e-4)
        else:
            mlp = after[HookPoint(1, "mlp_out")] - before[HookPoint(1, "mlp_out")]
            torch.testing.assert_close(gained, push + mlp, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(after[HookPoint(2, "residual")], before[HookPoint(2, "residual")])
    assert _hooks_in(model) == model.hooks


def test_identity_interventions_and_reading_leave_logits_and_gradients() -> None:
    model = _model("llama")
    hook_points = find_hook_points(model)
    model(IDS, labels=IDS).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logits = model(IDS).logits
    with (
        edited(model, {hook_point: lambda x: x for hook_point in hook_points}),
        captured(model, hook_points),
    ):
        output = model(IDS, labels=IDS)
    torch.testing.assert_close(output.logits, logits, rtol=0, atol=0)
    output.loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_gradients_pass_through_an_intervention_as_through_the_same_weights() -> None:
    # Doubling what the MLP adds is what doubling its last matrix does.
    model = _model("llama")
    down = model.model.layers[1].mlp.down_proj.weight
    with edited(model, {HookPoint(1, "mlp_out"): lambda x: 2 * x}):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    got = model.model.embed_tokens.weight.grad.clone()
    model.zero_grad()
    with torch.no_grad():
        down.mul_(2)
    twice = model(IDS, labels=IDS).loss
    twice.backward()
    torch.testing.assert_close(loss, twice)
    torch.testing.assert_close(got, model.model.embed_tokens.weight.grad)


def test_nested_interventions_run_in_order_and_hooks_are_removed_after_an_error() -> None:
    model = _model("gpt2")
    hook_point = HookPoint(0, "mlp_out")
    with captured(model, [hook_point]) as clean:
        model(IDS)
    with (
        edited(model, {hook_point: lambda x: x + 1}),
        edited(model, {hook_point: lambda x: x * 2}),
        captured(model, [hook_point]) as read,
    ):
        model(IDS)
    torch.testing.assert_close(read[hook_point], (clean[hook_point] + 1) * 2)

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), edited(model, {hook_point: fail}):
        model(IDS)
    assert _hooks_in(model) == model.hooks
    assert not model.training


def test_training_mode_is_kept_and_lora_is_read() -> None:
    from peft import LoraConfig, get_peft_model

    model = _model("gpt-neox").train()
    model.gpt_neox.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    assert len(find_hook_points(model)) == 3 * N_LAYERS
    assert [module.training for module in model.modules()] == modes

    llama = _model("llama")
    wrapped = get_peft_model(llama, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    hook_point = HookPoint(1, "mlp_out")
    with captured(wrapped, [hook_point]) as outer:
        wrapped(IDS)
    with captured(llama, [hook_point]) as inner:
        wrapped(IDS)
    torch.testing.assert_close(outer[hook_point], inner[hook_point])


def test_bad_hook_points_interventions_and_models() -> None:
    model = _model("llama")
    with pytest.raises(SparseAutoencoderError, match="no attention_out of layer 7: its 3 layers"):
        find_hook_points(model, layers=[7])
    with (
        pytest.raises(SparseAutoencoderError, match=r"at residual of layer 0 turned.*\(3, 7, 4\)"),
        edited(model, {HookPoint(0, "residual"): lambda x: x[..., :4]}),
    ):
        model(IDS)
    with pytest.raises(LanguageModelError, match="Linear has no configuration"):
        find_hook_points(nn.Linear(2, 2))
