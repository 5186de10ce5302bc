"""Wrong command lines and configs of all studies: one line that names the option, and a status."""

import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from lincorr_lightning.cli import console

PROBE = "fit --config linear_probe.yaml --data.n_subjects 40 --model.knowledge [city,country]"
FINETUNE = "fit --config source_finetune.yaml --data.n_edits 2"
ABLATION = "fit --config vocabulary_ablation.yaml"
SAES = "fit --config sparse_autoencoders.yaml --data.n_tokens 40000"
FLOW = "test --config feature_flow.yaml"
RESILIENCE = "test --config resilience.yaml"
TOKENS = "test --config token_geometry.yaml"
KNOWLEDGE = "test --config knowledge_geometry.yaml"
PRETRAINING = "fit --config pretraining.yaml"
FORECAST = "predict --config forecast.yaml"

# Internal words of jsonargparse, Python and this package, which mean nothing to users.
JARGON = ("<class", "Namespace(", "NestedArg", "Parser key", "typing.", "Expected a <", "Subtypes",
          "_Unquoted", "object at 0x", "Traceback", "functools")  # fmt: skip

FILES = {
    "dup.yaml": "model:\n  init_args:\n    ridge: 1\n    ridge: 2\n",
    "dup_section.yaml": "trainer: {max_epochs: 1}\ntrainer: {max_epochs: 2}\n",
    "section.yaml": "modell: {init_args: {ridge: 1}}\n",
    "empty_section.yaml": "banana: {}\n",
    "deep.yaml": "model: " + "[" * 100_000 + "]" * 100_000,
    "deep.json": '{"model": ' + '{"a": ' * 100_000 + "1" + "}" * 100_001,
    "bomb.yaml": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefgh")),
    "alias.yaml": "model: &a [*a]\n",
    "list.yaml": "[1, 2]\n",
    "text.yaml": "hello\n",
    "empty.yaml": "",
    "tab.yaml": "model:\n\tx: 1\n",
    "tag.yaml": 'model: !!python/object/apply:os.system ["true"]\n',
    "no_class.yaml": "model: {class_path: 3}\n",
    "classes.yaml": "model: [LinearProbe]\n",
    "function.yaml": "trainer: {callbacks: [{class_path: os.path.join}]}\n",
    "missing.yaml": "trainer: {callbacks: [{class_path: EarlyStopping}]}\n",
    "mode.yaml": "trainer: {callbacks: [{class_path: EarlyStopping, "
    "init_args: {monitor: x, mode: sideways}}]}\n",
    "number.yaml": "trainer: {callbacks: 3}\n",
    "file": "x",
    "taken/linear_probe": "x",
}

# Each line: a study, options, and what the message says. {t} is the folder of FILES.
COMMAND_LINES: list[tuple[str, str, str]] = [
    ("", "bogus", "there is no command 'bogus'"),
    ("", "--bogus", "there is no option bogus"),
    ("fit", "", "--data and --model is missing. Pass a study's config"),
    ("", "--config linear_probe.yaml", "name a command first"),
    ("fit", "--config", "expected one argument"),
    ("fit", "--model LinearProbe", "--data is missing"),
    ("fit", "--model.help Nope", "Nope"),
    # Seeds
    (PROBE, "--seed_everything -5", "seed_everything is -5; it must be at least 0"),
    (PROBE, "--seed_everything 99999999999", "at most 4294967295"),
    (PROBE, "--seed_everything abc", "seed_everything is abc; it must be true or false"),
    (PROBE, "--seed_everything 1.5", "or a whole number"),
    (PROBE, "--data.seed -1", "data.seed is -1; it must be at least 0"),
    (PROBE, "--data.seed 99999999999999999999999", "data.seed is 99999999999999999999999"),
    (PROBE, "--data.seed abc", "data.seed is abc; it must be a whole number."),
    (ABLATION, "--model.seeds [99999999999999999999]", "model.seeds is 99999999999999999999"),
    (TOKENS, "--model.seed -1", "model.seed is -1"),
    ("test --config knowledge_geometry.yaml", "--model.knowledge null", "knowledge is null"),
    (TOKENS, "--model.seed null", "model.seed is null; it must be at least 0"),
    # Trainer
    (PROBE, "--trainer.devices 0", "devices"),
    (PROBE, "--trainer.devices -3", "`devices`"),
    (PROBE, "--trainer.devices abc", "devices"),
    (PROBE, "--trainer.devices []", "devices"),
    (PROBE, "--trainer.accelerator cuda", "can not run on your system"),
    (PROBE, "--trainer.accelerator quantum", "invalid accelerator name"),
    (PROBE, "--trainer.accelerator ''", "invalid accelerator name"),
    (PROBE, "--trainer.strategy foo", "invalid strategy name"),
    (PROBE, "--trainer.strategy fsdp", "requires a GPU"),
    (PROBE, "--trainer.strategy deepspeed", "DeepSpeed"),
    (PROBE, "--trainer.strategy ShardedStrategy --trainer.strategy.tensor_parallel_size 0",
     "trainer.strategy.tensor_parallel_size is 0; it must be at least 1"),
    (PROBE, "--trainer.precision 7", "trainer.precision is 7; it must be 64, 32, 16"),
    (PROBE, "--trainer.precision 16", "set model.lm.dtype for the LM"),
    (PROBE, "--trainer.num_nodes 0", "`num_nodes` must be a positive integer"),
    (PROBE, "--trainer.num_nodes abc", "trainer.num_nodes is abc; it must be a whole number"),
    (PROBE, "--trainer.max_epochs -1", "never end; the closed form needs one epoch. Set it to 1"),
    (PROBE, "--trainer.max_epochs null", "trainer.max_epochs is null, which means 1,000"),
    ("fit --config forecast.yaml", "--data.n_edits 2",
     "EditForecast has no training_step, which `lincorr fit` runs. Use `lincorr predict`."),
    ("predict --config source_finetune.yaml", "--data.n_edits 2",
     "SourceFinetune has no predict_step, which `lincorr predict` runs. Use `lincorr fit`."),
    (PROBE, "--ckpt_path hpc", "--ckpt_path hpc: there is no such checkpoint. Pass a .ckpt file"),
    (FINETUNE, "--trainer.max_epochs -1", "never end; independent edits are trained in one"),
    (SAES, "--trainer.max_epochs -1", "a run is one epoch"),
    (ABLATION, "--trainer.max_epochs -1", "one epoch of the trainer"),
    (PROBE, "--trainer.max_epochs -2", "non-negative integer or -1"),
    (PROBE, "--trainer.max_epochs abc", "trainer.max_epochs is abc; it must be a whole number or"),
    (PROBE, "--trainer.max_steps -2", "`max_steps`"),
    (PROBE, "--trainer.max_time abc", "not a valid duration"),
    (PROBE, "--trainer.limit_train_batches 1.5", "limit_train_batches"),
    (PROBE, "--trainer.limit_val_batches abc", "limit_val_batches is abc; it must be a number"),
    (PROBE, "--trainer.val_check_interval 0", "trainer.val_check_interval is 0"),
    (PROBE, "--trainer.check_val_every_n_epoch 0", "trainer.check_val_every_n_epoch is 0"),
    (PROBE, "--trainer.accumulate_grad_batches 0", "trainer.accumulate_grad_batches is 0"),
    (PROBE, "--trainer.accumulate_grad_batches 2", "gradient accumulation is not supported"),
    (PROBE, "--trainer.gradient_clip_val -1", "trainer.gradient_clip_val is -1"),
    (PROBE, "--trainer.gradient_clip_algorithm foo", "gradient_clip_algorithm"),
    (PROBE, "--trainer.log_every_n_steps -1", "trainer.log_every_n_steps is -1"),
    (PROBE, "--trainer.deterministic maybe", "it must be true or false, warn or null"),
    (PROBE, "--trainer.fast_dev_run -1", "fast_dev_run=-1"),
    (PROBE, "--trainer.profiler foo", "profiler"),
    (PROBE, "--trainer.barebones true", "barebones"),
    (PROBE, "--trainer.plugins foo", "there is no class foo"),
    (PROBE, "--trainer.logger foo", "trainer.logger: there is no class foo"),
    (PROBE, "--trainer.logger TensorBoardLogger", "TensorBoardLogger needs save_dir"),
    (PROBE, "--trainer.callbacks EarlyStopping", "EarlyStopping needs monitor"),
    (PROBE, "--trainer.callbacks Foo", "trainer.callbacks: there is no class Foo"),
    (PROBE, "--trainer.nope 3", "there is no option trainer.nope"),
    (PROBE, "--name ../../x", "leaves trainer.default_root_dir"),
    # Checkpoints
    (PROBE, "--ckpt_path ''", "--ckpt_path is empty. Pass the file of a checkpoint"),
    (PROBE, "--ckpt_path best", "--ckpt_path best has no meaning in a new run"),
    (PROBE, "--ckpt_path {t}/nothing", "nothing does not exist"),
    ("validate --config linear_probe.yaml", "--ckpt_path ''", "--ckpt_path is empty"),
    ("predict --config linear_probe.yaml", "--ckpt_path ''", "--ckpt_path is empty"),
    # Configs
    (PROBE, "--config {t}/nothing.yaml", "nothing.yaml does not exist"),
    (PROBE, "--config=nope.yaml", "the config nope.yaml does not exist"),
    (PROBE, "--config {t}", "cannot be read: Is a directory"),
    (PROBE, "--config {t}/dup.yaml", "dup.yaml is not valid YAML: the key 'ridge' is given twice"),
    (PROBE, "--config {t}/dup_section.yaml", "the key 'trainer' is given twice in line 2"),
    (PROBE, "--config {t}/section.yaml",
     "there is no option modell.ridge (in {t}/section.yaml); did you mean model.ridge?"),
    (PROBE, "--config {t}/empty_section.yaml", "has the section banana, which is unknown"),
    (PROBE, "--config {t}/deep.yaml", "deep.yaml is not valid YAML: values are nested more than"),
    (PROBE, "--config {t}/deep.json", "deep.json is not valid YAML: values are nested more than"),
    (PROBE, "--config {t}/bomb.yaml", "bomb.yaml is not valid YAML: there are more than"),
    (PROBE, "--config {t}/alias.yaml", "is undefined or refers to itself"),
    (PROBE, "--config {t}/list.yaml", "list.yaml holds a list; a config has sections"),
    (PROBE, "--config {t}/text.yaml", "text.yaml holds a str; a config has sections"),
    (PROBE, "--config {t}/empty.yaml", "empty.yaml is empty; a config has sections"),
    (PROBE, "--config {t}/tab.yaml", "tab.yaml is not valid YAML"),
    (PROBE, "--config {t}/tag.yaml", "tag.yaml is not valid YAML: could not determine"),
    (PROBE, "--config {t}/binary.yaml", "it is not UTF-8 text"),
    (PROBE, "--config {t}/no_class.yaml", "model is {'class_path': 3}"),
    (PROBE, "--config {t}/classes.yaml", "which is not a study"),
    (PROBE, "--config {t}/function.yaml", "which is not a callback"),
    (PROBE, "--config {t}/missing.yaml", "EarlyStopping needs monitor"),
    (PROBE, "--config {t}/mode.yaml", "`mode` can be min, max, got sideways"),
    (PROBE, "--config {t}/number.yaml", "trainer.callbacks is 3, which is not a callback"),
    (PROBE, "--config '{'", "the config on the command line is not valid YAML"),
    (PROBE, "--config '{\"model\": 3}'", "model is 3, which is not a study"),
    # Classes, and datamodules of other studies
    (PROBE, "--model NoModel", "model: there is no class NoModel"),
    (PROBE, "--model nope.X", "model: nope.X cannot be imported"),
    (PROBE, "--model os.path.join", "model is os.path.join, which is not a study"),
    (PROBE, "--model torch.nn.Linear", "which is not a study"),
    (PROBE, "--model null", "--model is missing"),
    (PROBE, "--data LinearProbe", "data: there is no class LinearProbe"),
    (PROBE, "--data EditsDataModule", "LinearProbe takes SubjectBatch. Use --data SubjectsData"),
    (PROBE, "--data TextsDataModule", "LinearProbe takes SubjectBatch"),
    (PROBE, "--data CorpusDataModule", "LinearProbe takes SubjectBatch"),
    (PROBE, "--data PairedTextsDataModule", "LinearProbe takes SubjectBatch"),
    (FINETUNE, "--data SubjectsDataModule", "SourceFinetune takes EditBatch"),
    (ABLATION, "--data EditsDataModule", "VocabularyAblation takes TextBatch"),
    (SAES, "--data TokenizedTextDataModule", "SparseAutoencoders takes TokenRows"),
    (FLOW, "--data SubjectsDataModule", "FeatureFlow takes TokenRows"),
    (RESILIENCE, "--data EditsDataModule", "MapResilience takes SubjectBatch"),
    (TOKENS, "--data TextsDataModule", "TokenGeometry takes TokenBatch"),
    (KNOWLEDGE, "--data EditsDataModule", "KnowledgeGeometry takes SubjectBatch"),
    (PRETRAINING, "--data SubjectsDataModule", "Pretraining takes PackedBatch"),
    (FORECAST, "--data SubjectsDataModule", "EditForecast takes EditBatch"),
    # The LM
    (PROBE, "--model.lm 3", "model.lm is 3; it must be a mapping of settings"),
    (PROBE, "--model.lm null", "a group of settings, such as model.lm, is null"),
    (PROBE, "--model.lm.dtype float8", "model.lm.dtype is float8; it must be auto, float32"),
    (PROBE, "--model.lm.name_or_path ''", "lm.name_or_path is empty"),
    (PROBE, "--model.lm {t}/nothing.yaml", "nothing.yaml does not exist"),
    (PROBE, "--model.lm {t}/empty.yaml", "empty.yaml is empty"),
    # Settings of the studies
    (PROBE, "--model.ridge -1", "model.ridge is -1.0; it must be at least 0"),
    (PROBE, "--model.ridge abc", "model.ridge is abc; it must be a number or auto"),
    (PROBE, "--model.ridge nan", "model.ridge is nan"),
    (PROBE, "--model.knowledge nothing", "there is no knowledge 'nothing'"),
    (PROBE, "--model.knowledge_files x", "model.knowledge_files is x; it must be a list"),
    (PROBE, "--model.solver sgd --model.learning_rate -1", "model.learning_rate is -1.0"),
    (PROBE, "--data.fit_fraction 1", "data.fit_fraction is 1.0"),
    (PROBE, "--data.batch_size 1.5", "data.batch_size is 1.5; it must be a whole number"),
    (FINETUNE, "--model.learning_rate -1", "model.learning_rate is -1.0; it must be at least 0"),
    (FINETUNE, "--model.weight_decay -1", "model.weight_decay is -1.0; it must be at least 0"),
    (FINETUNE, "--model.adapter 3", "model.adapter is 3; it must be a mapping of settings"),
    (FINETUNE, "--data.relation nope->x", "there is no knowledge 'nope'"),
    (FINETUNE, "--data.n_edits null", "data.n_edits is null; sampled edits need a number"),
    (FINETUNE, "--data.subjects Ada", "data.subjects is Ada; it must be a list"),
    (ABLATION, "--model.compose.epochs -1", "model.compose.epochs or model.learn.epochs is -1"),
    (ABLATION, "--model.compose.learning_rate -1", "model.learn.learning_rate is -1.0"),
    (ABLATION, "--model.network 3", "model.network is 3; it must be a mapping"),
    (SAES, "--model.sae.n_features 0", "model.sae.n_features is 0; it must be at least 1"),
    (SAES, "--model.sae.k 1.5", "model.sae.k is 1.5; it must be a whole number"),
    (SAES, "--model.learning_rate -1", "model.learning_rate is -1.0; it must be above 0"),
    (SAES, "--model.warmup 2", "model.warmup + model.decay is 2.4; it must be at most 1"),
    (FLOW, "--model.thresholds -2", "model.thresholds of residual is -2.0"),
    (FLOW, "--model.thresholds abc", "model.thresholds is abc"),
    (FLOW, "--model.k 1.5", "model.k is 1.5; it must be a whole number"),
    (FLOW, "--model.steering.strategies [foo]", "model.steering.strategies is"),
    (PRETRAINING, "--model.learning_rate -1", "model.learning_rate is -1.0"),
    (PRETRAINING, "--model.weight_decay -1", "model.weight_decay is -1.0"),
    (PRETRAINING, "--model.size.n_heads 0", "model.size.n_heads is 0"),
    (PRETRAINING, "--model.size.n_layers -1", "model.size.n_layers is -1"),
    (PRETRAINING, "--data.world.n_people -1", "data.world.n_people is -1"),
    (TOKENS, "--data.n_tokens 0", "data.n_tokens is 0"),
    (KNOWLEDGE, "--model.n_permutations abc", "model.n_permutations is abc"),
    (RESILIENCE, "--model.same_dtype maybe", "model.same_dtype is maybe; it must be true or"),
    # Commands that a study does not have
    ("test --config source_finetune.yaml", "", "test_step"),
    ("validate --config token_geometry.yaml", "", "validation_step"),
    ("predict --config pretraining.yaml", "",
     "has no predict_step, which `lincorr predict` runs. Use `lincorr fit` or `lincorr validate`"),
    # Commands without a Trainer
    ("audit", "--bogus x", "there is no option bogus"),
    ("audit", "--details maybe", "details is maybe; it must be true or false"),
    ("audit", "--knowledge_files 3", "knowledge_files is 3; it must be a list"),
]  # fmt: skip

# Valid settings that cannot be run: status 1.
LATER: list[tuple[str, str, str]] = [
    (PROBE, "--trainer.default_root_dir {t}/file", "is a file where a folder is needed"),
    (PROBE, "--trainer.default_root_dir {t}/taken", "is a file where a folder is needed"),
    (PROBE, "--data.n_subjects 3", "each half needs at least 2"),
    ("audit", "--lm {t}/nothing", "nothing"),
    ("report", "{t}/nothing", "nothing"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    return folder


def run(
    line: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """The exit status of a command line, and its message."""
    args = shlex.split(line.replace("{t}", str(files)))
    if args[0] in ("fit", "validate", "test", "predict") and "default_root_dir" not in line:
        args.append(f"--trainer.default_root_dir={files}/runs")
    monkeypatch.setattr(sys, "argv", ["lincorr", *args])
    with pytest.raises(SystemExit) as stop:
        console()
    return stop.value.code, capsys.readouterr().err.partition("lincorr: error: ")[2]


@pytest.mark.parametrize(
    ("status", "study", "options", "expected"),
    [(2, *case) for case in COMMAND_LINES] + [(1, *case) for case in LATER],
    ids=lambda value: None if isinstance(value, int) else value.replace("/", "|")[:60],
)
def test_a_wrong_command_line_gets_one_line(
    status: int,
    study: str,
    options: str,
    expected: str,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, message = run(f"{study} {options}", files, monkeypatch, capsys)
    assert expected.replace("{t}", str(files)) in message
    assert code == status
    assert not [word for word in JARGON if word in message]
    # `lincorr bogus` lists the commands below.
    assert options == "bogus" or len(message.splitlines()) == 1
