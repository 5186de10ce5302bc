"""Where a training of edits is stopped, and which weights it leaves."""

import copy

import lightning as L
import numpy as np
import pytest
import torch

from lincorr_lightning.callbacks import Generalization, HuggingFaceCallback, StopAtLeak
from lincorr_lightning.errors import ConfigError
from tests.callbacks import naive

RIGHT = ["China", "Egypt", "France", "Japan"]  # of all edits, so that some generalize
EDITS = [edit | {"reference": RIGHT} for edit in naive.EDITS[:4]]


class Keeps(L.Callback):
    """Copies of the LM before training and after each step."""

    def __init__(self):
        self.states = []

    def on_train_start(self, trainer, module):
        self.states.append(copy.deepcopy(module.backbone))

    def on_train_batch_end(self, trainer, module, *_):
        self.states.append(copy.deepcopy(module.backbone))


def rule(states, tokenizer, others, max_leak):
    """The step that is best, and the one after which training stops, by plain forwards."""
    people = [*(edit["subject"] for edit in EDITS), *others]
    read = [naive.answers(state, tokenizer, people) for state in states]
    right = [naive.COUNTRIES.index(country) for country in RIGHT]
    best = -9.0, None
    for step in range(1, len(states)):
        rows = zip(read[step]["country"], read[0]["country"], strict=True)
        hits = [now.argmax() in right and was.argmax() not in right for now, was in rows]
        own, leak = np.mean(hits[: len(EDITS)]), np.mean(hits[len(EDITS) :])
        answers = [edit["answer"] for edit in EDITS]
        cities = read[step]["city"][: len(EDITS)].argmax(1)
        learned = np.mean([naive.CITIES[i] == a for i, a in zip(cities, answers, strict=True)])
        if learned >= 0.75 and own - leak > best[0]:
            best = own - leak, step
        if learned >= 0.75 and leak > max_leak:
            return best[1], step
    return best[1], None


@pytest.fixture(scope="module")
def lesson(small_lm):
    return naive.lessons(naive.Module(small_lm).tokenizer, EDITS)


def callbacks(own_map, max_leak):
    count = Generalization("city->country", EDITS, linear_map=own_map.folder, n_others=10)
    return count, StopAtLeak(min_learned=0.75, max_leak=max_leak)


@pytest.mark.parametrize("first", [True, False])
def test_training_stops_and_leaves_the_most_specific_weights(small_lm, own_map, fit, lesson, first):
    """Wherever it stands among the callbacks; results are of these weights, the curve of all."""
    count, stop = callbacks(own_map, 0.5)
    keeps = Keeps()
    order = (count, stop) if first else (stop, count)
    module = naive.Module(small_lm, lr=0.02)
    trainer = fit(*order, keeps, module=module, data=lesson, max_epochs=25)
    best, stopped = rule(keeps.states, module.tokenizer, count.others, 0.5)
    assert (stop.best_step, stop.stopped_step) == (best, stopped)
    assert best < stopped == trainer.global_step == len(keeps.states) - 1 < 25
    for name, weight in keeps.states[best].named_parameters():
        assert torch.equal(weight, dict(module.backbone.named_parameters())[name]), name
    steps = {row["step"]: row["specific"] for row in count.results["by_step"]}
    assert count.results["specific"]["mean"] == pytest.approx(steps[best])
    assert max(steps) == stopped and steps[best] > steps[stopped]


def test_a_training_that_does_not_leak_is_left_as_it_ends(small_lm, own_map, fit, lesson):
    count, stop = callbacks(own_map, 1.0)
    fit(count, stop, module=naive.Module(small_lm, lr=0.01), data=lesson, max_epochs=3)
    assert stop.stopped_step is None
    assert count.results["by_step"][-1]["step"] == 3


def test_in_a_trainer_of_hugging_face(small_lm, own_map, hugging_face, lesson):
    count, stop = callbacks(own_map, 0.5)
    trainer = hugging_face(
        HuggingFaceCallback(count, stop),
        rows=lesson.dataset,
        learning_rate=0.02,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        num_train_epochs=25,
    )
    assert stop.stopped_step == trainer.state.global_step < 25
    people = [*(edit["subject"] for edit in EDITS), *count.others]
    was, now = (
        naive.answers(model, trainer.processing_class, people)["country"].argmax(1)
        for model in (naive.Module(small_lm).backbone, trainer.model)
    )
    right = [naive.COUNTRIES.index(country) for country in RIGHT]
    hits = np.isin(now, right) & ~np.isin(was, right)
    specific = np.mean(hits[:4]) - np.mean(hits[4:])
    assert count.results["specific"]["mean"] == pytest.approx(specific)
    assert specific == pytest.approx(dict(count.history["generalization/specific"])[stop.best_step])


@pytest.mark.parametrize("others", [None, 0])
def test_without_other_people_there_is_no_rule(own_map, fit, others):
    count = Generalization("city->country", EDITS, linear_map=own_map.folder, n_others=0)
    with pytest.raises(ConfigError, match="n_others"):
        fit(StopAtLeak(), *([] if others is None else [count]))
