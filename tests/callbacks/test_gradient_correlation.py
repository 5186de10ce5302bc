"""r between W·ΔF_source and ΔF_target, against a loop that measures it by hand."""

import numpy as np
import pytest
import torch

from lincorr_lightning.callbacks import Generalization, GradientCorrelation
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.lm.vocabulary import usable_strings
from tests.callbacks import naive
from tests.toys import recorded_passes

SUBJECTS = [f"name{i}" for i in range(5, 17)]
NAMES = ("gradient_correlation", "permuted_gradient_correlation", "logit_correlation")


def by_hand(module, states, weight, bias):
    """Of each update: r of the gradients, also with W permuted, and of the logits themselves."""
    source, target = (
        [naive.logits(state, module.tokenizer, name, SUBJECTS) for state in states]
        for name in ("city", "country")
    )
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0)).tolist()
    cycle = dict(zip(order, order[-1:] + order[:-1], strict=True))  # each label has another's row
    changes = [
        (s1 - s0, t1 - t0)
        for s0, s1, t0, t1 in zip(source, source[1:], target, target[1:], strict=False)
    ]
    gradients, permuted = (
        [naive.r(d_source @ w.T, d_target) for d_source, d_target in changes]
        for w in (weight, weight[[cycle[label] for label in range(len(weight))]])
    )
    logits = [naive.r(s @ weight.T + bias, t) for s, t in zip(source[1:], target[1:], strict=True)]
    return dict(zip(NAMES, (gradients, permuted, logits), strict=True))


def test_prompts_of_several_relations_are_read_once(small_lm, monkeypatch, fit):
    """In one pass; and each map is the one that its relation has alone, fitted once."""
    relations = ("city->country", "city->color", "country->color")
    alone = {}
    for relation in relations:
        (alone[relation],) = watched = [GradientCorrelation(relation, subjects=SUBJECTS)]
        fit(*watched, module=naive.Module(small_lm), data=naive.sentences(small_lm, n=1))
    passes = recorded_passes(monkeypatch)
    together = [GradientCorrelation(relation, subjects=SUBJECTS) for relation in relations]
    fit(*together, module=naive.Module(small_lm), data=naive.sentences(small_lm, n=1))
    prompts = [prompt for read in passes for part in read for prompt in part]
    assert prompts and len(prompts) == len(set(prompts))
    assert {len(read) for read in passes} == {3}  # city, country and color of the same subjects
    for one in together:
        expected = alone[one.relation].state.map[0]
        assert torch.allclose(one.state.map[0], expected, atol=1e-4)


def test_the_map_is_fitted_on_other_subjects_of_the_lm_as_the_run_starts(small_lm, fit):
    module = naive.Module(small_lm)
    words = [word for word in usable_strings(module.tokenizer) if word not in SUBJECTS]
    fitted = [
        naive.logits(module.backbone, module.tokenizer, k, words) for k in ("city", "country")
    ]
    states = naive.Loop(module, list(naive.sentences(small_lm))).states
    expected = by_hand(module, states, *naive.fit_map(*fitted))
    watch = GradientCorrelation("city->country", subjects=SUBJECTS, ridge=0.0)
    fit(watch, module=module)
    for name, values in expected.items():
        assert watch.results[name] == pytest.approx(np.mean(values), abs=1e-3)


# -- edits that are trained each from the base weights ---------------------------------------------


def error_by_weights(prediction, target):
    """Standard error of the mean label-wise r, by giving each row a little more weight."""

    def mean_r(weights):
        found = []
        for p, t in zip(prediction.T, target.T, strict=True):
            c = np.cov(p, t, aweights=weights, ddof=0)
            found.append(c[0, 1] / np.sqrt(c[0, 0] * c[1, 1]))
        return np.nanmean(found)

    n, more = len(target), 1e-5
    even = np.full(n, 1 / n)
    gains = [(mean_r((1 - more) * even + more * row) - mean_r(even)) / more for row in np.eye(n)]
    return np.std(gains, ddof=1) / np.sqrt(n)


@pytest.mark.parametrize(("size", "every"), [(1, 1), (3, 2)])
def test_independent_edits_as_by_hand(small_lm, own_map, fit, size, every):
    """Measured at their own subject after their own steps, counted after the last one."""
    watch = GradientCorrelation("city->country", own_map.folder, every_n_steps=every)
    count = Generalization(linear_map=own_map.folder, every_n_steps=every)
    module = naive.RecordedEdits(small_lm)
    training = EditTraining(edits_per_step=size, n_steps=3)
    data = naive.edits_data(module, training=training, subjects=SUBJECTS, n_edits=7)
    fit(watch, count, module=module, data=data)
    edits = data.resolve().edits
    assert len(edits) == 7
    base = naive.Module(small_lm)
    states = [naive.answers(base.backbone, base.tokenizer, [edit.subject for edit in edits])]
    states += [
        {
            kind: np.concatenate([module.read[number, step][kind] for number in range(7)])
            for kind in states[0]
        }
        for step in (1, 2, 3)
    ]
    changes = {}
    for step in range(0, 3, every):
        now, after = states[step], states[step + 1]
        d_source, d_target = (after[kind] - now[kind] for kind in ("city", "country"))
        changes[step + 1] = d_source @ own_map.weight.T, d_target
    r = {step: naive.r(*change) for step, change in changes.items()}
    history = dict(watch.history["edit_step/gradient_correlation/city->country"])
    assert history == pytest.approx(r, abs=1e-3)
    results = watch.results
    assert results["gradient_correlation"] == pytest.approx(r[1], abs=1e-3)
    error = pytest.approx(error_by_weights(*changes[1]), rel=1e-2)
    assert results["gradient_correlation_error"] == error
    logged = watch.output.scalars["gradient_correlation/city->country"]
    assert logged == results["gradient_correlation"]
    assert results["n_updates"] == 7 * len(r)
    # Of the LM before the edits.
    predicted = states[0]["city"] @ own_map.weight.T + own_map.bias
    logit_r = pytest.approx(naive.r(predicted, states[0]["country"]), abs=1e-3)
    assert results["logit_correlation"] == logit_r

    texts = [{"answer": edit.answer} for edit in edits]
    for step in (1, 2, 3):
        expected = naive.outcomes(states[0], states[step], texts)
        for key in ("generalized", "hallucinated", "unchanged", "source_learned"):
            found = dict(count.history[f"edit_step/{key}"]).get(step)
            is_measured = every == 1 or step in (2, 3)
            share = pytest.approx(expected[f"generalization/{key}"])
            assert found == (share if is_measured else None), (key, step)
    for key, value in expected.items():
        assert count.output.scalars.get(key, np.nan) == pytest.approx(value, abs=1e-3, nan_ok=True)
    winners = states[3]["country"].argmax(1)
    priors = [states[0]["country"][row, winner] for row, winner in enumerate(winners)]
    assert [case.prior_winner for case in count.cases] == pytest.approx(priors, abs=1e-3)


def test_a_run_that_ends_within_its_first_edit_counts_none(small_lm, own_map, fit):
    count, module = Generalization(linear_map=own_map.folder), naive.Stacked(small_lm)
    training = EditTraining(edits_per_step=1, n_steps=3)
    fit(count, max_steps=2, module=module, data=naive.edits_data(module, training=training))
    assert count.results["n_edits"] == 0
    assert count.results["generalized"] is count.results["random"] is None
