"""The contract of all callbacks: no trace on training, each prompt read once, resumed runs."""

import copy
import random
import re
import shutil
import signal
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from lincorr_lightning.callbacks import (
    FeatureMovement,
    Forecast,
    Generalization,
    GradientCorrelation,
    Resilience,
    TokenGeometryMonitor,
)
from lincorr_lightning.cli import termination
from lincorr_lightning.cli.checkpoints import SignalCheckpoint
from lincorr_lightning.errors import (
    CheckpointError,
    ConfigError,
    LanguageModelError,
    LinearMapError,
)
from lincorr_lightning.finetune.batches import EditDataset, EditTraining
from lincorr_lightning.results.run_folder import run_folder
from lincorr_lightning.sae.hook_points import HookPoint
from tests.callbacks import naive
from tests.toys import assert_same, drawn_figures, toy_sae


def three_callbacks(**options):
    return [
        GradientCorrelation("city->country", **options),
        Generalization("city->country", naive.EDITS, **options),
        Resilience(**{"every_n_steps": 1} | options),
    ]


@pytest.fixture
def every_callback(tmp_path):
    """Make one callback of each class."""
    toy_sae(HookPoint(0, "residual"), torch.eye(16)).save(tmp_path / "saes" / "sae")
    return lambda: [
        *three_callbacks(),
        FeatureMovement(str(tmp_path / "saes"), "city->country", n_watch=8, every_n_steps=2),
        TokenGeometryMonitor(n_tokens=12, every_n_steps=2),
        Forecast("city->country", naive.EDITS),
    ]


def test_a_state_of_another_version_is_refused(every_callback):
    for callback in every_callback():
        name = type(callback).__name__
        with pytest.raises(CheckpointError, match=rf"state of {name} .*Train again"):
            callback.load_state_dict({**callback.state_dict(), "kept": 1})


# -- no trace --------------------------------------------------------------------------------------

WAYS_TO_TRAIN = {
    "plain": {},
    "lora": {"lora": True, "precision": "bf16-mixed", "accumulate_grad_batches": 3},
    "half": {"precision": "bf16-true", "gradient_clip_val": 0.1},
}


def train(folder, make_trainer, *callbacks, lora=False, **options):
    """Train an LM with dropout, in mixed modes, and return all that training leaves behind."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    module = naive.Module(folder)
    if lora:
        config = LoraConfig(r=2, lora_dropout=0.3, target_modules="all-linear")
        module.backbone = get_peft_model(module.backbone, config)
    trainer = make_trainer(*callbacks, max_epochs=2, **options)
    trainer.fit(module, naive.sentences(folder, shuffle=True))
    return {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "gradients": [p.grad for p in module.parameters()],
        "trainable": [p.requires_grad for p in module.parameters()],
        "torch": torch.get_rng_state(),
        "numpy": list(np.random.get_state()),  # noqa: NPY002
        "python": random.getstate(),
        "modes": [module.modes, [part.training for part in module.modules()]],
        "step": trainer.global_step,
    }, trainer


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS_TO_TRAIN)
def test_training_is_the_same_bit_for_bit(gpt2_folder, make_trainer, every_callback, way):
    """And what was measured is in `callback_metrics`, without any logger."""
    options, callbacks = WAYS_TO_TRAIN[way], every_callback()
    bare, _ = train(gpt2_folder, make_trainer, **options)
    watched, trainer = train(gpt2_folder, make_trainer, *callbacks, **options)
    assert_same(watched, bare)
    modes = bare["modes"][0]
    assert any(modes[0]) and not all(modes[0]), "the modes are to be mixed"
    assert len(callbacks[0].history["gradient_correlation/city->country"]) == bare["step"] > 1
    assert not trainer.loggers
    for callback in callbacks:
        assert callback.history and callback.results
        for key, points in callback.history.items():
            assert float(trainer.callback_metrics[key]) == pytest.approx(points[-1][1])
    torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), bare["torch"]), "a draw would show"


# -- each thing once -------------------------------------------------------------------------------


def counting(module, inner):
    """Forwards without gradient, by the number of updates before them."""
    seen = {}

    def hook(*_):
        if not torch.is_grad_enabled() and module._trainer.training:
            step = module.trainer.global_step
            seen[step] = seen.get(step, 0) + 1

    inner.register_forward_pre_hook(hook)
    return seen


@pytest.mark.parametrize(
    ("order", "every", "steps"), [([2, 1, 0], 2, [1, 2, 3, 4, 5, 6, 7]), ([0, 1, 2], 4, [1, 4, 5])]
)
def test_three_callbacks_cost_one_forward(small_lm, own_map, fit, order, every, steps):
    """And none between the steps that are due."""
    module = naive.Module(small_lm)
    seen = counting(module, module.backbone.model)
    three = three_callbacks(linear_map=own_map.folder, every_n_steps=every)
    fit(*(three[i] for i in order), module=module, data=naive.sentences(small_lm, 1))
    # The last one is that of all edits, at the end.
    assert {step: n for step, n in seen.items() if 0 < step < 8} == dict.fromkeys(steps, 1)


# -- runs of other shapes --------------------------------------------------------------------------


def test_a_rank_without_an_edit_at_a_step(small_lm, own_map, fit):
    """Where ranks share independent edits, some have none in the last round."""
    module = naive.OnEdits(small_lm)
    training = EditTraining(edits_per_step=2, n_steps=2)
    steps = naive.edits_data(module, n_edits=6, training=training).train_dataloader().dataset
    dataset = EditDataset(steps.resolved, steps.prompts, training, rank=1, n_shards=2)
    three = [
        kind(linear_map=own_map.folder, every_n_steps=1)
        for kind in (GradientCorrelation, Generalization, Resilience)
    ]
    fit(*three, module=module, data=DataLoader(dataset, batch_size=None))
    subjects = [edit.subject for edit in steps.edits[2:4]]
    assert [case.subject for case in three[1].cases] == subjects
    assert three[0].results["n_updates"] == 4
    assert [step for step, _ in three[2].history["resilience/city->country"]] == [0, 1, 2, 3, 4]


def test_independent_edits_of_another_dataset(small_lm, own_map, fit):
    module = naive.OnEdits(small_lm)
    data = naive.edits_data(module, n_edits=4, training=EditTraining(edits_per_step=2, n_steps=2))
    batches = [data.train_dataloader().dataset[i] for i in range(2)]
    with pytest.raises(ConfigError, match=r"all edits .* EditDataset"):
        fit(
            GradientCorrelation(linear_map=own_map.folder),
            module=module,
            data=DataLoader(batches, batch_size=None),
        )


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(small_lm, tmp_path, fit, every_callback):
    """Maps fitted at the start are kept: the LM is another one when the run continues."""

    def run(ckpt_path=None, subject="name9"):
        other = Generalization("city->country", [{"subject": subject, "answer": "Rome"}])
        callbacks = [*every_callback(), other]
        keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        options = {"max_epochs": 2, "enable_checkpointing": True, "ckpt_path": ckpt_path}
        trainer = fit(*callbacks, keep, module=naive.Module(small_lm, 0.01), **options)
        assert trainer.global_step == 8
        return callbacks

    uninterrupted = run()
    assert [uninterrupted[i].results["n_edits"] for i in (1, -1)] == [7, 1]
    resumed = run(tmp_path / "epoch=0.ckpt")
    for again, first in zip(resumed, uninterrupted, strict=True):
        assert_same(again.results, first.results)
        assert_same(again.history, first.history)
        for table, other in zip(again.output.tables, first.output.tables, strict=True):
            assert table.frame.equals(other.frame)
        assert getattr(again, "cases", None) == getattr(first, "cases", None)
    with pytest.raises(CheckpointError, match=r"Generalization .*only there .*name9"):
        run(tmp_path / "epoch=0.ckpt", "name8")


@pytest.mark.slow
def test_a_second_run_begins_anew(small_lm, every_callback, fit):
    """Callbacks that are used again, on an LM that has learned since."""
    used, new = every_callback(), every_callback()
    module = naive.Module(small_lm, 0.02)
    fit(*used, module=module)
    fresh = copy.deepcopy(module)
    fit(*used, module=module)
    fit(*new, module=fresh)
    for again, first in zip(used, new, strict=True):
        assert_same(again.results, first.results)
        assert_same(again.history, first.history)


# -- several of a kind -----------------------------------------------------------------------------


@pytest.mark.slow
def test_two_of_a_kind_log_under_names_of_their_own(own_map, every_callback, fit):
    callbacks = every_callback()[3:] + every_callback()[3:]
    callbacks += [Generalization(edits=naive.EDITS[:n], linear_map=own_map.folder) for n in (5, 6)]
    with drawn_figures():
        trainer = fit(*callbacks)
    keys = [key for callback in callbacks for key in callback.history]
    assert len(keys) == len(set(keys))
    assert {key.partition("/")[0] for key in callbacks[3].history} == {"features_2"}
    files = {path.stem for path in (run_folder(trainer) / "tables").iterdir()}
    names = ("feature_movement", "token_geometry", "answers", "forecast", "by_step")
    names = (*names, "cases")
    assert files == {f"{name}{number}" for name in names for number in ("", "_2")}


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        (Resilience, {"every_n_steps": 0}, "every_n_steps is 0"),
        (Generalization, {"ridge": -1.0}, "ridge is -1.0"),
        (GradientCorrelation, {"n_watch": 2}, "n_watch is 2"),
        (GradientCorrelation, {"subjects": "name1"}, "subjects is 'name1'"),
        (Resilience, {"subjects": ["a", "b", "a"]}, "subjects names 2"),
        (FeatureMovement, {"saes": "a", "subjects": []}, "subjects names 0"),
    ],
)
def test_settings_out_of_range(kind, setting, message):
    with pytest.raises(ConfigError, match=re.escape(f"{kind.__name__}.{message}")) as refusal:
        kind(**setting)
    assert "\n" not in str(refusal.value)


def test_a_map_that_does_not_fit_is_refused(own_map, tmp_path, fit):
    config = Path(shutil.copytree(own_map.folder, tmp_path / "map")) / "config.json"
    config.write_text(config.read_text().replace("{} lives in the city of", "{} was born in"))
    for relation, folder, message in (
        (None, str(tmp_path / "map"), r"fitted with the city prompt '.. was born in', this"),
        (None, own_map.other, "labels of city are other tokens"),
        (None, "gone", "gone"),
        ("city->color", own_map.folder, "no knowledge 'color'; it has city, country"),
    ):
        with pytest.raises(LinearMapError, match=message):
            fit(GradientCorrelation(relation, folder))


def test_of_two_lms_one_is_named(small_lm, own_map, fit):
    class Pair(naive.Module):
        def __init__(self):
            super().__init__(small_lm)
            self.teacher = copy.deepcopy(self.backbone).requires_grad_(False)

    with pytest.raises(LanguageModelError, match=r"several LMs.*backbone.*teacher"):
        fit(Resilience(), module=Pair())
    named = [
        Resilience(own_map.folder, lm=name, every_n_steps=1) for name in ("teacher", "backbone")
    ]
    fit(*named, module=Pair())
    assert named[0].results["after"] == named[0].results["before"] == named[1].results["before"]
    assert named[1].results["after"] != named[1].results["before"]
    # They watch the same relation, and still have curves of their own.
    assert [list(each.history) for each in named] == [
        ["resilience/city->country"],
        ["resilience/city->country (2)"],
    ]


def test_a_tokenizer_must_be_named_if_none_is_found(small_lm, own_map, fit):
    class Bare(naive.Module):
        def __init__(self):
            super().__init__(small_lm)
            self.__dict__.pop("tokenizer")
            self.backbone.config._name_or_path = self.backbone.name_or_path = ""

    with pytest.raises(LanguageModelError, match="no tokenizer was found"):
        fit(Resilience(), module=Bare())
    watch = Resilience(own_map.folder, tokenizer=small_lm)
    fit(watch, module=Bare())
    assert watch.results["before"] is not None


class Resumable(DataLoader):
    """Says that it can go on in the middle of an epoch."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        del state_dict


class Signals(L.Callback):
    """Receives SIGTERM in the second step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            termination.current.signum = signal.SIGTERM


def test_what_a_signal_saves_has_the_measurement_of_its_step(small_lm, fit, tmp_path, monkeypatch):
    monkeypatch.setattr(termination, "current", termination.Termination())
    data = Resumable(naive.sentences(small_lm).dataset, batch_size=2)
    with pytest.raises(termination.Terminated):
        fit(SignalCheckpoint(), Signals(), Generalization("city->country", naive.EDITS), data=data)
    (path,) = tmp_path.rglob("interrupted.ckpt")
    saved = torch.load(path, weights_only=True)["callbacks"]
    (state,) = [one for key, one in saved.items() if key.startswith("Generalization")]
    assert [step for step, _ in state["history"]["generalization/generalized"]] == [0, 1, 2]
