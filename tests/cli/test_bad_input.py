"""What a user gets wrong, through the program: the message says what and how to mend it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lincorr_lightning.cli import main
from lincorr_lightning.errors import (
    DomainError,
    KnowledgeError,
    LanguageModelError,
    NonFiniteError,
    OutputError,
    SubjectsError,
)


def _fit(folder: Path, lm: str, *extra: str) -> None:
    main(
        ["fit", "--config", "linear_probe.yaml", f"--trainer.default_root_dir={folder}",
         f"--model.lm.name_or_path={lm}", "--model.knowledge=[city,country]",
         "--data.n_subjects=200", "--trainer.enable_progress_bar=false", *extra]
    )  # fmt: skip


def _nothing_written(folder: Path) -> bool:
    done = {"results.json", "model.safetensors", "linear_map.safetensors"}
    leftovers = [p for p in folder.rglob("*") if p.name in done or p.name.startswith(".")]
    return not leftovers and not list(folder.rglob("*.png")) + list(folder.rglob("*.ckpt"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(
    small_lm: str, tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(small_lm, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][3] = torch.tensor(value)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"NaN or infinite.*lives in the city of"):
        _fit(tmp_path / "runs", str(broken))
    assert _nothing_written(tmp_path / "runs")


def test_no_label_of_a_knowledge_is_in_the_vocabulary(small_lm: str, tmp_path: Path) -> None:
    with pytest.raises(DomainError, match=r"'sport'.*leaves no label for its \d+ answers.*unknown"):
        _fit(tmp_path, small_lm, "--model.knowledge=[city,sport]")


def test_a_family_leaves_out_what_the_vocabulary_lacks(
    small_lm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _fit(tmp_path, small_lm, "--model.knowledge=attribute")
    assert any("sport is left out" in record.getMessage() for record in caplog.records)
    assert list(tmp_path.rglob("results.json"))


def test_more_inputs_than_can_be_sampled(small_lm: str, tmp_path: Path) -> None:
    with pytest.raises(SubjectsError, match=r"9000.*words_per_subject"):
        _fit(tmp_path, small_lm, "--data.n_subjects=9000")
    assert _nothing_written(tmp_path)


def test_unknown_knowledge_and_missing_reference(small_lm: str, tmp_path: Path) -> None:
    with pytest.raises(KnowledgeError, match=r"'contry'.*country"):
        _fit(tmp_path, small_lm, "--model.knowledge=[city,contry]")
    with pytest.raises(KnowledgeError, match=r"city->color, which has no reference"):
        _fit(
            tmp_path,
            small_lm,
            "--model.knowledge=[city,color]",
            "--model.require_reference=[city->color]",
        )


def test_a_user_s_file_with_a_fault_names_it(small_lm: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nsource: me\nentities: {river: {Rhine: {country: Germny}}}\n"
        'knowledge: {river: {family: attribute, language: en, template: "{} on", answers: river}}\n'
    )
    with pytest.raises(KnowledgeError, match=r"mine\.yaml.*Germny"):
        _fit(tmp_path, small_lm, f"--model.knowledge_files=[{path}]")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "no_such"),
        (lambda p: p.mkdir(), "empty"),
        (lambda p: (p.mkdir(), (p / "config.json").write_text("{")), "config.json"),
    ],
    ids=["missing", "empty", "corrupt"],
)
def test_folder_that_is_no_lm(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "no_such"
    make(folder)
    with pytest.raises(LanguageModelError, match=message):
        _fit(tmp_path / "runs", str(folder))


def test_hub_id_without_network(tmp_path: Path) -> None:
    with pytest.raises(LanguageModelError, match="folder"):
        _fit(tmp_path, "someone/a-model-that-is-not-here")


def test_a_full_disk_leaves_nothing_half_written(
    small_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up after the fit, at the report."""
    import errno

    from lincorr_lightning.results import results as results_module

    def full(*args: object, **kwargs: object) -> None:
        raise OutputError("cannot write: the disk is full") from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(results_module, "write_json", full)
    with pytest.raises(OutputError, match="the disk is full"):
        _fit(tmp_path, small_lm)
    assert not list(tmp_path.rglob("results.json"))
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".part")]


def test_a_disk_that_fills_up_under_tensorboard(
    small_lm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The thread that writes its file has the error first."""
    import errno

    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(OutputError, match=r"No space left on device\. Make room"):
        _fit(tmp_path, small_lm)
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.rglob("results.json"))
