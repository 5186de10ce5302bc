"""What Lightning's loggers get of a study's results."""

import csv
import inspect
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from matplotlib.figure import Figure as MatplotlibFigure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lincorr_lightning.results import run_folder as module
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.run_folder import (
    run_folder,
    write_results,
)
from lincorr_lightning.results.table import Table


def results(n_rows: int = 2) -> Results:
    rows = [[f"p{i}", i / 4] for i in range(n_rows)]
    table = Table.of("pairs", rows, ["pair", "r"], "Pairs.", "Read me.", formats={"r": ".2f"})
    figure = Figure("matrix", "All pairs.", lambda: MatplotlibFigure((3, 2), dpi=60))
    return Results(
        "study", {"n": 1}, {"test/r": 0.5, "test/none": float("nan")}, [table], [figure]
    )  # fmt: skip


class Study(BoringModel):
    """Hands over its results at the end of a fit, as studies do."""

    def __init__(self, found: Results) -> None:
        super().__init__()
        self.found = found

    def on_fit_end(self) -> None:
        write_results(self.trainer, self.found)


def run(logger: Any, folder: Path, found: Results | None = None, **options: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu", logger=logger, default_root_dir=folder, max_steps=2,
        limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1, **options,
    )  # fmt: skip
    trainer.fit(Study(found or results()))
    return trainer


def test_tensorboard(tmp_path: Path) -> None:
    trainer = run(TensorBoardLogger(tmp_path), tmp_path, results(130))
    events = EventAccumulator(str(trainer.log_dir)).Reload()
    (scalar,) = events.Scalars("test/r")
    assert (scalar.step, scalar.value) == (2, 0.5)
    assert "test/none" not in events.Tags()["scalars"]
    (logged,) = events.Images("figures/matrix")
    png = (run_folder(trainer) / "figures/matrix.png").read_bytes()
    pixels = [np.asarray(Image.open(io.BytesIO(one))) for one in (logged.encoded_image_string, png)]
    np.testing.assert_array_equal(*pixels)
    text = events.Tensors("tables/pairs/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("Pairs.\n\n| pair | r |") and "| p1 | 0.25 |" in text
    assert text.endswith("Read me. The first 100 of 130 rows.") and "| p100 |" not in text


def test_csv(tmp_path: Path) -> None:
    """Numbers of the run's end are in the file, though the last flush was before."""
    trainer = run(CSVLogger(tmp_path, flush_logs_every_n_steps=1000), tmp_path)
    with (Path(str(trainer.log_dir)) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("test/r")]
    assert [(row["step"], float(row["test/r"])) for row in rows] == [("2", 0.5)]


class WandbStandIn(DummyLogger):
    """Records what `WandbLogger`'s methods of the same signatures are given."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[tuple[dict[str, float], int | None]] = []
        self.tables: dict[str, tuple[list[str], list[list[Any]], int | None]] = {}
        self.images: dict[str, tuple[list[Any], list[str], int | None]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.metrics.append((metrics, step))

    def log_table(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None,
        step: int | None = None,
    ) -> None:  # fmt: skip
        assert columns is data is None
        self.tables[key] = (list(dataframe), dataframe.values.tolist(), step)

    def log_image(
        self, key: str, images: list[Any], step: int | None = None, **kwargs: Any
    ) -> None:
        self.images[key] = (images, kwargs["caption"], step)


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "log_table", "log_image":
        own, real = (inspect.signature(getattr(one, name)) for one in (WandbStandIn, WandbLogger))
        assert list(own.parameters) == list(real.parameters)
    monkeypatch.setattr(module, "MAX_TABLE_ROWS", 3)
    logger = WandbStandIn()
    run(logger, tmp_path, results(5))
    assert ({"test/r": 0.5}, 2) in logger.metrics
    assert logger.tables == {
        "tables/pairs": (["pair", "r"], [["p0", 0.0], ["p1", 0.25], ["p2", 0.5]], 2)
    }
    ((image,), caption, step) = logger.images["figures/matrix"]
    assert (image.size, caption, step) == ((180, 120), ["All pairs."], 2)


class MLFlowStandIn(MLFlowLogger):
    """An MLFlowLogger without a server."""

    def __init__(self) -> None:
        self.client = SimpleNamespace(texts={}, images={})
        self.client.log_text = lambda run, text, name: self.client.texts.update({name: text})
        self.client.log_image = lambda run, image, name: self.client.images.update({name: image})
        self.scalars: dict[str, float] = {}

    experiment = property(lambda self: self.client)
    run_id = property(lambda self: "run")
    name = property(lambda self: "mlflow")
    version = property(lambda self: 0)
    save_dir = property(lambda self: None)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.scalars.update(metrics)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    def finalize(self, status: str = "success") -> None: ...


def test_mlflow(tmp_path: Path) -> None:
    logger = MLFlowStandIn()
    run(logger, tmp_path)
    assert logger.scalars["test/r"] == 0.5
    assert logger.client.texts == {"tables/pairs.csv": "pair,r\np0,0.0\np1,0.25\n"}
    assert isinstance(logger.client.images["figures/matrix.png"], Image.Image)


def test_a_dry_run_leaves_nothing_but_numbers_to_monitor(tmp_path: Path) -> None:
    trainer = run(None, tmp_path, fast_dev_run=True)
    assert float(trainer.callback_metrics["test/r"]) == 0.5
    assert list(tmp_path.rglob("*")) == []
