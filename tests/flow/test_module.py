"""The feature-flow study on a random LM, from the command line and from Python."""

import csv
import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lincorr_lightning.cli import main
from lincorr_lightning.data.texts import TextsDataModule
from lincorr_lightning.errors import (
    ConfigError,
    DomainError,
    LincorrError,
    SparseAutoencoderError,
)
from lincorr_lightning.flow.deactivation import DeactivationSettings
from lincorr_lightning.flow.graph import GROUPS
from lincorr_lightning.flow.module import FeatureFlow
from lincorr_lightning.flow.steering import SteeringSettings
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import KINDS, HookPoint
from tests.toys import quiet_trainer, toy_sae

CONFIG = str(Path(__file__).resolve().parents[2] / "configs" / "feature_flow.yaml")
N = 40
HOOK_POINTS = [HookPoint(layer, kind) for layer in range(2) for kind in KINDS]


def _save(folder: Path, hook_points: list[HookPoint]) -> str:
    for hook_point in hook_points:
        random = torch.Generator().manual_seed(hook_point.layer)
        decoder = torch.randn(N, 16, generator=random)
        decoder[7] = 0
        sae = toy_sae(hook_point, decoder, encoder_bias=torch.full((N,), -0.5))
        sae.save(folder / hook_point.id)
    return str(folder)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    lines = [f"name{i} lives in the city of {c}" for i in range(40) for c in ("Paris", "Rome")]
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def _arguments(small_lm: str, saes: str, texts: str, folder: Path) -> list[str]:
    return [
        "test",
        "--config",
        CONFIG,
        f"--model.saes={saes}",
        f"--model.lm.name_or_path={small_lm}",
        f"--data.texts=[{texts}]",
        "--data.n_texts=50",
        "--data.n_tokens=64",
        "--data.batch_tokens=16",
        "--data.block_steps=2",
        "--data.knowledge=null",
        "--model.n_subjects=200",
        "--model.deactivation.n_cases=60",
        "--model.deactivation.strengths=[0.0,0.5]",
        "--model.steering.strengths=[0.0,1.0]",
        "--model.steering.n_texts=10",
        "--model.steering.n_prompts=10",
        f"--trainer.default_root_dir={folder}",
        "--trainer.enable_progress_bar=false",
    ]


def _run(small_lm: str, saes: str, texts: str, tmp_path: Path, *more: str) -> Path:
    cli = main([*_arguments(small_lm, saes, texts, tmp_path / "runs"), *more])
    return Path(cli.trainer.log_dir)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_run_writes_what_it_found(small_lm: str, texts: str, tmp_path: Path) -> None:
    saes = _save(tmp_path / "saes", HOOK_POINTS)
    run = _run(small_lm, saes, texts, tmp_path, "--model.features=[residual.1.3,mlp_out.0.2]")
    results = json.loads((run / "results.json").read_text())
    assert results["study"] == "feature_flow"
    assert (results["n_texts"], results["n_tokens"]) == (50, 350)
    assert [each["layer"] for each in results["groups"]] == [0, 1]
    for each in results["groups"]:
        assert list(each["shares"]) == list(GROUPS)
        assert sum(each["shares"].values()) == pytest.approx(1)
    assert each["n_activations"] > 100
    # Layer 0 has no stream below it.
    assert results["groups"][0]["shares"]["From RES"] == 0
    assert set(results["deactivation"]) == {"top-1", "top-5", "one-to-one"}
    for entry in results["deactivation"].values():
        assert entry["n"] == 120
    cuts = _rows(run / "tables" / "deactivation.csv")
    alone = {r["sources"] for r in cuts if r["layer"] == "1" and r["method"] == "top-1"}
    assert alone == {"all", "residual", "mlp_out", "attention_out"}
    # All SAEs of a layer have one decoder: the same features everywhere, matched with themselves.
    in_all = [r for r in cuts if r["group"] == "all" and r["sources"] == "all" and r["r"] == "0.0"]
    assert len(in_all) == 2 * 3 * 2
    relation = results["relation"]
    assert relation["relation"] == "city->country"
    assert (relation["n_fit"], relation["n_test"]) == (100, 100)
    none = relation["cuts"][0]
    assert (none["cut"], none["kept"], none["fixed"]) == ("none", 1.0, none["refitted"])
    assert {f.name for f in (run / "graphs").iterdir()} == {
        f"{f}.{end}" for f in ("residual.1.3", "mlp_out.0.2") for end in ("json", "graphml")
    }
    figures = {f.stem for f in (run / "figures").iterdir()}
    assert figures >= {
        "groups",
        "deactivation",
        "rescaling",
        "flow_residual.1.3",
        "flow_mlp_out.0.2",
    }
    assert len(_rows(run / "tables" / "transitions.csv")) == 5 * 2 * 5
    assert results["settings"]["saes"] == saes and "torch" in results["versions"]


def _fails(error: type[LincorrError], match: str, *arguments: object) -> None:
    with pytest.raises(error, match=match):
        _run(*arguments)  # type: ignore[arg-type]


def test_saes_that_do_not_fit(small_lm: str, texts: str, tmp_path: Path) -> None:
    high = _save(tmp_path / "high", [*HOOK_POINTS, HookPoint(2, "residual")])
    match = r"no residual of layer 2: its 2 layers are counted from 0 to 1"
    _fails(SparseAutoencoderError, match, small_lm, high, texts, tmp_path)
    alone = _save(tmp_path / "alone", [HookPoint(0, "residual")])
    match = "there are SAEs for residual of layer 0 only"
    _fails(SparseAutoencoderError, match, small_lm, alone, texts, tmp_path)


def test_unknown_features_are_refused(small_lm: str, tmp_path: Path) -> None:
    saes = _save(tmp_path / "saes", HOOK_POINTS)
    for feature, match in (
        ("residual.1.40", r"the SAE at residual of layer 1 has no feature 40; it has 40"),
        ("residual.3.0", "there is no SAE for the residual of layer 3; there are"),
        ("stream.1.4", r"'stream\.1\.4' names no feature: write its kind of hook point"),
        ("residual.1", "names no feature"),
        ("residual.1.7", "feature 7 .* cannot be followed: its decoder row is zero"),
    ):
        with pytest.raises(SparseAutoencoderError, match=match):
            FeatureFlow(LMConfig(small_lm), saes, features=[feature]).configure_model()


def test_invalid_settings_are_refused(small_lm: str) -> None:
    for options, match in (
        ({"k": 0}, r"model\.k is 0"),
        ({"n_subjects": 3}, r"model\.n_subjects is 3"),
        ({"steering": {"decay": 0}}, r"steering\.decay is 0; it must be above 0 and at most 1"),
        ({"steering": {"min_auroc": 1.2}}, r"steering\.min_auroc is 1\.2"),
        ({"steering": {"strategies": ["cubic"]}}, "strategies is 'cubic'; .* single, con"),
        ({"steering": {"strengths": []}}, r"steering\.strengths is empty"),
        ({"deactivation": {"strengths": []}}, r"deactivation\.strengths is \[\]"),
        ({"deactivation": {"strengths": [0.5, 0.5]}}, "each once"),
    ):
        with pytest.raises(ConfigError, match=match):
            FeatureFlow(lm={"name_or_path": small_lm}, **options)  # type: ignore[arg-type]


def test_other_data_is_refused(small_lm: str, texts: str, tmp_path: Path) -> None:
    saes = _save(tmp_path / "saes", HOOK_POINTS)
    lm = LMConfig(small_lm)
    for module in (FeatureFlow(lm=lm, saes=saes), FeatureFlow(lm=lm, saes=None)):
        match = r"batches of TokenRows, not \w+\."
        with pytest.raises(ConfigError, match=match):
            quiet_trainer(tmp_path).test(module, DataLoader([0, 1]))
    module = FeatureFlow(lm, relation=None)
    data = TextsDataModule(module.lm, texts=[texts], n_texts=20)
    with pytest.raises(ConfigError, match=r"model\.saes is null.* no batch of TextBlocks"):
        quiet_trainer(tmp_path).test(module, data, verbose=False)


def test_an_lm_without_the_relations_labels_is_refused(
    small_lm: str, texts: str, tmp_path: Path
) -> None:
    saes = _save(tmp_path / "saes", HOOK_POINTS)
    match = r"no label.*--model\.relation null skips city->language and steering"
    _fails(DomainError, match, small_lm, saes, texts, tmp_path, "--model.relation=city->language")


def test_large_flows_are_not_steered_with(small_lm: str, texts: str, tmp_path: Path) -> None:
    saes = _save(tmp_path / "saes", HOOK_POINTS)
    many = (
        "--model.features=[residual.1.3,residual.0.3]",
        "--model.deactivation.n_cases=0",
        "--model.thresholds=0.0",
        "--model.steering.min_auroc=0",
    )
    run = _run(small_lm, saes, texts, tmp_path, *many, "--model.k=30")
    graphs = [json.loads(path.read_text()) for path in (run / "graphs").glob("*.json")]
    assert max(len(graph["nodes"]) for graph in graphs) > 20
    steered = _rows(run / "tables" / "steering.csv")
    # Top-1: one residual feature a layer, and one of each of its two outputs.
    assert steered and max(int(row["n_features"]) for row in steered) <= 2 * 3


def test_a_dry_run_changes_no_lm_and_writes_nothing(
    small_lm: str, texts: str, tmp_path: Path
) -> None:
    before = LanguageModel.from_pretrained(small_lm).fingerprint
    for saes in ("null", _save(tmp_path / "saes", HOOK_POINTS)):
        cli = main(
            [
                *_arguments(small_lm, saes, texts, tmp_path / "dry"),
                "--model.training_tokens=64",
                "--trainer.fast_dev_run=true",
            ]
        )
        assert cli.model.lm.fingerprint == before
    assert not list((tmp_path / "dry").rglob("results.json"))


def test_any_loader_of_token_rows_works(small_lm: str, texts: str, tmp_path: Path) -> None:
    saes = _save(tmp_path / "saes", HOOK_POINTS)
    found = []
    for plain in (False, True):
        module = FeatureFlow(
            LMConfig(name_or_path=small_lm),
            saes,
            n_subjects=60,
            deactivation=DeactivationSettings(n_cases=10, strengths=(0.0,)),
            steering=SteeringSettings(n_answers=1, strengths=(1.0,), n_texts=5, n_prompts=5),
        )
        data = TextsDataModule(module.lm, texts=[texts], n_texts=20, eval_batch_size=8)
        if plain:
            data.setup("test")
            batches = list(data.test_dataloader())
            data = DataLoader(batches, batch_size=None)  # type: ignore[arg-type,assignment]
        trainer = quiet_trainer(tmp_path / str(plain), logger=False)
        trainer.test(module, data, verbose=False)
        assert (tmp_path / str(plain) / "feature_flow" / "version_0" / "results.json").is_file()
        found.append(module.results)
    one, two = found
    assert one.values == two.values and one.values["n_texts"] == 20
    assert (one.settings["data"]["eval_batch_size"], two.settings["data"]) == (8, {})
    # Without a logger, too, EarlyStopping and others can see the scalars.
    assert trainer.callback_metrics["deactivation/top-1/matched"] == pytest.approx(
        one.scalars["deactivation/top-1/matched"]
    )


def test_saes_are_trained_where_none_are_given(small_lm: str, texts: str, tmp_path: Path) -> None:
    """Another run reads them from its folder; parts of the study can be left out."""
    run = _run(
        small_lm,
        "null",
        texts,
        tmp_path,
        "--model.training_tokens=64",
        "--model.deactivation.n_cases=0",
        "--model.relation=null",
    )
    folders = {folder.name for folder in (run / "sparse_autoencoders").iterdir()}
    assert folders == {hook_point.id for hook_point in HOOK_POINTS}
    first = json.loads((run / "results.json").read_text())
    assert (first["relation"], first["deactivation"], first["steering"]) == (None, {}, {})
    assert not (run / "tables" / "steering.csv").exists()
    again = _run(
        small_lm,
        str(run / "sparse_autoencoders"),
        texts,
        tmp_path,
        "--model.deactivation.n_cases=0",
        "--model.relation=null",
    )
    second = json.loads((again / "results.json").read_text())
    assert first["groups"] == second["groups"]
    assert first["saes"] == second["saes"] and set(first["saes"]) == folders
