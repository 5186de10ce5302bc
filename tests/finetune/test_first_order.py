"""First updates of edits, against gradients and differences taken the plain way."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lincorr_lightning.errors import NonFiniteError
from lincorr_lightning.finetune import first_order
from lincorr_lightning.finetune.first_order import VirtualEdits, virtual_edits
from lincorr_lightning.lm.language_model import LanguageModel

SOURCE, TARGET = "Paris lives in the city of", "Paris lives in the country of"
OTHER_SOURCE, OTHER_TARGET = "One day Oslo lives in the city of", "Oslo"
SOURCE_TOKENS, TARGET_TOKENS = [5, 7, 9, 4], [17, 22, 30]
ANSWERS = [[7], [9, 12]]
LABELS = [1, 2]
# No forward mode: its activation is an autograd function of its own.
BY_DIFFERENCES = ("bloom",)


def language_model(
    small: SimpleNamespace, architecture: str, dtype: torch.dtype = torch.float64
) -> LanguageModel:
    model = small.model(small.config(architecture)).to(dtype)
    model.requires_grad_(False)
    return LanguageModel.from_module(model, small.tokenizer())


def rows(small: SimpleNamespace) -> tuple[list[list[int]], list[list[int]]]:
    sources, targets = [SOURCE, OTHER_SOURCE], [TARGET, OTHER_TARGET]
    return [small.ids(prompt) for prompt in sources], [small.ids(prompt) for prompt in targets]


def both_edits(lm: LanguageModel, small: SimpleNamespace, **options: Any) -> VirtualEdits:
    sources, targets = rows(small)
    return virtual_edits(
        lm, sources, ANSWERS, targets, SOURCE_TOKENS, TARGET_TOKENS, LABELS, **options
    )


def trained_copy(model: nn.Module, source: list[int], answer: list[int]) -> Any:
    """A copy with the gradients of the edit's loss, written out."""
    copied = copy.deepcopy(model).requires_grad_(True)
    logits = copied(input_ids=torch.tensor([source + answer]), use_cache=False).logits[0]
    loss = torch.zeros((), dtype=logits.dtype)
    for i, token in enumerate(answer):
        predicting = logits[len(source) - 1 + i]
        loss = loss + (predicting.logsumexp(0) - predicting[token]) / len(answer)
    loss.backward()
    return copied


def update_of(model: Any) -> list[Tensor]:
    """The update of each parameter by gradient descent, at a learning rate of 1."""
    return [torch.zeros_like(p) if p.grad is None else -p.grad for p in model.parameters()]


def logits_after(model: Any, row: list[int], tokens: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([row]), use_cache=False).logits
    return logits[0, -1, tokens]


def slope(model: Any, row: list[int], tokens: list[int], direction: list[Tensor]) -> Tensor:
    """Each logit's own gradient, times the direction."""
    parameters = list(model.parameters())
    found = []
    for logit in logits_after(model, row, tokens):
        gradient = torch.autograd.grad(logit, parameters, retain_graph=True, allow_unused=True)
        found.append(sum((g * d).sum() for g, d in zip(gradient, direction, strict=True)
                         if g is not None))  # fmt: skip
    return torch.stack([torch.as_tensor(f) for f in found]).detach().double()


@torch.no_grad()
def moved(model: Any, direction: list[Tensor], step: float) -> Any:
    copied = copy.deepcopy(model)
    for parameter, change in zip(copied.parameters(), direction, strict=True):
        parameter.add_(change, alpha=step)
    return copied


def length(tensors: Any) -> float:
    return float(sum(t.detach().double().square().sum() for t in tensors) ** 0.5)


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def test_derivatives_equal_each_logits_own_gradient(
    architecture: str, small: SimpleNamespace
) -> None:
    lm = language_model(small, architecture)
    ours = both_edits(lm, small)
    allowed = 1e-2 if architecture in BY_DIFFERENCES else 1e-5
    for i, (source, target) in enumerate(zip(*rows(small), strict=True)):
        model = trained_copy(lm.model, source, ANSWERS[i])
        direction = update_of(model)
        expected = slope(model, source, SOURCE_TOKENS, direction)
        assert distance(ours.d_source[i], expected) <= allowed
        assert distance(ours.d_target[i], slope(model, target, TARGET_TOKENS, direction)) <= allowed


@pytest.mark.parametrize("name", ["gpt2", "opt", "phi"])
def test_derivatives_equal_finite_differences(name: str, small: SimpleNamespace) -> None:
    lm = language_model(small, name)
    ours = both_edits(lm, small)
    for i, (source, target) in enumerate(zip(*rows(small), strict=True)):
        model = trained_copy(lm.model, source, ANSWERS[i])
        direction = update_of(model)
        step = 1e-6 / length(direction)
        ahead, behind = moved(model, direction, step), moved(model, direction, -step)
        for row, tokens, theirs in (
            (source, SOURCE_TOKENS, ours.d_source[i]), (target, TARGET_TOKENS, ours.d_target[i])
        ):  # fmt: skip
            difference = logits_after(ahead, row, tokens) - logits_after(behind, row, tokens)
            assert distance(theirs, difference.detach() / (2 * step)) <= 1e-6


def test_an_update_teaches_its_answer(make_lm: Callable[..., Path], tmp_path: Path) -> None:
    lm = LanguageModel.from_pretrained(str(make_lm(tmp_path / "lm", seed=3)))
    cities = ["Paris", "London", "Tokyo", "Berlin", "Madrid"]
    tokens = [int(lm.tokenizer.vocab[city]) for city in cities]
    prompts = [f"name{i} lives in the city of" for i in range(5)]
    source = lm.rows(prompts)
    target = lm.rows([p.replace("city", "country") for p in prompts])
    tried = virtual_edits(lm, source, [[t] for t in tokens], target, tokens, tokens[:2], range(5))
    for i, (row, token) in enumerate(zip(source, tokens, strict=True)):
        model = trained_copy(lm.model, row, [token])
        expected = slope(model, row, tokens, update_of(model))
        assert distance(tried.d_source[i], expected) <= 1e-4
    own = tried.d_source.diagonal()
    assert (own > 0).all() and (own > tried.d_source.mean(1)).all()


@pytest.mark.parametrize("name", ["llama-tied", "opt", "bloom"])
def test_the_virtual_step_is_the_shortest_that_makes_the_answer_lead(
    name: str, small: SimpleNamespace
) -> None:
    lm = language_model(small, name)
    # As far as some step makes the answer of both edits lead.
    lead = {"opt": 0.1, "bloom": -0.5}.get(name, 0.5)
    ours = both_edits(lm, small, lead=lead)
    for i, (source, target) in enumerate(zip(*rows(small), strict=True)):
        model = trained_copy(lm.model, source, ANSWERS[i])
        direction = update_of(model)
        unit = length(model.parameters()) / length(direction)
        leads, targets = [], []
        for power in range(15):
            there = moved(model, direction, 1e-3 * 1.5**power * unit)
            others = logits_after(there, source, SOURCE_TOKENS).tolist()
            own = others.pop(LABELS[i])
            leads.append(own >= max(others) + lead)
            targets.append(logits_after(there, target, TARGET_TOKENS).detach())
        nearest = [p for p in range(15) if distance(ours.target[i], targets[p]) < 1e-4]
        assert len(nearest) == 1
        (found,) = nearest
        assert found == 14 or leads[found]
        assert found == 0 or not leads[found - 1]
        assert any(leads), "the case tests something"


def test_together_as_one_by_one(small: SimpleNamespace) -> None:
    lm = language_model(small, "llama")
    together = both_edits(lm, small)
    sources, targets = rows(small)
    for i in range(2):
        alone = virtual_edits(
            lm, sources[i : i + 1], ANSWERS[i : i + 1], targets[i : i + 1], SOURCE_TOKENS,
            TARGET_TOKENS, LABELS[i : i + 1],
        )  # fmt: skip
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_[i])


def test_no_edits(small: SimpleNamespace) -> None:
    lm = language_model(small, "llama")
    none = virtual_edits(lm, [], [], [], SOURCE_TOKENS, TARGET_TOKENS, [])
    assert [tuple(part.shape) for part in none] == [(0, 4), (0, 3), (0, 3)]


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "bloom"])
def test_an_lm_in_training_is_left_as_it_was(name: str, small: SimpleNamespace) -> None:
    model = small.model(small.config(name))
    lm = LanguageModel.from_module(model, small.tokenizer())
    calm = both_edits(lm, small)
    model.train()
    list(model.modules())[-1].eval()
    first, second, *_ = model.parameters()
    first.grad = torch.ones_like(first)
    second.requires_grad_(False)

    def state() -> list[Any]:
        return [
            [(p.data_ptr(), p._version, p.requires_grad) for p in model.parameters()],
            [module.training for module in model.modules()],
            [p.grad is None for p in model.parameters()],
            [sorted(module.__dict__) for module in model.modules()],
            torch.get_rng_state().tolist(),
            torch.is_grad_enabled(),
        ]

    weights = copy.deepcopy(model.state_dict())
    before = state()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        tried = both_edits(lm, small)
    # Neither dropout nor autocast changes the forecast.
    assert all(torch.equal(a, b) for a, b in zip(calm, tried, strict=True))
    assert state() == before
    assert torch.equal(first.grad, torch.ones_like(first))
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in weights.items())


def test_in_lightnings_inference_mode(small: SimpleNamespace) -> None:
    lm = language_model(small, "llama")
    outside = both_edits(lm, small)
    with torch.inference_mode():
        inside = both_edits(lm, small)
        assert torch.is_inference_mode_enabled()
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, small: SimpleNamespace) -> None:
    # Untied, so that most embeddings have no gradient.
    lm = language_model(small, "gpt2-untied", dtype)
    ours = both_edits(lm, small)
    lm.model.double()
    exact = both_edits(lm, small)
    for rough, fine in zip(ours[:2], exact[:2], strict=True):
        assert distance(rough, fine) < 0.15


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_an_edit_that_is_not_finite_is_named(small: SimpleNamespace, broken: float) -> None:
    lm = language_model(small, "gpt2")
    day = small.ids("day")[-1]  # in the second edit only

    def spoil(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return output.masked_fill((args[0] == day).unsqueeze(-1), broken)

    lm.model.get_input_embeddings().register_forward_hook(spoil)
    with pytest.raises(NonFiniteError, match=r"edit 1 .*Oslo lives.* loss \(nan\).*float32"):
        both_edits(lm, small)


def test_a_lead_out_of_reach_takes_the_longest_step(small: SimpleNamespace) -> None:
    lm = language_model(small, "opt")
    sources, targets = rows(small)
    ours = both_edits(lm, small, lead=1e9)
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        model = trained_copy(lm.model, source, ANSWERS[i])
        direction = update_of(model)
        step = 1e-3 * 1.5**14 * length(model.parameters()) / length(direction)
        longest = logits_after(moved(model, direction, step), target, TARGET_TOKENS)
        torch.testing.assert_close(ours.target[i], longest.detach(), rtol=1e-6, atol=1e-6)


def test_the_difference_stands_in_only_where_forward_mode_fails(
    small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    own = first_order._central_difference

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return own(*args)

    monkeypatch.setattr(first_order, "_central_difference", counted)
    both_edits(language_model(small, "llama"), small)
    assert not calls
    both_edits(language_model(small, "bloom"), small)
    assert len(calls) == 2
