"""The feature-flow study on a random LM, from the command line and from Python."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pandas import read_csv
from torch.utils.data import DataLoader

from lincorr_lightning.cli import main
from lincorr_lightning.data.texts import TextsDataModule
from lincorr_lightning.errors import ConfigError, DomainError, LincorrError, SparseAutoencoderError
from lincorr_lightning.flow.graph import GROUPS
from lincorr_lightning.flow.module import FeatureFlow
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import KINDS, HookPoint
from tests.small_runs import SMALL_RUNS
from tests.toys import quiet_trainer, toy_sae

N = 40
HOOK_POINTS = [HookPoint(layer, kind) for layer in range(2) for kind in KINDS]
ONLY_GROUPS = ("--model.deactivation.n_cases=0", "--model.relation=null")


def _save(folder: Path, hook_points: list[HookPoint]) -> str:
    for hook_point in hook_points:
        random = torch.Generator().manual_seed(hook_point.layer)
        decoder = torch.randn(N, 16, generator=random)
        decoder[7] = 0
        sae = toy_sae(hook_point, decoder, encoder_bias=torch.full((N,), -0.5))
        sae.save(folder / hook_point.id)
    return str(folder)


@pytest.fixture(scope="module")
def saes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _save(tmp_path_factory.mktemp("saes"), HOOK_POINTS)


def _run(inputs: Path, saes: str, folder: Path, *more: str) -> Any:
    options = (
        f"--model.saes={saes} --model.deactivation.strengths=[0.0,0.5] --model.training_tokens=64 "
        "--data.n_tokens=64 --data.batch_tokens=16 --data.block_steps=2"
    )
    return main(SMALL_RUNS["feature flow"].command(inputs, folder, *options.split(), *more))


def _results(cli: Any) -> dict[str, Any]:
    return json.loads((Path(cli.trainer.log_dir) / "results.json").read_text())


@pytest.mark.slow
def test_a_run_writes_what_it_found(inputs: Path, saes: str, tmp_path: Path) -> None:
    features = "--model.features=[residual.1.3,mlp_out.0.2]"
    cli = _run(inputs, saes, tmp_path, features, "--model.threshold=0.5")
    folder, results = Path(cli.trainer.log_dir), _results(cli)
    assert results["study"] == "feature_flow"
    assert (results["n_texts"], results["n_tokens"]) == (60, 60 * 24)
    assert [each["layer"] for each in results["groups"]] == [0, 1]
    for each in results["groups"]:
        assert list(each["shares"]) == list(GROUPS)
        assert sum(each["shares"].values()) == pytest.approx(1)
        assert each["n_activations"] > 100
    # Layer 0 has no stream below it.
    assert results["groups"][0]["shares"]["From RES"] == 0
    assert set(results["deactivation"]) == {"top-1", "top-5", "one-to-one"}
    assert {entry["n"] for entry in results["deactivation"].values()} == {2 * 40}
    cuts = read_csv(folder / "tables" / "deactivation.csv")
    assert set(cuts["cut"]) == {"matched", "random"} and set(cuts["r"]) == {0.0, 0.5}
    relation = results["relation"]
    assert (relation["relation"], relation["n_fit"]) == ("city->country", 50)
    none = relation["cuts"][0]
    assert (none["cut"], none["kept"], none["fixed"]) == ("none", 1.0, none["refitted"])
    # All SAEs of a layer have one decoder, so that features are matched with themselves.
    edges = read_csv(folder / "tables" / "flow_edges.csv")
    outputs = edges[edges["flow"] == "residual.1.3"]
    assert set(outputs["source"]) >= {"mlp_out.1.3", "attention_out.1.3"}
    assert outputs["cosine"].max() == pytest.approx(1)
    figures = {f.stem for f in (folder / "figures").iterdir()}
    assert figures >= {"deactivation", "flow_residual.1.3", "flow_mlp_out.0.2"}
    assert results["settings"]["saes"] == saes and "torch" in results["versions"]


@pytest.mark.parametrize(
    ("hook_points", "options", "error", "match"),
    [
        ([*HOOK_POINTS, HookPoint(2, "residual")], (), SparseAutoencoderError, "its 2 layers"),
        ([HookPoint(0, "residual")], (), SparseAutoencoderError, "SAEs for residual of layer 0"),
        (
            HOOK_POINTS,
            ("--model.relation=city->language",),
            DomainError,
            r"no label.*--model\.relation null",
        ),
    ],
)
def test_saes_and_relations_that_do_not_fit(
    hook_points: list[HookPoint],
    options: tuple[str, ...],
    error: type[LincorrError],
    match: str,
    inputs: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=match):
        _run(inputs, _save(tmp_path / "saes", hook_points), tmp_path, *options)


def test_unknown_features_are_refused(small_lm: str, saes: str) -> None:
    for feature, match in (
        ("residual.1.40", "has no feature 40; it has 40"),
        ("residual.3.0", "no SAE for the residual of layer 3"),
        ("stream.1.4", r"'stream\.1\.4' names no feature"),
        ("residual.1.7", "feature 7 .* decoder row is zero"),
    ):
        with pytest.raises(SparseAutoencoderError, match=match):
            FeatureFlow(LMConfig(small_lm), saes, features=[feature])


def test_invalid_settings_are_refused(small_lm: str) -> None:
    for options, match in (
        ({"threshold": 2.0}, r"model\.threshold is 2\.0"),
        ({"n_subjects": 3}, r"model\.n_subjects is 3"),
        ({"steering": {"decay": 0}}, r"steering\.decay is 0"),
        ({"steering": {"strategies": ["cubic"]}}, "strategies is 'cubic'; .* single, con"),
        ({"steering": {"strengths": []}}, r"steering\.strengths"),
        ({"deactivation": {"strengths": []}}, r"deactivation\.strengths is \[\]"),
        ({"deactivation": {"strengths": [0.5, 0.5]}}, "each once"),
    ):
        with pytest.raises(ConfigError, match=match):
            FeatureFlow(lm={"name_or_path": small_lm}, **options)  # type: ignore[arg-type]


def test_other_data_is_refused(inputs: Path, saes: str, tmp_path: Path) -> None:
    lm = LMConfig(str(inputs / "lm"))
    with pytest.raises(ConfigError, match=r"batches of TokenRows, not Tensor"):
        quiet_trainer(tmp_path).test(FeatureFlow(lm=lm, saes=saes), DataLoader([0, 1]))
    module = FeatureFlow(lm, relation=None)
    data = TextsDataModule(module.lm, texts=str(inputs / "texts.txt"), n_texts=20)
    with pytest.raises(ConfigError, match=r"model\.saes is null.* no batch of TextBlocks"):
        quiet_trainer(tmp_path).test(module, data, verbose=False)


def test_a_dry_run_changes_no_lm_and_writes_nothing(inputs: Path, tmp_path: Path) -> None:
    small = ("--model.n_subjects=40", "--model.deactivation.n_cases=5")
    cli = _run(inputs, "null", tmp_path, *small, "--trainer.fast_dev_run=true")
    expected = LanguageModel.from_pretrained(str(inputs / "lm"))
    assert cli.model.lm.fingerprint == expected.fingerprint
    assert not list(tmp_path.rglob("results.json"))


def test_saes_are_trained_where_none_are_given(inputs: Path, tmp_path: Path) -> None:
    """Another run reads them from its folder; parts of the study can be left out."""
    cli = _run(inputs, "null", tmp_path, *ONLY_GROUPS)
    trained = Path(cli.trainer.log_dir) / "sparse_autoencoders"
    assert {path.name for path in trained.iterdir()} == {at.id for at in HOOK_POINTS}
    first = _results(cli)
    assert (first["relation"], first["deactivation"], first["steering"]) == (None, {}, {})
    assert not (Path(cli.trainer.log_dir) / "tables" / "steering.csv").exists()
    second = _results(_run(inputs, str(trained), tmp_path, *ONLY_GROUPS))
    assert first["groups"] == second["groups"]
    assert set(first["saes"]) == set(second["saes"]) == {at.id for at in HOOK_POINTS}
