"""Pre-training, and the LM and numbers that it writes."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lincorr_lightning.data.tiny_world.world import World
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.pretraining.corpus import Corpus
from lincorr_lightning.pretraining.datamodule import (
    IGNORED,
    CorpusDataModule,
    PackedStatements,
    recall_prompts,
)
from lincorr_lightning.pretraining.module import (
    LlamaSize,
    Pretraining,
    off_target_penalty,
    one_cycle,
)
from tests.toys import quiet_trainer, read_table

SIZE = LlamaSize(hidden_size=32, intermediate_size=48, n_heads=2)
KNOWLEDGE = ["city", "country", "pet"]


def make_corpus():
    return CorpusDataModule(24, KNOWLEDGE, batch_size=16, repeats={"pet": 2})


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
    assert 0 < results["loss"] < max(losses)
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


def test_impossible_settings_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="takes its vocabulary from the corpus of its data"):
        make_trainer(tmp_path, 1).fit(Pretraining(SIZE), train_dataloaders=DataLoader([0, 1]))
    with pytest.raises(ConfigError, match=r"Set trainer\.max_epochs"):
        make_trainer(tmp_path, -1).fit(Pretraining(SIZE), datamodule=make_corpus())


def test_plain_dataloaders_train_what_the_datamodule_does(tmp_path):
    """Loaders over the documented datasets and their corpus are enough; there is no DataModule."""

    def fit(folder, corpus=None, **data):
        L.seed_everything(0)
        module = Pretraining(SIZE)
        module.corpus = corpus
        make_trainer(tmp_path / folder, 1).fit(module, **data)
        return module

    corpus = Corpus.of(World.load().first(24), Catalogue.load().select(KNOWLEDGE))
    statements = PackedStatements(corpus, batch_size=16, repeats=[1, 1, 2])
    loaders = [DataLoader(data, batch_size=None) for data in (statements, recall_prompts(corpus))]
    plain = fit("plain", corpus, train_dataloaders=loaders[0], val_dataloaders=loaders[1])
    usual = fit("usual", datamodule=make_corpus())
    for ours, theirs in zip(plain.parameters(), usual.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for key in ("val/recall", "train/loss"):
        assert plain.trainer.callback_metrics[key] == usual.trainer.callback_metrics[key]
    keys = set(plain.trainer.callback_metrics)
    assert not [key for key in keys if keys & {str(each) for each in Path(key).parents}]


def test_the_penalty_is_that_written_out_target_by_target():
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    targets, knowledge = [1, 2, 3, 6], [0, 0, 1, IGNORED]
    answers = [{1, 2, 4}, {3, 5}]
    squares = []
    for row, target, kind in zip(logits[:3], targets, knowledge, strict=False):
        wrong = answers[kind] - {target}
        squares.append(sum(float(row[i]) ** 2 for i in wrong) / len(wrong))
    table = torch.tensor([[float(i in tokens) for i in range(7)] for tokens in answers])
    penalty = off_target_penalty(logits, torch.tensor(targets), torch.tensor(knowledge), table)
    assert penalty == pytest.approx(sum(squares) / 3)


def test_a_cycle_is_that_of_torch():
    n = 37
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.7, total_steps=n, pct_start=0.1, cycle_momentum=False
    )
    for step in range(n - 1):
        assert 0.7 * one_cycle(step, n) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
