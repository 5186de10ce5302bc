"""The forecast of edits before any LightningModule trains them."""

import csv

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lincorr_lightning.callbacks import Forecast


def test_a_forecast_is_there_before_training_and_changes_nothing(naive, small_lm, fit, tmp_path):
    def train(*callbacks):
        torch.manual_seed(0)
        module = naive.module(small_lm, lr=0.02)
        trainer = fit(*callbacks, module=module)
        return trainer, module.state_dict()

    class Seen(L.Callback):
        def on_train_batch_start(self, trainer, *_):
            self.before = dict(trainer.callback_metrics)
            self.output = forecast.output

    forecast = Forecast("city->country", naive.edits)
    seen = Seen()
    trainer, weights = train(forecast, seen)
    for one, other in zip(weights.values(), train()[1].values(), strict=True):
        assert torch.equal(one, other)
    (file,) = tmp_path.rglob("tables/forecast.csv")
    with file.open() as handle:
        rows = list(csv.DictReader(handle))
    assert [row["subject"] for row in rows] == [edit["subject"] for edit in naive.edits]
    # The nearest word is that of the LM before training.
    base = naive.module(small_lm)
    head = base.backbone.get_output_embeddings().weight.detach().double().numpy()
    cities, countries = (
        head[base.tokenizer.convert_tokens_to_ids(labels)]
        for labels in (naive.cities, naive.countries)
    )
    cities = cities - cities.mean(0)
    countries = countries - countries.mean(0)
    countries /= np.linalg.norm(countries, axis=1, keepdims=True)
    right = 0
    for row, edit in zip(rows, naive.edits, strict=True):
        nearest = countries @ cities[naive.cities.index(edit["answer"])]
        assert row["nearest"] == naive.countries[nearest.argmax()]
        assert row["reference"] == naive.places[edit["answer"]]
        right += row["nearest"] == row["reference"]
    assert float(seen.before["forecast/right"]) == pytest.approx(right / len(rows))
    assert forecast.results["nearest"]["right"] == pytest.approx(right / len(rows))
    assert trainer.global_step > 0 and seen.output is forecast.output


def test_a_resumed_run_has_the_forecast_of_its_start(naive, small_lm, fit, tmp_path):
    def run(ckpt_path=None):
        forecast = Forecast("city->country", naive.edits)
        keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        fit(
            forecast,
            keep,
            max_epochs=2,
            enable_checkpointing=True,
            ckpt_path=ckpt_path,
            module=naive.module(small_lm, 0.02),
        )
        return forecast

    first, again = run(), run(tmp_path / "epoch=0.ckpt")
    assert again.results == first.results
    assert again.forecasts == first.forecasts
