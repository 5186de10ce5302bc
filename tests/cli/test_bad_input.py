"""What a user gets wrong, through the program: the message says what and how to mend it."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tensorboard.summary.writer.record_writer import RecordWriter

from lincorr_lightning.cli import main
from lincorr_lightning.errors import (
    DomainError,
    KnowledgeError,
    LanguageModelError,
    NonFiniteError,
    OutputError,
    SubjectsError,
)
from lincorr_lightning.results import results as results_module

RIVERS = (
    "version: 1\nsource: me\nentities: {river: {Rhine: {country: Germny}}}\n"
    'knowledge: {river: {family: attribute, language: en, template: "{} on", answers: river}}\n'
)


def _fit(folder: Path, lm: str, *extra: str) -> None:
    main(
        [
            "fit",
            "--config",
            "linear_probe.yaml",
            f"--trainer.default_root_dir={folder / 'runs'}",
            f"--model.lm.name_or_path={lm}",
            "--model.knowledge=[city,country]",
            "--data.n_subjects=200",
            "--trainer.enable_progress_bar=false",
            *extra,
        ]
    )


def _written(folder: Path) -> list[Path]:
    """Results, maps, figures, checkpoints and temporary files of runs."""
    files = [path for path in (folder / "runs").rglob("*") if path.is_file()]
    kinds = (".safetensors", ".png", ".ckpt")
    return [p for p in files if p.suffix in kinds or p.name[0] == "." or p.name == "results.json"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("--model.knowledge=[city,sport]", DomainError, r"'sport'.*no label for its \d+ answers"),
        ("--data.n_subjects=9000", SubjectsError, r"9000.*words_per_subject"),
        ("--model.knowledge=[city,contry]", KnowledgeError, r"'contry'.*country"),
        (
            "--model.knowledge=[city,color] --model.require_reference=[city->color]",
            KnowledgeError,
            "city->color, which has no reference",
        ),
        ("--model.knowledge_files=[{t}/rivers.yaml]", KnowledgeError, r"rivers\.yaml.*Germny"),
        ("--model.lm.name_or_path={t}/no_such", LanguageModelError, "no_such"),
        ("--model.lm.name_or_path={t}/empty", LanguageModelError, "empty"),
        ("--model.lm.name_or_path={t}/corrupt", LanguageModelError, r"config\.json"),
        ("--model.lm.name_or_path=someone/not-here", LanguageModelError, "folder"),
        ("--model.lm.name_or_path={t}/nan", NonFiniteError, "NaN or infinite.*lives in the city"),
    ],
)
def test_a_bad_input_is_named(
    options: str, error: type[Exception], message: str, small_lm: str, tmp_path: Path
) -> None:
    (tmp_path / "rivers.yaml").write_text(RIVERS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt" / "config.json").write_text("{")
    shutil.copytree(small_lm, tmp_path / "nan")
    weights = load_file(f"{small_lm}/model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "nan" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(error, match=message):
        _fit(tmp_path, small_lm, *options.format(t=tmp_path).split())
    assert _written(tmp_path) == []


def test_a_family_leaves_out_what_the_vocabulary_lacks(
    small_lm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _fit(tmp_path, small_lm, "--model.knowledge=attribute")
    assert any("sport is left out" in record.getMessage() for record in caplog.records)
    assert list(tmp_path.rglob("results.json"))


@pytest.mark.parametrize(
    ("holder", "name"), [(results_module, "write_json"), (RecordWriter, "write")]
)
def test_a_disk_that_fills_up_leaves_no_results(
    holder: object,
    name: str,
    small_lm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the end, or in the thread that writes TensorBoard's file, which has the error first."""

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(holder, name, full)
    with pytest.raises(OutputError, match=r"No space left on device\. Make room"):
        _fit(tmp_path, small_lm)
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.rglob("results.json"))
    assert not list(tmp_path.rglob(".part*"))


def test_a_pattern_of_a_tokenizer_that_never_ends(small_lm: str, tmp_path: Path) -> None:
    """Rust panics then, which is no Exception for Python."""
    path = shutil.copytree(small_lm, tmp_path / "lm") / "tokenizer.json"
    content = json.loads(path.read_text())
    pattern = {
        "type": "Split",
        "pattern": {"Regex": "^(([a-z0-9 ])+.)+([A-Z]([a-z])+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    content["pre_tokenizer"]["pretokenizers"].insert(0, pattern)
    path.write_text(json.dumps(content))
    with pytest.raises(LanguageModelError, match=r"tokenizer fails: .*pass another tokenizer as"):
        _fit(tmp_path, str(path.parent))
