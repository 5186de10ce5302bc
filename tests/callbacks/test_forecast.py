"""The forecast of edits before any LightningModule trains them."""

import lightning as L
import pytest

from lincorr_lightning.callbacks import Forecast
from tests.callbacks import naive
from tests.nearness import causal_nearness
from tests.toys import read_table


def test_a_forecast_is_there_before_training(small_lm, fit, tmp_path):
    class Seen(L.Callback):
        def on_train_batch_start(self, trainer, *_):
            self.before = dict(trainer.callback_metrics)
            self.output = forecast.output

    forecast = Forecast("city->country", naive.EDITS)
    seen = Seen()
    trainer = fit(forecast, seen)
    (file,) = tmp_path.rglob("tables/forecast.csv")
    rows = read_table(file)
    assert [row["subject"] for row in rows] == [edit["subject"] for edit in naive.EDITS]
    # The nearest word is that of the LM before training.
    base = naive.Module(small_lm)
    head = base.backbone.get_output_embeddings().weight.detach().numpy()
    ids = (base.tokenizer.convert_tokens_to_ids(x) for x in (naive.CITIES, naive.COUNTRIES))
    near = causal_nearness(head, *ids)
    right = 0
    for row, edit in zip(rows, naive.EDITS, strict=True):
        nearest = near[:, naive.CITIES.index(edit["answer"])]
        assert row["nearest"] == naive.COUNTRIES[nearest.argmax()]
        assert row["reference"] == naive.PLACES[edit["answer"]]
        right += row["nearest"] == row["reference"]
    assert float(seen.before["forecast/right"]) == pytest.approx(right / len(rows))
    assert forecast.results["nearest"]["right"] == pytest.approx(right / len(rows))
    assert trainer.global_step > 0 and seen.output is forecast.output
