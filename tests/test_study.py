"""The base of every study: one refusal of checkpoints, and results on all ranks."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from torch.utils.data import DataLoader

from lincorr_lightning.cli import main
from lincorr_lightning.errors import (
    CheckpointError,
    ConfigError,
    LanguageModelError,
    NonFiniteError,
)
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.probe.module import LinearProbe
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table
from lincorr_lightning.study import FIXED_TRAINING, Study
from tests.small_runs import SMALL_RUNS, numbers
from tests.toys import quiet_trainer

IN_FORCE: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: nullcontext(torch.set_default_dtype(torch.float64)),
    "meta": lambda: torch.device("meta"),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


class Counting(Study):
    """Counts batches; each step is one of plain SGD on a single number."""

    study = "counting"
    batch_type = torch.Tensor
    free_settings = frozenset({"note"})

    def __init__(self, rate: float = 0.1, note: str = "", lm: LMConfig | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.rate, self.lm_settings = rate, lm
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.n = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        del batch_idx
        self.n += 1
        return (self.weight - batch.mean()) ** 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)

    def checkpoint_state(self) -> dict[str, Any]:
        return {"n": self.n}

    def restore(self, state: Any) -> None:
        self.n = state["n"]

    def build_results(self) -> Results:
        return Results("counting", {"n": self.n}, {"test/n": float(self.n)})

    def write_artifacts(self, folder: Path) -> None:
        (folder / "artifact.txt").write_text(str(self.n))


def loader() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.ones(4, 1), batch_size=1)  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    trainer = quiet_trainer(tmp_path / "first")
    trainer.fit(Counting(lm=LMConfig()), loader())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    return tmp_path / "end.ckpt"


def test_a_run_ends_in_one_place(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path)
    study = Counting(note="x")
    trainer.fit(study, loader())
    (path,) = tmp_path.rglob("results.json")
    written = json.loads(path.read_text())
    assert (written["study"], written["n"], written["settings"]["rate"]) == ("counting", 4, 0.1)
    assert (path.parent / "artifact.txt").read_text() == "4"
    assert study.results is not None and study.results.values == {"n": 4}
    assert trainer.callback_metrics["test/n"] == 4


def test_a_resumed_run_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    study = Counting(note="another", lm=LMConfig(dtype="bfloat16"))
    quiet_trainer(tmp_path, max_epochs=2).fit(study, loader(), ckpt_path=checkpoint)
    assert study.n == 8


def test_a_checkpoint_of_another_version_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    del content["study"]["n"]
    torch.save(content, checkpoint)
    with pytest.raises(CheckpointError, match="has no 'n': another version wrote it"):
        quiet_trainer(tmp_path, max_epochs=2).fit(Counting(), loader(), ckpt_path=checkpoint)


@pytest.mark.parametrize(
    ("option", "then", "now"),
    [("max_steps", 4, 3), ("limit_train_batches", 1.0, 1), ("precision", "32-true", "bf16-mixed")],
)
def test_settings_of_the_trainer_stay(option: str, then: Any, now: Any, tmp_path: Path) -> None:
    common = {"max_epochs": 2, "max_steps": 100}
    first = quiet_trainer(tmp_path / "first", **common | {option: then})
    first.fit(Counting(), loader())
    first.save_checkpoint(tmp_path / "end.ckpt")
    again = quiet_trainer(tmp_path, **common | {option: now})
    message = rf"(?i)trainer\.{option} .*{then}.*, this run has .*{now}"
    with pytest.raises(CheckpointError, match=message):
        again.fit(Counting(), loader(), ckpt_path=tmp_path / "end.ckpt")


def test_a_longer_run_goes_on_and_says_so(checkpoint: Path, tmp_path: Path) -> None:
    for n_epochs in (3, -1):
        study = Counting()
        stop = callbacks.LambdaCallback(
            on_train_batch_end=lambda trainer, module, *_: setattr(
                trainer, "should_stop", module.n == 12
            )
        )
        trainer = quiet_trainer(tmp_path, max_epochs=n_epochs, callbacks=[stop])
        with pytest.warns(UserWarning, match=f"max_epochs 1, this run has {n_epochs}: what follow"):
            trainer.fit(study, loader(), ckpt_path=checkpoint)
        assert study.n == 12


def test_a_step_has_one_batch(tmp_path: Path) -> None:
    class OneBatch(Counting):
        step_setting = "data.size"

    with pytest.raises(ConfigError, match=r"set data\.size"):
        quiet_trainer(tmp_path, accumulate_grad_batches=2).fit(OneBatch(), loader())


@pytest.mark.parametrize(
    "callback", [callbacks.StochasticWeightAveraging(0.01), callbacks.Timer("00:01:00:00")]
)
def test_callbacks_with_which_results_would_be_of_other_weights_or_steps(
    callback: callbacks.Callback, tmp_path: Path
) -> None:
    class Fixed(Counting):
        refused_callbacks = FIXED_TRAINING

    with pytest.raises(ConfigError, match=type(callback).__name__):
        quiet_trainer(tmp_path, callbacks=[callback]).fit(Fixed(), loader())


@pytest.mark.parametrize("name", IN_FORCE)
def test_settings_of_torch_around_a_run(name: str, tmp_path: Path) -> None:
    """The program runs with its own, and they come back; a Trainer refuses them."""
    command = SMALL_RUNS["pretraining"].command
    main(command(tmp_path, tmp_path / "plain"))
    study = Counting()
    before = torch.get_default_dtype()
    try:
        with IN_FORCE[name]():
            state = _state()
            main(command(tmp_path, tmp_path / "inside"))
            assert _state() == state
            if name != "no_grad":
                with pytest.raises(ConfigError, match=f"under torch.*{name}.*Call it outside"):
                    quiet_trainer(tmp_path, max_epochs=1).fit(study, loader())
    finally:
        torch.set_default_dtype(before)
    plain, inside = (tmp_path / part / "pretraining/version_0" for part in ("plain", "inside"))
    assert numbers(inside) == numbers(plain)


def _state() -> list[Any]:
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = torch.is_autocast_enabled("cpu")
    return [torch.get_default_dtype(), torch.get_default_device(), *grad, autocast]


def test_what_is_in_float32_is_not_trained_in_another_dtype(tmp_path: Path) -> None:
    for precision in ("64-true", "16-true", "bf16-true"):
        with pytest.raises(ConfigError, match=f"precision is {precision}, and what is trained"):
            quiet_trainer(tmp_path, precision=precision).fit(Counting(), loader())


def test_weights_that_diverge_have_no_results(tmp_path: Path) -> None:
    """Also in the last step, whose loss was finite."""
    with pytest.raises(NonFiniteError, match=r"NaN or infinite after step 1\. Lower"):
        quiet_trainer(tmp_path, max_steps=1).fit(Counting(rate=3e38), loader())
    assert not list(tmp_path.rglob("results.json")) and not list(tmp_path.rglob("artifact.txt"))


@pytest.mark.parametrize("option", ["max_steps", "max_time", "no data"])
def test_a_run_that_trains_nothing_says_so(option: str, tmp_path: Path) -> None:
    none = {"seconds": 0} if option == "max_time" else 0
    options = {} if option == "no data" else {option: none}
    data = DataLoader([]) if option == "no data" else loader()  # type: ignore[var-annotated]
    with pytest.raises(ConfigError, match="nothing was trained") as raised:
        quiet_trainer(tmp_path, **options).fit(Counting(), data)
    assert raised.value.exit_status == 2 and not list(tmp_path.rglob("results.json"))


def test_reading_nothing_is_no_result(small_lm: str, tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, limit_val_batches=0)
    with pytest.raises(ConfigError, match=r"limit_val_batches is 0: nothing would be read"):
        trainer.validate(LinearProbe(LMConfig(small_lm)), loader(), verbose=False)


def test_an_artifact_that_fails_leaves_the_tables(tmp_path: Path) -> None:
    class Fails(Counting):
        def build_results(self) -> Results:
            return Results(
                "counting", {"n": 1}, tables=[Table.of("found", [(1,)], ("n",), "Found")]
            )

        def write_artifacts(self, folder: Path) -> None:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        quiet_trainer(tmp_path).fit(Fails(), loader())
    assert list(tmp_path.rglob("found.csv")) and not list(tmp_path.rglob("results.json"))


def test_an_lm_whose_file_was_written_to_has_no_results(small_lm: str, tmp_path: Path) -> None:
    class Held(Counting):
        def on_fit_start(self) -> None:
            super().on_fit_start()
            self.lm = LanguageModel.from_pretrained(str(folder))

        def on_train_epoch_end(self) -> None:
            file = folder / "model.safetensors"
            file.write_bytes(file.read_bytes()[::-1])

    folder = shutil.copytree(small_lm, tmp_path / "lm")
    with pytest.raises(LanguageModelError, match=r"lm/model\.safetensors has been written to"):
        quiet_trainer(tmp_path).fit(Held(), loader())
    assert not list(tmp_path.rglob("results.json"))
