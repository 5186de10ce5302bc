"""r between W·ΔF_source and ΔF_target, against a loop that measures it by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from lincorr_lightning.callbacks import Generalization, GradientCorrelation
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.finetune.cases import DomainLogits
from lincorr_lightning.lm.vocabulary import usable_strings
from tests.callbacks.conftest import Theirs, edits_of
from tests.toys import recorded_passes

SUBJECTS = [f"name{i}" for i in range(5, 17)]


def by_hand(naive, module, states, weight, bias, subjects=SUBJECTS):
    """Of each update: r of the gradients, also with W permuted, and of the logits themselves."""
    tokenizer = module.tokenizer
    source, target = (
        [naive.logits(state, tokenizer, name, subjects) for state in states]
        for name in ("city", "country")
    )
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0)).tolist()
    cycle = dict(zip(order, order[-1:] + order[:-1], strict=True))  # each label has another's row
    gradients, permuted = (
        [
            naive.r((s1 - s0) @ w.T, t1 - t0)
            for s0, s1, t0, t1 in zip(source, source[1:], target, target[1:], strict=False)
        ]
        for w in (weight, weight[[cycle[label] for label in range(len(weight))]])
    )
    logits = [naive.r(s @ weight.T + bias, t) for s, t in zip(source[1:], target[1:], strict=True)]
    return gradients, permuted, logits


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_update_as_by_hand(naive, small_lm, own_map, fit, accumulate):
    """With an accumulation that leaves the epoch's last update fewer batches."""
    module = naive.module(small_lm)
    batches = list(naive.sentences(small_lm, n=12))
    states = naive.loop(module, batches, accumulate).states
    expected_r = by_hand(naive, module, states, own_map.weight, own_map.bias)
    names = ("gradient_correlation", "permuted_gradient_correlation", "logit_correlation")
    watch = GradientCorrelation("city->country", own_map.folder, subjects=SUBJECTS)
    data = naive.sentences(small_lm, n=12)
    fit(watch, accumulate_grad_batches=accumulate, module=module, data=data)
    for name, expected in zip(names, expected_r, strict=True):
        steps, values = zip(*watch.history[f"{name}/city->country"], strict=True)
        at_first = int(name == "logit_correlation")  # nothing has changed before the first step
        assert steps == tuple(range(1 - at_first, len(states)))
        assert values[at_first:] == pytest.approx(expected, abs=2e-4)
        assert watch.results[name] == pytest.approx(np.mean(expected), abs=2e-4)
    assert watch.results["n_updates"] == len(batches) // accumulate


def test_prompts_of_several_relations_are_read_once(naive, small_lm, monkeypatch, fit):
    """In one pass; and each map is the one that its relation has alone."""
    relations = ("city->country", "city->color", "country->color")
    alone = {}
    for relation in relations:
        (alone[relation],) = watched = [GradientCorrelation(relation, subjects=SUBJECTS)]
        fit(*watched, module=naive.module(small_lm), data=naive.sentences(small_lm, n=1))
    passes = recorded_passes(monkeypatch)
    together = [GradientCorrelation(relation, subjects=SUBJECTS) for relation in relations]
    fit(*together, module=naive.module(small_lm), data=naive.sentences(small_lm, n=1))
    prompts = [prompt for read in passes for part in read for prompt in part]
    assert prompts and len(prompts) == len(set(prompts))
    assert {len(read) for read in passes} == {3}  # city, country and color of the same subjects
    for one in together:
        for name in ("plain", "auto"):
            expected = alone[one.relation].maps[name][0]
            assert torch.allclose(one.maps[name][0], expected, atol=1e-4)


def test_the_map_is_fitted_on_other_subjects_of_the_lm_as_the_run_starts(naive, small_lm, fit):
    module = naive.module(small_lm)
    words = [word for word in usable_strings(module.tokenizer) if word not in SUBJECTS]
    fitted = [
        naive.logits(module.backbone, module.tokenizer, k, words) for k in ("city", "country")
    ]
    weight, bias = naive.map(*fitted)
    states = naive.loop(module, list(naive.sentences(small_lm))).states
    gradients, _, logits = by_hand(naive, module, states, weight, bias)
    watch = GradientCorrelation("city->country", subjects=SUBJECTS)
    fit(watch, module=module)
    assert watch.results["gradient_correlation"] == pytest.approx(np.mean(gradients), abs=1e-3)
    assert watch.results["logit_correlation"] == pytest.approx(np.mean(logits), abs=1e-3)
    assert "gradient_correlation_auto" in watch.results
    plain = watch.results["gradient_correlation"]
    assert plain > watch.results["permuted_gradient_correlation"] + 0.1


# -- edits that are trained each from the base weights ---------------------------------------------


class Restoring(Theirs):
    """Restores the base weights where an edit begins."""

    def __init__(self, folder):
        super().__init__(folder, lr=0.01)
        self.base = [p.detach().clone() for p in self.backbone.parameters()]

    def data(self, edits_per_step, steps_per_edit, **options):
        training = EditTraining(edits_per_step=edits_per_step, n_steps=steps_per_edit)
        return edits_of(self, training=training, **options)

    def on_train_batch_start(self, batch, batch_idx):
        if batch.first:
            self.optimizers(use_pl_optimizer=False).state.clear()
            with torch.no_grad():
                for parameter, base in zip(self.backbone.parameters(), self.base, strict=True):
                    parameter.copy_(base)

    def training_step(self, batch, batch_idx):
        logits = self.backbone(batch.input_ids, attention_mask=batch.attention_mask).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())


def independent_states(naive, folder, edits, size, n_steps):
    """Of each group of edits, a fresh LM before and after each step, trained on whole texts."""
    for first in range(0, len(edits), size):
        group = edits[first : first + size]
        module = naive.module(folder, lr=0.01)
        model, tokenizer = module.backbone, module.tokenizer
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        texts = [f"{edit.subject} lives in the city of {edit.answer}" for edit in group]
        rows = tokenizer(texts, return_tensors="pt")["input_ids"]
        source, target, control = ([], [], [])
        for step in range(n_steps + 1):
            subjects = [edit.subject for edit in group]
            for seen, name in ((source, "city"), (target, "country"), (control, "color")):
                seen.append(naive.logits(model, tokenizer, name, subjects))
            if step < n_steps:
                optimizer.zero_grad()
                logits = model(input_ids=rows).logits[:, -2]
                nn.functional.cross_entropy(logits, rows[:, -1]).backward()
                optimizer.step()
        yield np.array(source), np.array(target), np.array(control)


@pytest.fixture(params=[(1, 1), (3, 1), (3, 2)], ids=["alone", "groups", "every_second"])
def independent_run(request, naive, small_lm, own_map, fit):
    size, every = request.param
    watch = GradientCorrelation("city->country", own_map.folder, every_n_steps=every)
    count = Generalization(linear_map=own_map.folder, every_n_steps=every)
    module = Restoring(small_lm)
    data = module.data(size, 3, subjects=SUBJECTS, n_edits=7)
    fit(watch, count, module=module, data=data)
    edits = data.prepare_edits()
    parts = list(independent_states(naive, small_lm, edits, size, 3))
    source, target, control = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return watch, count, edits, source, target, control, every


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


def test_independent_edits_are_measured_at_their_own_subject(independent_run, naive, own_map):
    watch, _, edits, source, target, _, every = independent_run
    assert len(edits) == 7
    r, d_source, d_target = {}, [], []
    for step in range(0, 3, every):
        d_source.append((source[step + 1] - source[step]) @ own_map.weight.T)
        d_target.append(target[step + 1] - target[step])
        r[step + 1] = naive.r(d_source[-1], d_target[-1])
    assert dict(watch.history["edit_step/gradient_correlation/city->country"]) == pytest.approx(
        r, abs=1e-3
    )
    assert watch.results["gradient_correlation"] == pytest.approx(r[1], abs=1e-3)
    assert watch.results["gradient_correlation_error"] == pytest.approx(
        error_by_weights(d_source[0], target[1] - target[0]), rel=1e-2
    )
    logged = watch.output.scalars["gradient_correlation/city->country"]
    assert logged == watch.results["gradient_correlation"]
    over_all = naive.r(np.concatenate(d_source), np.concatenate(d_target))
    assert watch.results["gradient_correlation_all_steps"] == pytest.approx(over_all, abs=1e-3)
    assert watch.results["n_updates"] == 7 * len(r)
    # Of the LM before the edits.
    logit_r = naive.r(source[0] @ own_map.weight.T + own_map.bias, target[0])
    assert watch.results["logit_correlation"] == pytest.approx(logit_r, abs=1e-3)


def test_independent_edits_count_with_their_last_step(independent_run, naive):
    _, count, edits, source, target, control, every = independent_run
    names = ("generalized", "hallucinated", "unchanged", "source_learned")
    for step in (1, 2, 3):
        found = [
            outcome(naive, edit, source[step][row], target[0][row], target[step][row])
            for row, edit in enumerate(edits)
        ]
        measured = every == 1 or step in (2, 3)
        for name in names:
            share = pytest.approx(sum(name in entry for entry in found) / len(found))
            history = dict(count.history[f"edit_step/{name}"])
            assert history.get(step) == (share if measured else None), (name, step)
    for name in names:
        share = pytest.approx(sum(name in entry for entry in found) / len(found))
        assert count.results[name] == share
        assert count.output.scalars[f"generalization/{name}"] == share
    cases = [(case.outcome, case.source_learned) for case in count.cases]
    assert cases == [(one[0], "source_learned" in one) for one in found]
    before = [naive.countries[row.argmax()] for row in target[0]]
    assert [case.answer_before for case in count.cases] == before
    winners = target[3].argmax(1)
    priors = [target[0][row, winner] for row, winner in enumerate(winners)]
    assert [case.prior_winner for case in count.cases] == pytest.approx(priors, abs=1e-3)
    kept = (control[0].argmax(1) == control[3].argmax(1)).mean()
    assert count.results["controls"] == {"color": {"unchanged": pytest.approx(kept)}}


def outcome(naive, edit, source_after, target_before, target_after):
    if naive.countries[target_after.argmax()] == naive.places[edit.answer]:
        found = ["generalized"]
    else:
        same = target_after.argmax() == target_before.argmax()
        found = ["unchanged" if same else "hallucinated"]
    return found + ["source_learned"] * (naive.cities[source_after.argmax()] == edit.answer)


def test_a_run_that_ends_within_its_first_edit_counts_none(small_lm, own_map, fit):
    count, module = Generalization(linear_map=own_map.folder), Restoring(small_lm)
    fit(count, max_steps=2, module=module, data=module.data(1, 3, n_edits=4))
    assert count.results["n_edits"] == 0
    assert count.results["generalized"] is count.results["random"] is None


@pytest.mark.parametrize("n", range(2, 9))
def test_no_label_keeps_its_row_in_the_permuted_map(n):
    watch = GradientCorrelation("city->country")
    watch.maps = {"given": (torch.eye(n, dtype=torch.float64), torch.zeros(n))}
    none = torch.zeros(4000, n, dtype=torch.float64)
    change = torch.from_numpy(np.random.default_rng(n).normal(size=none.shape))
    found = watch._correlate(DomainLogits(none, none), DomainLogits(change, change))
    assert found["gradient_correlation"] == pytest.approx(1)
    assert abs(found["permuted_gradient_correlation"]) < 0.5 / n  # a row that is kept adds 1 / n
