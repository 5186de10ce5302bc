"""Checkpoints of an LM as a curve, against the LMs themselves."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lincorr_lightning.api import correlate
from lincorr_lightning.cli import main
from lincorr_lightning.errors import CheckpointError, ConfigError, ReportError
from lincorr_lightning.results.results import Results
from tests.toys import save_toy_lm


@pytest.fixture(scope="module")
def lms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two LMs as folders and, of the same steps, as checkpoints of Lightning."""
    folder = tmp_path_factory.mktemp("lms")
    for i, step in enumerate((20, 3)):
        save_toy_lm(folder / f"checkpoint-{step}", seed=i)
        lm = AutoModelForCausalLM.from_pretrained(folder / f"checkpoint-{step}")
        state = {f"net.lm.{key}": value for key, value in lm.state_dict().items()}
        state["loss.weight"] = torch.ones(3)
        torch.save({"state_dict": state}, folder / f"epoch=7-step={step}.ckpt")
    return folder


def compare(*args: object) -> Results:
    return main(["compare", *map(str, args), "--n_subjects", "160"])


@pytest.mark.slow
def test_a_curve_of_folders_and_of_checkpoints(lms: Path, tmp_path: Path) -> None:
    steps = 3, 20
    output = tmp_path / "curve.png"
    curve = compare(*(lms / f"checkpoint-{n}" for n in (20, 3)), "--output", output)
    frame = curve.tables[0].frame
    assert frame["settings.step"].tolist() == list(map(str, steps))
    for i, step in enumerate(steps):
        probe = correlate(str(lms / f"checkpoint-{step}"), "city->country", n_subjects=160)
        (pair,) = probe.values["pairs"]
        row = frame.iloc[i]
        assert row["label_mean"] == pair["label_mean"]
        assert row["random_label_mean"] == pair["baselines"]["random_source_labels"]["mean"]
        assert row["macro_1"] == pair["precision"]["macro"]["1"]
    assert output.read_bytes().startswith(b"\x89PNG")
    assert curve.verdict[0].startswith("r by step: ")
    files = [lms / f"epoch=7-step={n}.ckpt" for n in steps]
    same = compare(*files, "--lm", lms / "checkpoint-3", "--key_prefix", "net.lm.")
    assert same.tables[0].frame.iloc[:, :-1].equals(frame.iloc[:, :-1])


def test_what_is_no_curve(lms: Path, tmp_path: Path) -> None:
    first, second = (lms / f"checkpoint-{n}" for n in (20, 3))
    files = [lms / f"epoch=7-step={n}.ckpt" for n in (3, 20)]

    def refused(kind: type[Exception], match: str, *args: object) -> None:
        with pytest.raises(kind, match=match) as error:
            compare(*args)
        assert "\n" not in str(error.value)

    refused(ReportError, "checkpoint-20 has no results.json", first, tmp_path)
    refused(ConfigError, "are of the same step", first, second, files[0])
    refused(ConfigError, "checkpoint has no step", first, save_toy_lm(tmp_path / "checkpoint"))
    refused(ConfigError, r"step=3\.ckpt holds weights alone", *files)
    fitting = r"step=3\.ckpt: its key net\.lm\..* as --key_prefix, or name the LM"
    refused(CheckpointError, fitting, *files, "--lm", first)
    refused(CheckpointError, fitting, *files, "--lm", first, "--key_prefix", "net.")
    save_toy_lm(other := tmp_path / "other", hidden_size=32)
    refused(CheckpointError, "Name its LM", *files, "--lm", other, "--key_prefix", "net.lm.")
    (damaged := tmp_path / "step=1.ckpt").write_bytes(b"PK")
    refused(CheckpointError, "step=1.ckpt is not read", damaged, *files, "--lm", first)
