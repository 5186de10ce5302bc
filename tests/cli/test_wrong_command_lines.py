"""Wrong command lines, configs and inputs: one line that names what is wrong, and a status."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lincorr_lightning.cli import console

PROBE = "fit --config linear_probe.yaml --data.n_subjects 40 --model.knowledge [city,country]"
FINETUNE = "fit --config source_finetune.yaml --data.n_edits 2"
ABLATION = "fit --config vocabulary_ablation.yaml"

# Internal words of jsonargparse, Python and this package, which mean nothing to users.
JARGON = (
    "<class",
    "Namespace(",
    "NestedArg",
    "Parser key",
    "typing.",
    "Expected a <",
    "Subtypes",
    "_Unquoted",
    "object at 0x",
    "Traceback",
    "functools",
)

FILES = {
    "ridge.yaml": "model: {init_args: {rigde: 1}}",
    "callback.yaml": "trainer: {callbacks: [{class_path: Generalization, "
    "init_args: {relatoin: x}}]}",
    "dup.yaml": "model:\n  init_args:\n    ridge: 1\n    ridge: 2\n",
    "deep.yaml": "model: " + "[" * 100_000 + "]" * 100_000,
    "empty.yaml": "",
    "file": "x",
    "taken/linear_probe": "x",
    "corrupt/config.json": "{",
    "rivers.yaml": "version: 1\nsource: me\nentities: {river: {Rhine: {country: Germny}}}\n"
    'knowledge: {river: {family: attribute, language: en, template: "{} on", answers: river}}\n',
}

# Each line: a command, options, and what the message names. {t} is the folder of FILES.
COMMAND_LINES: list[tuple[str, str, str]] = [
    ("bogus", "", "'bogus'. The commands are fit, validate, test, predict, a"),
    ("--bogus", "", "there is no option bogus"),
    ("fit", "", "fit.model"),
    ("cache", "", "folder"),
    # Unknown options
    (PROBE, "--model.rigde 1", "model.rigde; did you mean model.ridge?"),
    (PROBE, "--model.zzzz=1", "model.zzzz; `lincorr COMMAND --help` and `--model.help"),
    (PROBE, "--config {t}/ridge.yaml", "(in {t}/ridge.yaml); did you mean model.ridge?"),
    (
        PROBE,
        "--config {t}/callback.yaml",
        "(in {t}/callback.yaml); did you mean trainer.callbacks.relation?",
    ),
    (PROBE, "--ridge 0", "there is no option ridge; did you mean model.ridge?"),
    (PROBE, "--devices=2", "did you mean trainer.devices?"),
    (PROBE, "--model.knowledge city country", 'quotes: --model.knowledge "[city, country]"'),
    ("fit linear_probe", "", "Did you mean --config configs/linear_probe.yaml?"),
    # Classes
    (PROBE, "--model LinearPrope", "LinearPrope; did you mean LinearProbe"),
    (PROBE, "--data EditsDataModule", "Use --data SubjectsDataModule"),
    # Types and choices
    (PROBE, "--model.ridge abc", "model.ridge is abc; it must be a number or auto."),
    (PROBE, "--model.lm.dtype float8", "model.lm.dtype is float8; it must be auto, float32"),
    (PROBE, "--model.lm 3", "model.lm.name_or_path 3"),
    # Knowledge and LMs
    (PROBE, "--config {t}/lm.yaml --model.knowledge=[city,sport]", "'sport'"),
    (
        PROBE,
        "--model.knowledge=[city,cuntry]",
        "'country' or 'country_zh' or 'country_ja'? Known: all",
    ),
    (
        PROBE,
        "--model.knowledge=[city,color] --model.require_reference=[city->color]",
        "city->color, which has no reference",
    ),
    (PROBE, "--model.knowledge_files=[{t}/rivers.yaml]", "rivers.yaml"),
    (PROBE, "--model.lm.name_or_path={t}/no_such", "no_such"),
    (PROBE, "--model.lm.name_or_path={t}/corrupt", "config.json"),
    (PROBE, "--model.lm.name_or_path=someone/not-here", "someone/not-here"),
    # What no run can be made with
    (PROBE, "--trainer.max_epochs -1", "trainer.max_epochs is -1"),
    (FINETUNE, "--data.n_edits null", "data.edits_file is null"),
    (ABLATION, "--trainer.limit_train_batches 9", "networks are compared after all phases"),
    (PROBE, "--trainer.accelerator mps", "trainer.accelerator is mps, and torch"),
    # What Lightning refuses: making the Trainer, and running
    (PROBE, "--trainer.devices 0", "`Trainer(devices='0')` value is not a valid input"),
    (
        PROBE,
        "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=nothing",
        "`nothing`",
    ),
    # Folders and configs
    (PROBE, "--name ../../x", "--name ../../x leads out of trainer.default_root_dir"),
    (PROBE, "--ckpt_path {t}/nothing", "nothing: No such file or directory"),
    (PROBE, "--config=nope.yaml", "nope.yaml cannot be read: No such file or directory"),
    (PROBE, "--config {t}/dup.yaml", "the key 'ridge' is given twice in line 4"),
    (PROBE, "--config {t}/deep.yaml", "deep.yaml is not valid YAML"),
    (PROBE, "--config {t}/empty.yaml", "empty.yaml is empty"),
    (PROBE, "--config {t}/binary.yaml", "binary.yaml cannot be read"),
]

# Valid settings that cannot be run: status 1.
LATER: list[tuple[str, str, str]] = [
    (PROBE, "--trainer.default_root_dir {t}/file", "cannot write {t}/file: File exists"),
    (PROBE, "--trainer.default_root_dir {t}/taken", "cannot write {t}/taken/linear_probe: "),
    (PROBE, "--trainer.default_root_dir s3://b/runs", "s3:/b/runs is a URL"),
    ("report", "s3://b --output s3://b", "s3:/b"),
    (PROBE, "--data.n_subjects 3", "each half needs at least 2"),
    ("compare", "{t}/nothing {t}", "nothing is no folder"),
    (PROBE, "--config {t}/lm.yaml --data.n_subjects=9000", "words_per_subject"),
    (PROBE, "--model.lm.name_or_path={t}/nan", "lives in the city"),
]


@pytest.fixture(scope="module")
def files(small_lm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "lm.yaml").write_text(f"model: {{init_args: {{lm: {{name_or_path: {small_lm}}}}}}}")
    shutil.copytree(small_lm, folder / "nan")
    weights = load_file(f"{small_lm}/model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, folder / "nan" / "model.safetensors", metadata={"format": "pt"})
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    return folder


@pytest.mark.parametrize(
    ("status", "command", "options", "expected"),
    [(2, *case) for case in COMMAND_LINES] + [(1, *case) for case in LATER],
    ids=lambda value: None if isinstance(value, int) else value.replace("/", "|")[:60],
)
def test_a_wrong_command_line_gets_one_line(
    status: int,
    command: str,
    options: str,
    expected: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = shlex.split(f"{command} {options}".replace("{t}", str(files)))
    if args[0] in ("fit", "test") and "default_root_dir" not in options:
        args.append(f"--trainer.default_root_dir={files}/runs")
    monkeypatch.setattr(sys, "argv", ["lincorr", *args])
    monkeypatch.chdir(files)
    with pytest.raises(SystemExit) as stop:
        console()
    message = capsys.readouterr().err.partition("lincorr: error: ")[2]
    assert expected.replace("{t}", str(files)) in message
    assert stop.value.code == status
    assert not [word for word in JARGON if word in message]
    assert len(message.splitlines()) == 1
    assert not list(files.rglob("*:"))
    written = (files / "runs").rglob("*")
    assert not [p for p in written if p.suffix in (".png", ".ckpt") or p.name[0] == "."]
    assert not list(files.rglob("results.json"))
