"""What every study does, whatever it measures: its files, its refusals, and how it is resumed."""

import inspect
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import pytest
import torch

from benchmarks.common import ROOT
from lincorr_lightning.cli import main
from lincorr_lightning.errors import CheckpointError, ConfigError
from lincorr_lightning.results import SavedRun
from lincorr_lightning.results.compare import compare_runs
from tests.small_runs import RESUMED, SMALL_RUNS, keeping, numbers
from tests.toys import assert_is_last, drawn_figures

VERBS = ("fit", "validate", "test", "predict")
# Of those that have more than the verb of their config.
ALSO = {
    "probe": {"validate", "test", "predict"},
    "all pairs": {"validate", "test", "predict"},
    "pretraining": {"validate"},
    "SAEs": {"validate"},
}


class Run(NamedTuple):
    """A run that has ended: its folder, its module's weights, and the checkpoints it kept."""

    folder: Path
    weights: dict[str, torch.Tensor]
    kept: Path


@pytest.fixture(scope="module")
def run(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Return the uninterrupted run of a study."""

    @cache
    def make(study: str) -> Run:
        if study == "feature flow" and not (inputs / "saes").exists():
            shutil.copytree(make("SAEs").folder / "sparse_autoencoders", inputs / "saes")
        root = tmp_path_factory.mktemp("run")
        more = keeping(root / "kept") if study in RESUMED else []
        with drawn_figures():
            cli = main(SMALL_RUNS[study].command(inputs, root, *more))
        return Run(Path(cli.trainer.log_dir), cli.model.state_dict(), root / "kept")

    return make


def test_every_config_has_a_small_run() -> None:
    """But `reproduce`, which runs other studies, and the paper's sizes of the ablation."""
    configs = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    others = {"reproduce", "vocabulary_ablation_paper"}
    assert {run.config for run in SMALL_RUNS.values()} == configs - others


@pytest.mark.parametrize("study", SMALL_RUNS)
def test_a_run_has_its_files_and_results_json_is_the_last(
    study: str, run: Callable[..., Run]
) -> None:
    folder = run(study).folder
    assert folder.parent.name == SMALL_RUNS[study].config
    results = json.loads(
        (folder / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert results["study"]
    assert results["settings"].keys() >= {"data", "matmul_precision"}
    assert {"torch", "lightning", "transformers", "lincorr-lightning"} <= set(results["versions"])
    lm = {"name_or_path", "dtype", "fingerprint", "n_parameters"}
    assert lm <= set(results["lm"])
    files = {
        kind: {path.stem for path in folder.glob(f"{kind}/*.{suffix}")}
        for kind, suffix in (("tables", "csv"), ("figures", "png"))
    }
    listed = {kind: {part["name"] for part in results[kind]} for kind in files}
    assert listed["tables"] == files["tables"] and listed["figures"] >= files["figures"]
    assert len(files["figures"]) == min(8, len(listed["figures"])) or study in (
        "probe",
        "all pairs",
    )
    assert (folder / "config.yaml").read_text().startswith(f"# lincorr {SMALL_RUNS[study].verb} ")
    assert_is_last(folder / "results.json")
    assert SavedRun.read(folder).study == results["study"]


@pytest.mark.parametrize("study", SMALL_RUNS)
def test_means_that_tables_declare_are_those_of_their_rows(
    study: str, run: Callable[..., Run], tmp_path: Path
) -> None:
    """A comparison with the run itself has an interval for each of them."""
    folder = run(study).folder
    again = shutil.copytree(folder, tmp_path / "again")
    compared = compare_runs(SavedRun.read(folder), SavedRun.read(again))
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for row in compared.table("numbers").frame.dropna(subset=["first"]).itertuples():
        assert row.difference == 0
        names[row.units != ""] |= {row.number.replace(".", "_"), f"{row.row}_{row.number}"}
    # A single unit, such as one seed, has no interval.
    tables = [
        table
        for table in SavedRun.read(folder).tables
        if table.unit and len(table.frame[list(table.unit)].drop_duplicates()) > 1
    ]
    declared = {mean for table in tables for mean in table.means}
    assert not declared & (names[False] - names[True])
    assert bool(declared) == bool(names[True])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "checkpoint"),
    [
        pytest.param(study, name, marks=pytest.mark.nightly if i or study == "causal" else ())
        for study in RESUMED
        for i, name in enumerate(SMALL_RUNS[study].resumes)
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    study: str, checkpoint: str, run: Callable[..., Run], inputs: Path, tmp_path: Path
) -> None:
    whole = run(study)
    option = f"--ckpt_path={whole.kept}/{checkpoint}.ckpt"
    cli = main(SMALL_RUNS[study].command(inputs, tmp_path, option))
    weights = cli.model.state_dict()
    assert weights.keys() == whole.weights.keys()
    assert not [key for key, value in whole.weights.items() if not torch.equal(value, weights[key])]
    assert numbers(Path(cli.trainer.log_dir)) == numbers(whole.folder)


@pytest.mark.slow
@pytest.mark.parametrize("study", SMALL_RUNS)
def test_a_dry_run_leaves_no_file(
    study: str, run: Callable[..., Run], inputs: Path, tmp_path: Path
) -> None:
    if study == "feature flow":
        run(study)  # whose SAEs it reads
    main(SMALL_RUNS[study].command(inputs, tmp_path, "--trainer.fast_dev_run=true"))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("study", RESUMED)
def test_a_run_of_other_settings_or_another_study_is_not_resumed(
    study: str, run: Callable[..., Run], inputs: Path, tmp_path: Path
) -> None:
    small = SMALL_RUNS[study]
    path = run(study).kept / f"{small.resumes[-1]}.ckpt"
    key, _, value = small.changed.partition("=")
    with pytest.raises(CheckpointError) as raised:
        main(small.command(inputs, tmp_path, f"--ckpt_path={path}", f"--{small.changed}"))
    message = str(raised.value)
    before, _, after = message.partition("this run has ")
    assert str(path) in message and key.rpartition(".")[0] in before and value in after
    other = next(name for name in RESUMED if SMALL_RUNS[name].config[:6] != small.config[:6])
    path = run(other).kept / f"{SMALL_RUNS[other].resumes[-1]}.ckpt"
    with pytest.raises(CheckpointError, match=str(path)):
        main(small.command(inputs, tmp_path, f"--ckpt_path={path}"))
    assert not list(tmp_path.rglob("results.json"))


@pytest.mark.slow
@pytest.mark.parametrize("study", [name for name in RESUMED if name != "pretraining"])
def test_a_checkpoint_of_another_lm_is_refused(
    study: str, run: Callable[..., Run], inputs: Path, tmp_path: Path
) -> None:
    small = SMALL_RUNS[study]
    path = run(study).kept / f"{small.resumes[-1]}.ckpt"
    options = [f"--ckpt_path={path}", f"--model.lm.name_or_path={inputs / 'tuned'}"]
    with pytest.raises(CheckpointError, match=r"model\.lm") as raised:
        main(small.command(inputs, tmp_path, *options))
    assert str(path) in str(raised.value)
    assert not list(tmp_path.rglob("results.json"))


@pytest.mark.slow
@pytest.mark.parametrize("study", SMALL_RUNS)
def test_a_study_has_its_verbs_and_refuses_others_and_foreign_data(
    study: str, inputs: Path, tmp_path: Path
) -> None:
    """Before anything is loaded."""
    small = SMALL_RUNS[study]
    verb, *options = small.command(inputs, tmp_path)
    for other in VERBS:
        if other != verb and other not in ALSO.get(study, ()):
            with pytest.raises(ConfigError, match=f"`lincorr {other}`.*`lincorr {verb}`"):
                main([other, *options])
    data = "PairedTextsDataModule" if study != "ablation" else "SubjectsDataModule"
    with pytest.raises(ConfigError, match="Use --data "):
        main([verb, *options, f"--data={data}"])
    assert not list(tmp_path.rglob("*"))


# Arguments that a resumed run may change: an LM is known by its fingerprint, a file by its content,
# the rest is what the program passes, or changes no number.
FREE = {
    "model.lm",
    "model.save_model",
    "model.saes",
    "data.lm",
    "data.plan",
    "data.training",
    "data.training_tokens",
    "data.edits_of_lm",
    "data.edits_file",
    "data.texts",
    "data.knowledge_files",
    "data.batch_size",
    "data.eval_batch_size",
}


@pytest.mark.parametrize("study", RESUMED)
def test_every_option_is_compared_when_a_run_is_resumed(
    study: str, run: Callable[..., Run]
) -> None:
    checkpoint = torch.load(next(run(study).kept.glob("*.ckpt")), weights_only=True)
    classes = {
        "model": checkpoint["hyper_parameters"]["_class_path"],
        "data": checkpoint["datamodule_hyper_parameters"]["_class_path"],
    }
    options = {
        f"{owner}.{name}"
        for owner, path in classes.items()
        for name in inspect.signature(resolve_name(path)).parameters
    }
    data = next(value for key, value in checkpoint.items() if key.endswith("DataModule"))
    compared = {*checkpoint["study"]["settings"], *data["determined_by"]}
    # Those that count on each rank, and contents of files, have more than the option's name.
    assert options - {key.partition(" ")[0] for key in compared} <= FREE
