"""The callbacks in a Hugging Face Trainer."""

from itertools import pairwise

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from lincorr_lightning.callbacks import Generalization, GradientCorrelation, Resilience
from lincorr_lightning.callbacks.hugging_face import HuggingFaceCallback
from tests.callbacks import naive
from tests.launching import launch

pytestmark = pytest.mark.slow

SUBJECTS = ["name1", "name2", "name3", "name4", "name5"]


class Keeps(TrainerCallback):
    """Copies of the LM before training and after each step, and metrics of evaluations by step."""

    def __init__(self):
        self.states = []
        self.evaluated = {}

    def on_train_begin(self, args, state, control, model=None, **others):
        plain = type(model)(model.config).eval()  # a copy would have the Trainer's own forward
        plain.load_state_dict(model.state_dict())
        self.states.append(plain)

    on_step_end = on_train_begin

    def on_evaluate(self, args, state, control, metrics=None, **others):
        self.evaluated[state.global_step] = metrics


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_numbers_are_those_of_plain_forwards(own_map, hugging_face, tmp_path, precision):
    count = Generalization("city->country", naive.EDITS, linear_map=own_map.folder)
    gradients = GradientCorrelation("city->country", own_map.folder, subjects=SUBJECTS)
    resilience = Resilience(own_map.folder, subjects=SUBJECTS, every_n_steps=3)
    keeps = Keeps()
    watch = HuggingFaceCallback(gradients, count, resilience)
    trainer = hugging_face(watch, keeps, gradient_accumulation_steps=2, **precision)
    states, tokenizer = keeps.states, trainer.processing_class
    bare = hugging_face(gradient_accumulation_steps=2, **precision)
    for one, other in zip(trainer.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(one, other)
    subjects = [edit["subject"] for edit in naive.EDITS]
    everyone = [*subjects, *count.others]
    base, last = (naive.answers(states[i], tokenizer, everyone) for i in (0, -1))
    expected = naive.outcomes(base, last, naive.EDITS, slice(len(subjects), None))
    logged = trainer.state.log_history[-1]
    assert {key: logged.get(key, float("nan")) for key in expected} == pytest.approx(
        expected, abs=1e-3, nan_ok=True
    )
    answers = [naive.answers(state, tokenizer, SUBJECTS) for state in states]
    weight, bias = own_map.weight, own_map.bias
    r = {
        step: naive.r((now["city"] - then["city"]) @ weight.T, now["country"] - then["country"])
        for step, (then, now) in enumerate(pairwise(answers), 1)
    }
    found = dict(gradients.history["gradient_correlation/city->country"])
    assert found == pytest.approx(r, abs=1e-3)
    steps = [step for step, _ in resilience.history["resilience/city->country"]]
    assert steps == sorted({*range(0, len(states), 3), len(states) - 1})
    after = naive.r(answers[-1]["city"] @ weight.T + bias, answers[-1]["country"])
    assert resilience.results["after"] == pytest.approx(after, abs=1e-3)
    assert [path.name for path in tmp_path.rglob("cases.csv")]


class Fails(TrainerCallback):
    """Stops the first training as Ctrl-C does."""

    has_failed = False

    def on_step_end(self, args, state, control, **others):
        if not self.has_failed:
            self.has_failed = True
            raise KeyboardInterrupt


def test_a_training_that_failed_leaves_nothing_behind(own_map, hugging_face):
    count = Generalization("city->country", naive.EDITS, linear_map=own_map.folder)
    watch = HuggingFaceCallback(count)
    with pytest.raises(KeyboardInterrupt):
        hugging_face(watch, Fails())
    assert count.results == {}
    hugging_face(watch)
    assert count.results["n_edits"] == len(naive.EDITS)


def test_their_early_stopping_finds_the_keys(own_map, hugging_face):
    count = Generalization("city->country", naive.EDITS, linear_map=own_map.folder)
    trainer = hugging_face(
        HuggingFaceCallback(count),
        EarlyStoppingCallback(1),
        num_train_epochs=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_generalization/source_learned",
    )
    n_steps = 4  # of an epoch
    learned = [
        share
        for step, share in count.history["generalization/source_learned"]
        if step and step % n_steps == 0
    ]
    assert 1 < len(learned) < 20
    assert trainer.state.best_metric == pytest.approx(max(learned))
    # The results are those of the LM that was loaded in the end.
    subjects = [edit["subject"] for edit in naive.EDITS]
    cities = naive.logits(trainer.model, trainer.processing_class, "city", subjects).argmax(1)
    right = [naive.CITIES[i] == edit["answer"] for i, edit in zip(cities, naive.EDITS, strict=True)]
    assert count.results["source_learned"] == pytest.approx(sum(right) / len(right))


@pytest.mark.parametrize(
    "when", [{"eval_strategy": "steps", "eval_steps": 3}, {"eval_strategy": "epoch"}]
)
def test_evaluations_are_of_the_weights_they_evaluate(own_map, hugging_face, when):
    """Whether or not the callbacks measure that step, and after other hands changed the LM."""
    weight, bias = own_map.weight, own_map.bias
    options = {"linear_map": own_map.folder, "subjects": SUBJECTS, "every_n_steps": 100}
    gradients, keeps = GradientCorrelation("city->country", **options), Keeps()
    trainer = hugging_face(HuggingFaceCallback(Resilience(**options), gradients), keeps, **when)

    def answers(model):
        return naive.answers(model, trainer.processing_class, SUBJECTS)

    def of_map(now):
        return naive.r(now["city"] @ weight.T + bias, now["country"])

    def of_step(then, now):
        return naive.r((now["city"] - then["city"]) @ weight.T, now["country"] - then["country"])

    states = [answers(state) for state in keeps.states]
    assert len(keeps.evaluated) > 1
    for i, metrics in keeps.evaluated.items():
        r = of_step(states[i - 1], states[i])
        assert metrics["eval_gradient_correlation/city->country"] == pytest.approx(r, abs=1e-3)
        r = of_map(states[i])
        assert metrics["eval_resilience/city->country"] == pytest.approx(r, abs=1e-3)
    with torch.no_grad():
        trainer.model.get_output_embeddings().weight.add_(0.1)
    changed = trainer.evaluate()["eval_resilience/city->country"]
    assert changed == pytest.approx(of_map(answers(trainer.model)), abs=1e-3)


def _train_in_two(rank, folder, out):
    del rank
    watch = HuggingFaceCallback(GradientCorrelation("city->country", subjects=SUBJECTS))
    naive.train_by_hugging_face(folder, out, [watch], max_steps=1)


def test_two_processes_share_the_folder_of_the_first(small_lm, tmp_path):
    launch(2, _train_in_two, small_lm, str(tmp_path / "out"))
    assert len(list(tmp_path.rglob("gradient_correlation.csv"))) == 1
