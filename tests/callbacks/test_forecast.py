"""The forecast of edits before any LightningModule trains them."""

import csv

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lincorr_lightning.callbacks import Forecast, Generalization
from lincorr_lightning.errors import ConfigError

OPTIONS = {"learning_rate": 1e-2, "n_steps": 4, "n_subjects": 60}


def test_a_forecast_is_there_before_training_and_changes_nothing(naive, small_lm, fit, tmp_path):
    def train(*callbacks):
        torch.manual_seed(0)
        module = naive.module(small_lm, lr=0.02)
        trainer = fit(*callbacks, module=module)
        return trainer, module.state_dict()

    class Seen(Generalization):
        def start(self, trainer):
            super().start(trainer)
            self.before = dict(trainer.callback_metrics)

    forecast = Forecast("city->country", naive.edits, **OPTIONS)
    seen = Seen("city->country", naive.edits)
    trainer, weights = train(forecast, seen)
    for one, other in zip(weights.values(), train()[1].values(), strict=True):
        assert torch.equal(one, other)
    means = forecast.results["mean_probability"]
    assert sum(means.values()) == pytest.approx(1)
    for outcome, mean in means.items():
        assert float(seen.before[f"forecast/{outcome}"]) == pytest.approx(mean)
    (file,) = tmp_path.rglob("tables/forecast.csv")
    with file.open() as handle:
        rows = list(csv.DictReader(handle))
    assert [row["subject"] for row in rows] == [edit["subject"] for edit in naive.edits]
    # The answer before is what the LM gives for each subject by itself.
    base = naive.module(small_lm)
    subjects = [edit["subject"] for edit in naive.edits]
    logits = naive.logits(base.backbone, base.tokenizer, "country", subjects)
    assert np.allclose(forecast.forecasts.before, logits, atol=1e-4)
    assert trainer.global_step > 0


def test_a_resumed_run_has_the_forecast_of_its_start(naive, small_lm, fit, tmp_path):
    def run(ckpt_path=None):
        forecast = Forecast("city->country", naive.edits, **OPTIONS)
        keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        fit(
            forecast, keep, max_epochs=2, enable_checkpointing=True, ckpt_path=ckpt_path,
            module=naive.module(small_lm, 0.02),
        )  # fmt: skip
        return forecast

    first, again = run(), run(tmp_path / "epoch=0.ckpt")
    assert again.results == first.results
    assert torch.equal(again.forecasts.probabilities, first.forecasts.probabilities)


def test_a_forecast_needs_edits(naive, small_lm, fit):
    with pytest.raises(ConfigError, match=r"Forecast has no edits.*Forecast\.edits"):
        fit(Forecast("city->country"), module=naive.module(small_lm))


class Grows(L.Callback):
    """Changes the weights after the last step, as a swap for their average does."""

    def on_train_end(self, trainer, pl_module):
        with torch.no_grad():
            for weight in pl_module.backbone.parameters():
                weight.mul_(1.3)


def test_callbacks_after_a_forecast_measure_the_weights_that_fit_leaves(naive, small_lm, fit):
    module, seen = naive.module(small_lm, lr=0.02), Generalization("city->country", naive.edits)
    fit(Forecast("city->country", naive.edits, **OPTIONS), seen, Grows(), module=module)
    subjects = [edit["subject"] for edit in naive.edits]
    logits = naive.logits(module.backbone, module.tokenizer, "country", subjects)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    references = [naive.countries.index(naive.places[edit["answer"]]) for edit in naive.edits]
    expected = p[np.arange(len(p)), references].mean()
    assert seen.results["probability_reference"] == pytest.approx(expected, abs=1e-4)
