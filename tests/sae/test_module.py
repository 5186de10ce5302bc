"""The study: its numbers against naive ones, its files, resuming, ranks and refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pandas import read_csv
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lincorr_lightning.cli import main
from lincorr_lightning.data.texts import TextsDataModule, TokenStep, pad_rows
from lincorr_lightning.errors import CheckpointError, ConfigError, SparseAutoencoderError
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae import KINDS, HookPoint
from lincorr_lightning.sae.formats import load_saes
from lincorr_lightning.sae.forwards import BlockActivations
from lincorr_lightning.sae.hooks import captured, find_hook_points
from lincorr_lightning.sae.module import SparseAutoencoders
from lincorr_lightning.sae.stacked import SAESettings, learning_rate_factor, train_saes
from tests.launching import run_in_two
from tests.small_runs import SMALL_RUNS
from tests.toys import NO_FILES, quiet_trainer, replaced_output

LINES = [f"name{i} lives in the city of {'Paris ' * (i % 3)}name{(7 * i) % 90}" for i in range(200)]
SAE = SAESettings(n_features=48, k=6, dead_after_steps=10, aux_k=8)
STEPS = 24


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return str(path)


@pytest.fixture
def make(small_lm: str, texts: str, tmp_path: Path) -> Callable[..., Any]:
    def make_one(
        lm: str = small_lm, callbacks: tuple[L.Callback, ...] = (), name: str = "run", **model: Any
    ) -> tuple[L.Trainer, SparseAutoencoders, TextsDataModule]:
        trainer = quiet_trainer(
            tmp_path / name,
            callbacks=list(callbacks),
            log_every_n_steps=5,
            enable_checkpointing=bool(callbacks),
            logger=CSVLogger(tmp_path / name),
        )
        settings = {"sae": SAE, "learning_rate": 5e-3} | model
        module = SparseAutoencoders({"name_or_path": lm}, **settings)
        data = TextsDataModule(
            module.lm,
            [texts],
            n_tokens=STEPS * 64,
            batch_tokens=64,
            block_steps=4,
            n_held_out=30,
            eval_batch_size=7,
        )
        return trainer, module, data

    return make_one


def _folder(trainer: L.Trainer) -> Path:
    (found,) = Path(trainer.default_root_dir).rglob("results.json")
    return found.parent


def _scores(module: SparseAutoencoders) -> dict[str, Any]:
    assert module.results is not None
    names = ("n_held_out_tokens", "loss_clean", "mean", "hook_points")
    return {name: module.results.values[name] for name in names}


def test_its_numbers_are_the_naive_ones(make: Callable[..., Any]) -> None:
    trainer, module, data = make()
    before = module.lm.load().fingerprint["weights"]
    trainer.fit(module, datamodule=data)
    assert module.lm.fingerprint["weights"] == before
    folder = _folder(trainer)
    results = json.loads((folder / "results.json").read_text())
    saes = load_saes(folder / "sparse_autoencoders")
    assert set(saes) == {HookPoint(layer, kind) for layer in (0, 1) for kind in KINDS}
    assert results["study"] == "sparse_autoencoders"
    assert (results["n_steps"], results["n_tokens"]) == (STEPS, STEPS * 64)
    assert results["settings"]["data"]["batch_tokens"] == 64
    assert results["lm"]["fingerprint"] == dict(module.lm.fingerprint)

    model = module.lm.model
    rows = [
        row[mask.bool()][None]
        for batch in data.val_dataloader()
        for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]

    def loss(hook_point: HookPoint, change: Callable[[Tensor], Tensor]) -> float:
        """Mean cross-entropy, one row at a time, with activations replaced."""
        total = 0.0
        with replaced_output(model, hook_point, change):
            for row in rows:
                logits = model(row).logits[0, :-1]
                total += float(cross_entropy(logits, row[0, 1:], reduction="sum"))
        return total / sum(row.shape[1] - 1 for row in rows)

    with torch.no_grad():
        for scored in results["hook_points"]:
            hook_point = HookPoint(scored["layer"], scored["kind"])
            sae, read = saes[hook_point], []
            clean = loss(hook_point, lambda x, read=read: read.append(x[0]) or x)
            spliced, ablated = loss(hook_point, sae), loss(hook_point, torch.zeros_like)
            x = torch.cat(read)
            features = sae.encode(x) > 0
            error, total = (x - sae(x)).square().sum(), (x - x.mean(0)).square().sum()
            expected = {
                "explained_variance": float(1 - error / total),
                "l0": float(features.sum(1).float().mean()),
                "dead": float((features.sum(0) == 0).float().mean()),
                "loss_spliced": spliced,
                "loss_ablated": ablated,
            }
            if ablated > clean:
                expected["loss_recovered"] = (ablated - spliced) / (ablated - clean)
            else:
                assert scored["loss_recovered"] is None
            found = {name: scored[name] for name in expected}
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4), hook_point
        assert results["loss_clean"] == pytest.approx(clean, rel=1e-5)
    assert len((folder / "tables" / "hook_points.csv").read_text().splitlines()) == 7
    logged = read_csv(next(folder.rglob("metrics.csv")))
    assert "train/dead/residual.0" in logged
    for hook_point in saes:
        curve = logged[f"train/explained_variance/{hook_point.id}"].dropna().to_list()
        assert curve[-1] > max(curve[0], 0.5)
    assert "val/explained_variance/residual.0" in trainer.callback_metrics


def test_checkpoints_and_folders_are_scored_again(
    make: Callable[..., Any], tmp_path: Path, make_lm: Callable[..., Path]
) -> None:
    trainer, module, data = make(callbacks=(ModelCheckpoint(save_last=True),), layers=[1])
    trainer.fit(module, datamodule=data)
    scores = _scores(module)
    path = str(next(Path(trainer.default_root_dir).rglob("last.ckpt")))
    checkpoint = torch.load(path, weights_only=True)
    assert not [key for key in checkpoint["state_dict"] if key.startswith("lm.")]
    trainer, module, data = make(name="again", layers=[1])
    trainer.validate(module, datamodule=data, ckpt_path=path, verbose=False)
    assert _scores(module) == scores
    saes = str(next(tmp_path.rglob("sparse_autoencoders/residual.1")).parent)
    trainer, module, data = make(name="given", saes=saes)
    trainer.validate(module, datamodule=data, verbose=False)
    assert _scores(module) == scores
    assert not (_folder(trainer) / "sparse_autoencoders").exists()

    wide = str(make_lm(tmp_path / "wide", hidden_size=24))
    other = str(make_lm(tmp_path / "other", seed=5))
    size = SAESettings(n_features=32, k=6)
    for method, options, ckpt_path, error, match in (
        ("validate", {"lm": wide, "saes": saes}, None, SparseAutoencoderError, "16 wide, .* is 24"),
        ("fit", {"saes": saes}, None, ConfigError, "SAEs to score, not to train"),
        ("validate", {}, None, ConfigError, "no trained SAEs to score"),
        ("validate", {"layers": [1], "sae": size}, path, CheckpointError, r"with model\.sae"),
        ("validate", {"layers": [1], "lm": other}, path, CheckpointError, r"weights .* differs"),
    ):
        trainer, module, data = make(name="refused", **options)
        with pytest.raises(error, match=match):
            getattr(trainer, method)(module, datamodule=data, ckpt_path=ckpt_path)


def test_any_dataloader_of_the_documented_batches(make: Callable[..., Any]) -> None:
    """Texts as blocks whose tokens are used in another order."""
    trainer, module, _ = make(layers=[0], kinds=["residual"])
    lm = module.lm
    texts = [pad_rows(lm.rows(LINES[i : i + 20]), 1) for i in range(0, 200, 20)]
    batches: list[TokenStep] = []
    for block, rows in enumerate(texts):
        order = torch.randperm(int(rows.counted.sum())).chunk(2)
        batches += [TokenStep(block, i, rows, part) for i, part in enumerate(order)]
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, loader, DataLoader(texts[:2], batch_size=None))  # type: ignore[arg-type]
    n_counted = sum(int(rows.counted.sum()) for rows in texts)
    assert module.results.values["n_tokens"] == n_counted
    assert module.results.values["n_steps"] == 20
    n_held_out = sum(int(rows.counted.sum()) for rows in texts[:2])
    assert module.results.values["n_held_out_tokens"] == n_held_out
    assert module.results.settings["data"] == {}
    logged = read_csv(next(_folder(trainer).rglob("metrics.csv")))
    curve = logged["train/explained_variance/residual.0"].dropna().to_list()
    assert curve[-1] > curve[0]
    assert (_folder(trainer) / "sparse_autoencoders" / "residual.0").is_dir()


def test_activations_are_those_of_the_counted_tokens_in_order(make: Callable[..., Any]) -> None:
    module = make()[1]
    model = module.lm.load().model
    hook_points = find_hook_points(model)
    rows = module.lm.rows(LINES[:9])
    module.lm.config = replace(module.lm.config, tokens_per_forward=20)
    texts = pad_rows(rows, 2)
    step = TokenStep(0, 0, texts, torch.arange(int(texts.counted.sum())))
    found = BlockActivations(module.lm, hook_points).read(step)
    expected = []
    for row in rows:
        with captured(model, hook_points) as read:
            model(input_ids=torch.tensor([row]))
        expected.append(torch.stack([read[hook_point][0, 2:] for hook_point in hook_points]))
    torch.testing.assert_close(found, torch.cat(expected, 1), atol=1e-5, rtol=1e-5)


def test_the_learning_rate_warms_up_and_decays() -> None:
    n = 200
    expected = [min((i + 1) / 10, 1.0, (n - i) / 80) for i in range(n)]
    assert [learning_rate_factor(i, n) for i in range(n)] == pytest.approx(expected)


def test_invalid_settings_and_data_are_refused(make: Callable[..., Any]) -> None:
    trainer, module, data = make(layers=[4])
    with pytest.raises(SparseAutoencoderError, match="no attention_out of layer 4: its 2 layers"):
        trainer.fit(module, datamodule=data)
    trainer, module, _ = make(name="data")
    with pytest.raises(ConfigError, match=r"batches of TokenStep, not int"):
        trainer.fit(module, train_dataloaders=[1])
    trainer, module, data = make(name="endless")
    data.setup("fit")
    with pytest.raises(ConfigError, match=r"no length.* Set trainer\.max_steps"):
        trainer.fit(module, train_dataloaders=(batch for batch in data.val_dataloader()))
    trainer, module, data = make(name="epochs")
    trainer.fit_loop.max_epochs = 3
    with pytest.raises(ConfigError, match=r"max_epochs is 3; it must be 1"):
        trainer.fit(module, datamodule=data)


def test_saes_are_those_of_sparse_autoencoders_on_the_same_texts(
    small_lm: str, texts: str, tmp_path: Path
) -> None:
    sizes = {"n_texts": 20, "n_tokens": 64, "batch_tokens": 16, "block_steps": 2}
    settings = SAESettings(n_features=24, k=3)
    lm = LanguageModel.from_pretrained(small_lm)
    fingerprint = lm.fingerprint
    data = TextsDataModule(lm, [texts], training_tokens=192, **sizes)
    data.setup("test")
    (steps,), batches = data.test_dataloader()
    assert len(steps) == 12
    found = train_saes(lm, steps, settings, seed=3)
    assert lm.fingerprint == fingerprint
    read = [row.tolist() for batch in batches for row in batch.input_ids]
    assert len(read) == 20 and not [row for row in read if row in steps.texts]

    study = SparseAutoencoders(LMConfig(name_or_path=small_lm), sae=settings, seed=3)
    trainer = quiet_trainer(tmp_path, limit_val_batches=0, **NO_FILES)
    trainer.fit(study, DataLoader(steps, batch_size=None))
    assert trainer.global_step == 12
    for hook_point, expected in study.trained().items():
        for name, tensor in expected.state_dict().items():
            assert torch.equal(found[hook_point].state_dict()[name], tensor), name
    few = TextsDataModule(lm, [texts], training_tokens=8, **sizes)
    few.setup("test")
    with pytest.raises(ConfigError, match=r"0 blocks of 32.*model\.training_tokens"):
        few.test_dataloader()


@pytest.mark.slow
def test_two_processes_train_together(inputs: Path, tmp_path: Path) -> None:
    def command(name: str, *more: str) -> list[str]:
        options = "--data.n_tokens=3072", "--data.batch_tokens=64", "--model.sae.n_features=48"
        return SMALL_RUNS["SAEs"].command(inputs, tmp_path / name, *options, *more)

    main(command("one"))
    done = run_in_two(*command("two", "--trainer.strategy=ddp", "--trainer.devices=2"))
    assert done.returncode == 0, done.stderr
    one, two = (
        json.loads(next((tmp_path / name).rglob("results.json")).read_text())
        for name in ("one", "two")
    )
    # As many tokens in half the steps; each held-out text is scored once.
    assert (one["n_steps"], two["n_steps"]) == (48, 24)
    assert two["n_tokens"] == one["n_tokens"] == 3072
    assert two["n_held_out_tokens"] == one["n_held_out_tokens"]
    assert two["loss_clean"] == pytest.approx(one["loss_clean"], rel=1e-5)
    assert two["mean"]["explained_variance"] > 0.5
