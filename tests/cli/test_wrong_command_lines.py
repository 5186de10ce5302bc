"""Wrong command lines and configs: one line that names what is wrong and the way out, a status."""

import shlex
import sys
from pathlib import Path

import pytest

from lincorr_lightning.cli import console

PROBE = "fit --config linear_probe.yaml --data.n_subjects 40 --model.knowledge [city,country]"
FINETUNE = "fit --config source_finetune.yaml --data.n_edits 2"
ABLATION = "fit --config vocabulary_ablation.yaml"
SAES = (
    "fit --config sparse_autoencoders.yaml --data.n_tokens 33000 --data.n_held_out 9 "
    "--data.knowledge=[city,color]"
)

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
    "section.yaml": "modell: {init_args: {ridge: 1}}",
    "strategy.yaml": "trainer: {strategy: {class_path: DDPStrategy, "
    "init_args: {find_unusd_parameters: true}}}",
    "class.yaml": "data: {class_path: SubjectDataModule}",
    "mode.yaml": "trainer: {callbacks: [{class_path: EarlyStopping, "
    "init_args: {monitor: x, mode: sideways}}]}",
    "dup.yaml": "model:\n  init_args:\n    ridge: 1\n    ridge: 2\n",
    "deep.yaml": "model: " + "[" * 100_000 + "]" * 100_000,
    "bomb.yaml": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
    "empty.yaml": "",
    "tag.yaml": 'model: !!python/object/apply:os.system ["true"]\n',
    "file": "x",
    "taken/linear_probe": "x",
}

# Each line: a command, options, and what the message says. {t} is the folder of FILES.
COMMAND_LINES: list[tuple[str, str, str]] = [
    ("bogus", "", "there is no command 'bogus'. The commands are fit, validate, test, predict, a"),
    ("--bogus", "", "there is no option bogus"),
    ("--config linear_probe.yaml", "", "one of {fit,validate,test,predict}, but it was not"),
    ("fit", "", "arguments are required: fit.data, fit.model. Pass a study's config"),
    ("cache", "", "the following arguments are required: folder.\n"),
    # Unknown options
    (PROBE, "--model.rigde 1", "there is no option model.rigde; did you mean model.ridge?"),
    (PROBE, "--model.lm.dtpe=x", "no option model.lm.dtpe; did you mean model.lm.dtype?"),
    (PROBE, "--model.zzzz=1", "no option model.zzzz; `lincorr COMMAND --help` and `--model.help"),
    (
        PROBE,
        "--config {t}/ridge.yaml",
        "there is no option model.rigde (in {t}/ridge.yaml); did you mean model.ridge?",
    ),
    (
        PROBE,
        "--config {t}/callback.yaml",
        "no option trainer.callbacks.relatoin (in {t}/callback.yaml); did you mean "
        "trainer.callbacks.relation?",
    ),
    (
        PROBE,
        "--config {t}/section.yaml",
        "there is no option modell.ridge (in {t}/section.yaml); did you mean model.ridge?",
    ),
    (
        PROBE,
        "--config {t}/strategy.yaml",
        "(in {t}/strategy.yaml); did you mean trainer.strategy.find_unused_parameters?",
    ),
    ("audit", "--knowledges=[city]", "no option knowledges; did you mean knowledge?"),
    # Classes
    (PROBE, "--model LinearPrope", "model: there is no class or module LinearPrope; did you mean"),
    (
        PROBE,
        "--config {t}/class.yaml",
        "data: there is no class or module SubjectDataModule (in {t}/class.yaml); did you mean",
    ),
    (PROBE, "--model torch.nn.Linear", "model is torch.nn.Linear; it must be a study or null"),
    (
        PROBE,
        "--trainer.callbacks EarlyStopping",
        "trainer.callbacks: the following arguments are required: monitor",
    ),
    (PROBE, "--data EditsDataModule", "LinearProbe takes SubjectBatch. Use --data SubjectsData"),
    (
        "test --config source_finetune.yaml",
        "",
        "SourceFinetune has no `lincorr test`. Run `lincorr fit`.",
    ),
    # Types and choices
    (PROBE, "--model.ridge abc", "model.ridge is abc; it must be a number or auto."),
    (PROBE, "--model.lm.dtype float8", "model.lm.dtype is float8; it must be auto, float32"),
    (PROBE, "--trainer.precision 7", "trainer.precision is 7; it must be 64, 32, 16 or"),
    (FINETUNE, "--data.subjects Ada", "data.subjects is Ada, no file or list such as [a, b]."),
    (PROBE, "--model.lm 3", "model.lm: Unable to load config"),
    (PROBE, "--model.lm.name_or_path null", "lm.name_or_path is empty. Pass a folder"),
    (PROBE, "--model.lm null", "a group of settings, such as model.lm, is null. Leave it out"),
    ("audit", "--details maybe", "details is maybe; it must be true or false"),
    # Ranges
    (PROBE, "--seed_everything -5", "seed_everything is -5; it must be at least 0 and at most 4"),
    (PROBE, "--trainer.val_check_interval 0", "trainer.val_check_interval is 0; it must be above"),
    (PROBE, "--trainer.max_epochs null", "trainer.max_epochs is null, which means 1,000"),
    (PROBE, "--trainer.max_epochs -1", "trainer.max_epochs is -1, so the run would never end"),
    (FINETUNE, "--trainer.max_epochs -1", "trainer.max_epochs is -1, so the run would never end"),
    (ABLATION, "--model.seeds=[99999999999999999999]", "model.seeds is 99999999999999999999; it m"),
    (PROBE, "--name ../../x", "leaves trainer.default_root_dir"),
    (FINETUNE, "--data.n_edits null", "data.n_edits and data.edits_file are null"),
    # What Lightning refuses: making the Trainer, making a callback, and running
    (PROBE, "--trainer.devices 0", "`Trainer(devices='0')` value is not a valid input"),
    (PROBE, "--config {t}/mode.yaml", "`mode` can be min, max, got sideways"),
    (PROBE, "--trainer.val_check_interval 1000", "`val_check_interval` (1000) must be less than"),
    (PROBE, "--trainer.accumulate_grad_batches 2", "gradient accumulation is not supported"),
    # What Lightning would do in silence
    (PROBE, "--trainer.max_steps 0", "nothing was trained"),
    (FINETUNE, "--trainer.limit_train_batches 0", "nothing was trained"),
    (ABLATION, "--trainer.limit_train_batches 9", "networks are compared after all phases"),
    *(
        (
            study,
            "--trainer.callbacks+=GradientAccumulationScheduler --trainer.callbacks.scheduling "
            "'{0: 4}'",
            "steps of 1 or 4 batches",
        )
        for study in (PROBE, FINETUNE, ABLATION, SAES)
    ),
    (
        PROBE,
        "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks+=ModelCheckpoint",
        "trainer.callbacks has ModelCheckpoint twice with the same settings. Remove one.",
    ),
    # Folders and checkpoints
    (PROBE, "--ckpt_path {t}/nothing", "nothing: No such file or directory"),
    # Configs
    (PROBE, "--config=nope.yaml", "nope.yaml cannot be read: No such file or directory. Pass"),
    (PROBE, "--config {t}", "cannot be read: Is a directory. Pass a file"),
    (
        PROBE,
        "--config {t}/dup.yaml",
        "dup.yaml is not valid YAML: the key 'ridge' is given twice in line 4",
    ),
    (PROBE, "--config {t}/deep.yaml", "deep.yaml is not valid YAML: "),
    (PROBE, "--config {t}/bomb.yaml", "bomb.yaml is not valid YAML: an alias stands in a value"),
    (PROBE, "--config {t}/empty.yaml", "empty.yaml is empty; a config has sections"),
    (PROBE, "--config {t}/tag.yaml", "tag.yaml is not valid YAML: could not determine"),
    (PROBE, "--config {t}/binary.yaml", "cannot be read: 'utf-8' codec can't decode byte"),
    (PROBE, "--config '{'", "the config on the command line is not valid YAML"),
]

# Valid settings that cannot be run: status 1.
LATER: list[tuple[str, str, str]] = [
    (PROBE, "--trainer.default_root_dir {t}/file", "cannot write {t}/file: File exists. Make room"),
    (PROBE, "--trainer.default_root_dir {t}/taken", "cannot write {t}/taken/linear_probe: "),
    (
        PROBE,
        "--trainer.default_root_dir s3://b/runs",
        "trainer.default_root_dir s3://b/runs is a U"
        "RL, to which nothing is written. Name a local folder, and copy it there after the run.",
    ),
    (PROBE, "--trainer.default_root_dir file:///{t}/url", "is a URL, to which nothing is written"),
    (
        PROBE,
        "--trainer.logger CSVLogger --trainer.logger.save_dir memory://b",
        "trainer.logger.save_dir memory://b is a URL",
    ),
    (
        PROBE,
        "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.dirpath gs://b",
        "trainer.callbacks.dirpath gs://b is a URL",
    ),
    (PROBE, "--name hf://b", "name hf://b is a URL"),
    ("reproduce", "--output s3://b", "--output s3://b is a URL"),
    (PROBE, "--data.n_subjects 3", "each half needs at least 2"),
    ("audit", "--lm {t}/nothing", "nothing"),
    ("report", "{t}/nothing", "nothing"),
    ("compare", "{t}/nothing {t}", "nothing does not exist"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
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
