"""A run's folder, and what is written to it."""

import csv
import errno
import io
import os
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import lightning as L
import numpy as np
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import (
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from lightning.pytorch.loggers.logger import DummyLogger
from matplotlib.figure import Figure as MatplotlibFigure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lincorr_lightning.errors import OutputError, ReportError
from lincorr_lightning.lightning_workarounds import RunLogger
from lincorr_lightning.results import run_folder as module
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.run_folder import (
    RunFolder,
    collect_callback_results,
    prepare_run_folder,
    run_folder,
    write_parts,
)
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import Table
from tests.toys import NO_FILES, drawn_figures, quiet_trainer


class SmallStudy(BoringModel):
    """Stands for a study: only its name matters here."""


def make_trainer(root: Path, logger: Any = False, **options: Any) -> L.Trainer:
    trainer: L.Trainer = quiet_trainer(root, **NO_FILES | {"logger": logger} | options)
    trainer.strategy.connect(SmallStudy())
    return trainer


def test_without_logger_each_trainer_gets_one_new_folder(tmp_path: Path) -> None:
    first, second = make_trainer(tmp_path), make_trainer(tmp_path)
    assert run_folder(first) == tmp_path / "small_study" / "version_0"
    (tmp_path / "small_study" / "version_x").mkdir()
    (tmp_path / "small_study" / "version_9").write_text("a file of somebody's")
    assert run_folder(second) == tmp_path / "small_study" / "version_10"
    assert run_folder(first) == tmp_path / "small_study" / "version_0"
    named = make_trainer(tmp_path, callbacks=[RunFolder("mine")])
    assert run_folder(named) == tmp_path / "mine" / "version_0"


@pytest.mark.parametrize("kind", [TensorBoardLogger, CSVLogger])
def test_a_logger_s_own_folder_is_taken(tmp_path: Path, kind: type[Logger]) -> None:
    trainer = make_trainer(tmp_path, kind(tmp_path, name="mine"))  # type: ignore[call-arg]
    assert run_folder(trainer) == tmp_path / "mine" / "version_0"
    assert run_folder(trainer) == Path(trainer.log_dir or "")


def test_a_logger_without_a_folder_a_run_does_not_mix_runs(tmp_path: Path) -> None:
    class Elsewhere(DummyLogger):
        save_dir = str(tmp_path / "logs")

    folders = [run_folder(make_trainer(tmp_path, Elsewhere())) for _ in range(2)]
    assert folders == [tmp_path / "logs" / "small_study" / f"version_{i}" for i in range(2)]


def test_all_ranks_take_the_folder_or_the_refusal_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that raised alone would leave the others waiting."""
    (tmp_path / "small_study").write_text("")
    trainer = make_trainer(tmp_path)
    sent: list[Any] = []
    monkeypatch.setattr(trainer.strategy, "broadcast", lambda obj, src=0: sent.append(obj) or obj)
    with pytest.raises(OutputError, match=r"small_study: .* Make room"):
        run_folder(trainer)
    assert isinstance(sent[-1], OutputError)
    other = make_trainer(tmp_path / "other")
    monkeypatch.setattr(type(other), "is_global_zero", False)
    choices = iter([str(tmp_path), tmp_path / "chosen"])
    monkeypatch.setattr(other.strategy, "broadcast", lambda obj, src=0: next(choices))
    assert run_folder(other) == tmp_path / "chosen"
    assert everything(tmp_path) == ["small_study"]


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def write_results(trainer: L.Trainer, found: Results) -> None:
    """As a study ends its run."""
    write_parts(trainer, found)
    if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        found.write_values(run_folder(trainer))


# -- results of callbacks ------------------------------------------------------------------------


class Watching(L.Callback):
    def __init__(self, name: str, value: float) -> None:
        table = Table.of(name, [[value]], ["value"])
        figure = Figure(name, "", lambda: MatplotlibFigure((1, 1), dpi=50))
        self.output = Results(name, {"value": value}, {f"{name}/value": value}, [table], [figure])

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        write_parts(trainer, self.output)


class StudyWithCallbacks(BoringModel):
    def setup(self, stage: str) -> None:
        prepare_run_folder(self.trainer)

    def on_fit_end(self) -> None:
        included = collect_callback_results(self.trainer)
        write_results(self.trainer, Results("study", included=included))


def study_trainer(root: Path, logger: Any, *callbacks: L.Callback) -> L.Trainer:
    options = {"logger": logger, "callbacks": list(callbacks), "limit_val_batches": 1}
    trainer: L.Trainer = quiet_trainer(root, max_steps=1, **NO_FILES | options)
    return trainer


@pytest.mark.parametrize("logger", [lambda path: False, lambda path: RunLogger(path, name="run")])
def test_results_of_callbacks_join_those_of_the_study(
    tmp_path: Path, logger: Callable[[Path], Any]
) -> None:
    watching = [Watching("moved", 0.5), Watching("x", 1.0)]
    trainer = study_trainer(tmp_path, logger(tmp_path), L.Callback(), *watching)
    trainer.fit(StudyWithCallbacks())
    run = SavedRun.read(run_folder(trainer))
    assert (run.values["moved"], run.values["x"]) == ({"value": 0.5}, {"value": 1.0})
    assert [table.frame["value"][0] for table in run.tables] == [0.5, 1.0]
    assert [figure.name for figure in run.figures] == ["moved", "x"]
    assert float(trainer.callback_metrics["moved/value"]) == 0.5


# -- runs that do not finish ---------------------------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(ReportError, match="did not finish") as caught:
        SavedRun.read(folder)
    return str(caught.value)


def test_a_disk_that_is_full_at_any_file_leaves_an_unfinished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, flush = os.fsync, EventFileWriter.flush
    n_left = 0
    complete: list[Path] = []

    def use_space() -> None:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", lambda file: (use_space(), fsync(file)))
    monkeypatch.setattr(EventFileWriter, "flush", lambda self: (use_space(), flush(self)))
    for n_files in count():
        n_left = n_files
        trainer = study_trainer(
            tmp_path, RunLogger(tmp_path, name="run"), Watching("a", 0.5), Watching("b", 1.0)
        )
        try:
            trainer.fit(StudyWithCallbacks())
        except (OutputError, OSError) as error:  # of events, which the program explains
            message = str(error)
        else:
            break
        assert "No space left on device" in message and "\n" not in message
        folder = run_folder(trainer)
        assert not [name for name in everything(folder) if ".part-" in name]
        if "results.json" in everything(folder):  # the logger's last flush, with nothing to write
            complete.append(folder)
        elif everything(folder):
            refused(folder)
    assert n_files > 10
    assert all(len(everything(one)) == len(everything(run_folder(trainer))) for one in complete)
    assert SavedRun.read(run_folder(trainer)).study == "study"


def test_an_earlier_run_s_results_do_not_make_a_later_one_look_finished(tmp_path: Path) -> None:
    def fit(module: L.LightningModule) -> L.Trainer:
        trainer = study_trainer(tmp_path, CSVLogger(tmp_path, version=0), Watching("a", 0.5))
        trainer.fit(module)
        return trainer

    class Failing(StudyWithCallbacks):
        def on_train_end(self) -> None:
            raise ValueError("no")

    folder = run_folder(fit(StudyWithCallbacks()))
    with pytest.raises(ValueError, match="no"):
        fit(Failing())
    refused(folder)
    trainer = fit(StudyWithCallbacks())
    assert run_folder(trainer) == folder and SavedRun.read(folder).study == "study"
    assert not (folder / "results.earlier.json").exists()
    trainer.validate(StudyWithCallbacks())  # it writes no results
    assert SavedRun.read(folder).study == "study"


# -- loggers -------------------------------------------------------------------------------------


def results(n_rows: int = 2) -> Results:
    rows = [[f"p{i}", i / 4] for i in range(n_rows)]
    table = Table.of("pairs", rows, ["pair", "r"], "Pairs.", "Read me.", formats={"r": ".2f"})
    figure = Figure("matrix", "All pairs.", lambda: MatplotlibFigure((3, 2), dpi=60))
    numbers = {"test/r": 0.5, "test/none": float("nan")}
    return Results("study", {"n": 1}, numbers, [table], [figure], verdict=["It is so."])


class Study(BoringModel):
    """Hands over its results at the end of a fit."""

    def __init__(self, found: Results) -> None:
        super().__init__()
        self.found = found

    def on_fit_end(self) -> None:
        write_results(self.trainer, self.found)


def run(logger: Any, folder: Path, found: Results | None = None, **options: Any) -> L.Trainer:
    options |= {"logger": logger, "limit_val_batches": 0}
    trainer: L.Trainer = quiet_trainer(folder, max_steps=2, **NO_FILES | options)
    trainer.fit(Study(found or results()))
    return trainer


def test_tensorboard(tmp_path: Path) -> None:
    found = results(130)
    found.scalars |= {f"test/r/{i:03}": i / 8 for i in range(130)}
    trainer = run(TensorBoardLogger(tmp_path), tmp_path, found)
    events = EventAccumulator(str(trainer.log_dir)).Reload()
    logged = {*events.Tags()["scalars"]} & found.scalars.keys()
    assert logged == {"test/r", *(f"test/r/{i:03}" for i in range(4))}, "those of HPARAMS alone"
    assert float(trainer.callback_metrics["test/r/129"]) == 129 / 8, "monitors have all"
    (scalar,) = events.Scalars("test/r")
    assert scalar.value == 0.5
    assert "_hparams_/session_start_info" in events.summary_metadata
    text = events.Tensors("tables/numbers/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| test/r | 0.5 |" in text and text.count("\n") == 51 and "test/none" not in text
    text = events.Tensors("Verdict/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "It is so."
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


def stand_in(kind: type[Logger]) -> Any:
    """A logger without its server: it takes the calls that its class has, and no others."""
    return create_autospec(kind, instance=True, experiment=Mock(), save_dir=None, run_id="run")


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TABLE_ROWS", 3)
    logger = stand_in(WandbLogger)
    found = results(5)
    gaps = Table.of("gaps", [["a", 3], ["b", None]], ["pair", "n"])
    assert str(gaps.frame["n"].dtype) == "Int64", "whose gaps are NA"
    with drawn_figures():
        run(logger, tmp_path, replace(found, tables=[*found.tables, gaps]))
    logger.experiment.summary.update.assert_called_once_with({"test/r": 0.5})
    logger.log_metrics.assert_not_called()
    tables = {}
    for key, given in logger.log_table.call_args_list:
        frame = given.pop("dataframe")
        assert given == {"step": 2}
        tables[key] = [list(frame), *frame.values.tolist()]
    assert tables == {
        ("tables/pairs",): [["pair", "r"], ["p0", 0.0], ["p1", 0.25], ["p2", 0.5]],
        ("tables/gaps",): [["pair", "n"], ["a", 3], ["b", None]],
    }
    ((key, given),) = logger.log_image.call_args_list
    ((image,), caption, step) = (given[name] for name in ("images", "caption", "step"))
    assert (*key, image.size, caption, step) == ("figures/matrix", (180, 120), ["All pairs."], 2)


def test_mlflow_drops_no_sign_that_tells_two_numbers_apart(tmp_path: Path) -> None:
    logger = stand_in(MLFlowLogger)
    found = results()
    names = "X+1->X*2", "X+1->X+2", "X+1->X-2", "X+1->X2", "上海", "北京", "city->a (2)", "city->a2"
    found.scalars |= {f"r/{name}": float(i) for i, name in enumerate(names)}
    run(logger, tmp_path, found)
    ((metrics,), _) = logger.log_metrics.call_args
    kept = {re.sub("[^a-zA-Z0-9_/. -]+", "", key): x for key, x in metrics.items()}  # its rule
    assert kept.pop("test/r") == 0.5
    assert kept["r/X plus 1 to X times 2"] == 0
    assert sorted(kept.values()) == list(range(len(names)))
    client = logger.experiment
    client.log_text.assert_called_once_with("run", "pair,r\np0,0.0\np1,0.25\n", "tables/pairs.csv")
    ((run_id, image, name), _) = client.log_image.call_args
    assert isinstance(image, Image.Image) and (run_id, name) == ("run", "figures/matrix.png")


def test_a_dry_run_leaves_nothing_but_numbers_to_monitor(tmp_path: Path) -> None:
    trainer = run(None, tmp_path, fast_dev_run=True)
    assert float(trainer.callback_metrics["test/r"]) == 0.5
    assert list(tmp_path.rglob("*")) == []
