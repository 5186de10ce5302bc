"""Pre-training, and the LM and numbers that it writes."""

import json

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lincorr_lightning.data.tiny_world.world import World, WorldConfig
from lincorr_lightning.errors import CheckpointError, ConfigError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.pretraining.corpus import build_corpus
from lincorr_lightning.pretraining.datamodule import (
    IGNORED,
    CorpusDataModule,
    PackedStatements,
    recall_prompts,
)
from lincorr_lightning.pretraining.module import (
    LlamaSize,
    Pretraining,
    mixup_cross_entropy,
    off_target_penalty,
    one_cycle,
)
from tests.toys import quiet_trainer, read_table

SIZE = LlamaSize(hidden_size=32, intermediate_size=48, n_heads=2)
KNOWLEDGE = ["city", "country", "X+1"]
WORLD = WorldConfig(n_people=24, nicknames=False, letters=False, numbered=False)


def make_corpus():
    return CorpusDataModule(WORLD, KNOWLEDGE, batch_size=16, repeats={"math": 5})


def make_trainer(folder, max_epochs, **options):
    log = CSVLogger(folder)
    return quiet_trainer(folder, max_epochs=max_epochs, logger=log, log_every_n_steps=1, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    L.seed_everything(0)
    losses, module = [], Pretraining(SIZE, learning_rate=1e-2)
    record = LambdaCallback(on_train_batch_end=lambda *a: losses.append(float(a[2]["loss"])))
    trainer = make_trainer(folder, 30, callbacks=[record], check_val_every_n_epoch=30)
    trainer.fit(module, datamodule=make_corpus())
    return folder / "lightning_logs" / "version_0", losses, module


def test_results_are_written(run):
    folder, losses, module = run
    results = json.loads((folder / "results.json").read_text())
    assert results["study"] == "pretraining"
    assert set(results["recall"]) == set(KNOWLEDGE)
    assert results["recall"]["country"] > 0.2  # a guess would be right in 1 of 22
    assert results["n_people"] == 24
    assert results["n_steps"] == len(losses)
    assert results["n_parameters"] == sum(p.numel() for p in module.lm.parameters())
    assert min(losses) < results["loss"] < max(losses)
    rows = {row["knowledge"]: row for row in read_table(folder / "tables" / "recall.csv")}
    assert {name: float(row["recall"]) for name, row in rows.items()} == results["recall"]
    assert rows["city"]["n_prompts"] == "24"
    lm = LanguageModel.from_pretrained(results["model"])
    assert results["lm"] == lm.info
    assert results["settings"]["data"]["batch_size"] == 16


def test_the_written_lm_is_the_trained_one(run):
    folder, _, module = run
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lm = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    world = World.load(folder / "model" / "world.json")
    results = json.loads((folder / "results.json").read_text())
    prompt = tokenizer(f"{next(iter(world.people))} lives in the city of", return_tensors="pt")
    assert tokenizer.unk_token_id not in prompt["input_ids"]
    with torch.no_grad():
        ours, theirs = (model(**prompt).logits for model in (module.lm.eval(), lm))
    torch.testing.assert_close(theirs, ours, atol=0.05, rtol=0.01)  # stored in float16
    hits = 0
    for name, facts in world.people.items():
        prompt = tokenizer(f"{name} lives in the country of", return_tensors="pt")
        with torch.no_grad():
            best = lm(**prompt).logits[0, -1].argmax()
        hits += tokenizer.decode([best]) == facts["country"]
    assert results["recall"]["country"] == pytest.approx(hits / 24, abs=1 / 24)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    def fit(folder, **options):
        L.seed_everything(0)
        module = Pretraining(SIZE)
        ckpt_path = options.pop("ckpt_path", None)
        trainer = make_trainer(folder, 4, **options)
        trainer.fit(module, datamodule=make_corpus(), ckpt_path=ckpt_path)
        (path,) = folder.rglob("results.json")
        results = json.loads(path.read_text())
        return module.lm.state_dict(), {name: results[name] for name in ("loss", "recall")}

    kept = ModelCheckpoint(
        tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    options = {"enable_checkpointing": True, "callbacks": [kept]}
    weights, results = fit(tmp_path / "whole", check_val_every_n_epoch=3, **options)
    n_steps = len(list(tmp_path.glob("*.ckpt")))
    # In the middle of an epoch, at the end of one, in the last, which does not validate.
    for step in (n_steps // 4 + 2, n_steps // 2, n_steps - 1):
        kept = tmp_path / f"step={step}.ckpt"
        resumed = fit(tmp_path / str(step), check_val_every_n_epoch=3, ckpt_path=kept)
        assert all(torch.equal(weights[name], resumed[0][name]) for name in weights)
        assert resumed[1] == results


def test_a_checkpoint_of_another_world_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(Pretraining(SIZE), datamodule=make_corpus())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    other = CorpusDataModule(
        WorldConfig(n_people=30), KNOWLEDGE, batch_size=16, repeats={"math": 5}
    )
    with pytest.raises(CheckpointError, match=r"data\.world .*'n_people': 30"):
        make_trainer(tmp_path, 2).fit(
            Pretraining(SIZE), datamodule=other, ckpt_path=tmp_path / "end.ckpt"
        )


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="takes its vocabulary from the corpus of its data"):
        make_trainer(tmp_path, 1).fit(Pretraining(SIZE), train_dataloaders=DataLoader([0, 1]))
    with pytest.raises(ConfigError, match=r"needs the run's length\. Set trainer\.max_epochs"):
        make_trainer(tmp_path, -1).fit(Pretraining(SIZE), datamodule=make_corpus())
    with pytest.raises(ConfigError, match=r"hidden_size is 30, which model\.size\.n_heads"):
        LlamaSize(hidden_size=30)
    with pytest.raises(ConfigError, match="save_dtype is 'int8'"):
        Pretraining(save_dtype="int8")


def test_plain_dataloaders_train_what_the_datamodule_does(tmp_path):
    """Loaders over the documented datasets and their corpus are enough; there is no DataModule."""

    def fit(folder, corpus=None, **data):
        L.seed_everything(0)
        module = Pretraining(SIZE)
        module.corpus = corpus
        make_trainer(tmp_path / folder, 1).fit(module, **data)
        return module

    corpus = build_corpus(WORLD, Catalogue.load(), KNOWLEDGE)
    statements = PackedStatements(corpus, batch_size=16, repeats=[1, 1, 5])
    loaders = [DataLoader(data, batch_size=None) for data in (statements, recall_prompts(corpus))]
    plain = fit("plain", corpus, train_dataloaders=loaders[0], val_dataloaders=loaders[1])
    usual = fit("usual", datamodule=make_corpus())
    for ours, theirs in zip(plain.parameters(), usual.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    found, expected = plain.trainer.callback_metrics, usual.trainer.callback_metrics
    assert found["val/recall"] == expected["val/recall"]
    assert found["train/loss"] == expected["train/loss"]


def test_losses_are_those_written_out_target_by_target():
    rng = torch.Generator().manual_seed(0)
    logits, shares = torch.randn(4, 7, generator=rng), torch.tensor([0.0, 0.3, 0.5, 0.0])
    targets, second = [1, 2, 3, 6], [IGNORED, 4, 3, IGNORED]
    knowledge, answers = [0, 0, 1, IGNORED], [{1, 2, 4}, {3, 5}]
    mixed, squares = [], []
    columns = (logits, targets, second, shares, knowledge)
    for row, one, other, share, kind in zip(*columns, strict=True):
        log_p = row.log_softmax(0)
        mixed.append(-(1 - share) * log_p[one] - share * log_p[other if share else one])
        if kind != IGNORED:
            wrong = answers[kind] - {one, other}
            squares.append(sum(float(row[i]) ** 2 for i in wrong) / len(wrong))
    first, both = torch.tensor(targets), torch.tensor(second)
    assert mixup_cross_entropy(logits, first, both, shares) == pytest.approx(sum(mixed) / 4)
    table = torch.tensor([[float(i in own) for i in range(7)] for own in answers])
    penalty = off_target_penalty(logits, first, both, torch.tensor(knowledge), table)
    assert penalty == pytest.approx(sum(squares) / 3)


@pytest.mark.parametrize(("n", "warmup"), [(100, 0.1), (37, 0.3)])
def test_a_cycle_is_that_of_torch(n, warmup):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.7, total_steps=n, pct_start=warmup, cycle_momentum=False
    )
    for step in range(n):
        rate = optimizer.param_groups[0]["lr"]
        assert 0.7 * one_cycle(step, n, warmup) == pytest.approx(rate, rel=1e-12)
        optimizer.step()
        if step < n - 1:
            schedule.step()


def test_subjects_are_mixed_in_the_last_epochs_at_a_rate_of_their_own(tmp_path):
    seen = []

    class Spy(Pretraining):
        def _embed(self, batch, mixing):
            embedded = super()._embed(batch, mixing)
            own = self.lm.get_input_embeddings()(batch.input_ids)
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            seen.append((self.current_epoch, mixing, not torch.equal(embedded, own), rate))
            return embedded

    module = Spy(SIZE, mixing_epochs=1, mixing_learning_rate=1e-4)
    trainer = make_trainer(tmp_path, 3, check_val_every_n_epoch=3)
    trainer.fit(module, datamodule=make_corpus())
    for epoch, mixing, differs, rate in seen:
        assert mixing == differs == (epoch == 2)
        assert rate <= (1e-4 if mixing else 3e-3)
    assert max(rate for *_, rate in seen) > 1e-3
    assert max(rate for epoch, *_, rate in seen if epoch == 2) > 0.5e-4
