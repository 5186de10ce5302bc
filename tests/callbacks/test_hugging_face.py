"""The callbacks in a Hugging Face Trainer."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lincorr_lightning.callbacks import Generalization, GradientCorrelation, Resilience
from lincorr_lightning.callbacks.hugging_face import HuggingFaceCallback
from tests.launching import launch

SUBJECTS = ["name1", "name2", "name3", "name4", "name5"]


class Sentences(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Keeps(TrainerCallback):
    """Copies of the LM before training and after each step."""

    def __init__(self):
        self.states = []

    def on_train_begin(self, args, state, control, model=None, **others):
        self.states.append(copy.deepcopy(model))

    on_step_end = on_train_begin


@pytest.fixture
def train(naive, small_lm, tmp_path):
    def run(*callbacks, **options):
        module = naive.module(small_lm)
        rows = torch.cat(list(naive.sentences(small_lm)))
        settings = {
            "per_device_train_batch_size": 2,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "report_to": [],
            "save_strategy": "no",
            "use_cpu": True,
            "seed": 1,
            "disable_tqdm": True,
            "logging_strategy": "no",
        }
        trainer = Trainer(
            module.backbone,
            TrainingArguments(str(tmp_path / "out"), **settings | options),
            train_dataset=Sentences(rows),
            eval_dataset=Sentences(rows[:2]),
            processing_class=module.tokenizer,
            callbacks=list(callbacks),
        )
        trainer.train()
        return trainer

    return run


@pytest.mark.parametrize("accumulate", [1, 2])
def test_numbers_are_those_of_plain_forwards(naive, own_map, train, tmp_path, accumulate):
    count = Generalization("city->country", naive.edits, linear_map=own_map.folder)
    gradients = GradientCorrelation("city->country", own_map.folder, subjects=SUBJECTS)
    resilience = Resilience(own_map.folder, subjects=SUBJECTS, every_n_steps=3)
    keeps = Keeps()
    trainer = train(
        HuggingFaceCallback(gradients, count, resilience),
        keeps,
        gradient_accumulation_steps=accumulate,
    )
    states, tokenizer = keeps.states, trainer.processing_class
    bare = train(gradient_accumulation_steps=accumulate)
    for one, other in zip(trainer.model.parameters(), bare.model.parameters(), strict=True):
        assert torch.equal(one, other)
    subjects = [edit["subject"] for edit in naive.edits]
    before, after = (
        naive.logits(state, tokenizer, "country", subjects).argmax(1)
        for state in states[:: len(states) - 1]
    )
    outcomes = [
        "generalized"
        if naive.countries[new] == naive.places[edit["answer"]]
        else "unchanged"
        if new == old
        else "hallucinated"
        for edit, old, new in zip(naive.edits, before, after, strict=True)
    ]
    for name in ("generalized", "hallucinated", "unchanged"):
        share = pytest.approx(outcomes.count(name) / len(outcomes))
        assert count.results[name] == share
        assert trainer.state.log_history[-1][f"generalization/{name}"] == share
    source, target = (
        [naive.logits(state, tokenizer, what, SUBJECTS) for state in states]
        for what in ("city", "country")
    )
    expected = {
        step: naive.r(
            (source[step] - source[step - 1]) @ own_map.weight.T, target[step] - target[step - 1]
        )
        for step in range(1, len(states))
    }
    found = dict(gradients.history["gradient_correlation/city->country"])
    assert found == pytest.approx(expected, abs=1e-3)
    steps = [step for step, _ in resilience.history["resilience/city->country"]]
    assert steps == sorted({*range(0, len(states), 3), len(states) - 1})
    last = naive.r(source[-1] @ own_map.weight.T + own_map.bias, target[-1])
    assert resilience.results["after"] == pytest.approx(last, abs=1e-3)
    assert [path.name for path in tmp_path.rglob("cases.csv")]


class Fails(TrainerCallback):
    """Stops the first training as Ctrl-C does."""

    has_failed = False

    def on_step_end(self, args, state, control, **others):
        if not self.has_failed:
            self.has_failed = True
            raise KeyboardInterrupt


def test_a_training_that_failed_leaves_nothing_behind(naive, own_map, train):
    count = Generalization("city->country", naive.edits, linear_map=own_map.folder)
    watch = HuggingFaceCallback(count)
    with pytest.raises(KeyboardInterrupt):
        train(watch, Fails())
    assert count.results == {}
    train(watch)
    assert count.results["n_edits"] == len(naive.edits)


def test_their_early_stopping_finds_the_keys(naive, own_map, train):
    count = Generalization("city->country", naive.edits, linear_map=own_map.folder)
    trainer = train(
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
    subjects = [edit["subject"] for edit in naive.edits]
    cities = naive.logits(trainer.model, trainer.processing_class, "city", subjects).argmax(1)
    right = [naive.cities[i] == edit["answer"] for i, edit in zip(cities, naive.edits, strict=True)]
    assert count.results["source_learned"] == pytest.approx(sum(right) / len(right))


def _train_in_two(rank, folder, out):
    del rank
    module = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = tokenizer(["name1 lives in the city of Paris"] * 4, return_tensors="pt")["input_ids"]
    watch = GradientCorrelation("city->country", subjects=SUBJECTS)
    Trainer(
        module,
        TrainingArguments(
            out, max_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
        ),
        train_dataset=Sentences(rows),
        processing_class=tokenizer,
        callbacks=[HuggingFaceCallback(watch)],
    ).train()


def test_two_processes_share_the_folder_of_the_first(small_lm, tmp_path):
    launch(2, _train_in_two, small_lm, str(tmp_path / "out"))
    assert len(list(tmp_path.rglob("gradient_correlation.csv"))) == 1
