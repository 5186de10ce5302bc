"""The source fine-tune: what is trained, written and refused."""

import json
import math

import lightning as L
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import log_softmax
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lincorr_lightning.callbacks import Generalization, GradientCorrelation
from lincorr_lightning.errors import ConfigError, NonFiniteError
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.batches import EditTraining, answer_losses, edit_batch
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.module import SourceFinetune
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from tests.toys import by_reference, read_table

NUMBERS = (
    "source_learned generalized hallucinated unchanged random constant gradient_correlation "
    "logit_correlation"
).split()


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_bits(ours, theirs):
    assert set(ours) == set(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# -- independent edits -------------------------------------------------------------------------


def taught_by_hand(folder, subject, answer, targets, n_steps, learning_rate):
    """Fine-tune a fresh LM on one edit, token by token; its target logits and losses."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    prompt = tokenizer(f"{subject} lives in the city of")["input_ids"]
    right = tokenizer(answer)["input_ids"]
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = 0.0
        for i, token in enumerate(right):
            logits = model(torch.tensor([prompt + right[:i]])).logits[0, -1]
            loss = loss - log_softmax(logits, 0)[token] / len(right)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ids = tokenizer(f"{subject} lives in the country of", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(ids).logits[0, -1, targets], losses


def test_each_independent_edit_is_a_fine_tune_of_its_own(finetune, small_lm):
    run = finetune({"n_edits": 3}, method="full", measured=False)
    targets = run.relation.target.token_ids
    losses = []
    for edit, logits in zip(run.edits, run.logits, strict=True):
        expected, own = taught_by_hand(small_lm, edit.subject, edit.answer, targets, 3, 3e-3)
        torch.testing.assert_close(logits, expected.double(), atol=1e-3, rtol=1e-3)
        losses += own
    assert run.losses == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_independent_edits_leave_the_weights_as_they_were(finetune, small_lm, method):
    rate = 3e-3 if method == "full" else 3e-2
    run = finetune(method=method, edits_per_step=2, learning_rate=rate, steps_per_edit=8)
    before = AutoModelForCausalLM.from_pretrained(small_lm, dtype=torch.float32)
    assert_bits(weights(run.module.lm.model), weights(before))
    assert run.results["source_learned"] > 0


def test_dropout_is_left_out(tmp_path, finetune, make_lm):
    """It would make edits depend on those before."""
    lm = str(make_lm(tmp_path / "gpt2", architecture="gpt2", resid_pdrop=0.1, embd_pdrop=0.1))
    for method in ("full", "lora"):
        options = {"lm": lm, "method": method, "measured": False}
        first, second = (finetune({"n_edits": 3}, **options) for _ in range(2))
        assert torch.equal(first.logits, second.logits)


# -- the loss ----------------------------------------------------------------------------------


def test_the_loss_is_taken_on_the_answers_alone(small_lm):
    model = AutoModelForCausalLM.from_pretrained(small_lm, dtype=torch.float32)
    rows = [([5, 6, 7, 8], [9]), ([10, 11], [12, 13, 14]), ([15, 16, 17], [])]
    expected = []
    for prompt, answer in rows:
        losses = [0.0]
        for j, token in enumerate(answer):
            logits = model(torch.tensor([prompt + answer[:j]])).logits[0, -1]
            losses.append(-log_softmax(logits, 0)[token].item())
        expected.append(sum(losses) / max(len(answer), 1))
    edits = [Edit("Anna", "Paris", tuple(answer), 0, (0,), 0, 0) for _, answer in rows]
    batch = edit_batch(edits, range(3), [prompt for prompt, _ in rows])
    assert answer_losses(model, batch).tolist() == pytest.approx(expected, abs=1e-4)
    batch.labels[:] = -100
    assert answer_losses(model, batch).tolist() == [0.0, 0.0, 0.0]


# -- joint edits -------------------------------------------------------------------------------


def test_the_loss_of_joint_edits_is_their_mean(finetune, small_lm):
    run = finetune({"n_edits": 4}, protocol="joint", edits_per_step=4)
    targets = run.relation.target.token_ids
    alone = [
        taught_by_hand(small_lm, edit.subject, edit.answer, targets, 1, 1e-3)[1][0]
        for edit in run.edits
    ]
    assert run.losses == [pytest.approx(sum(alone) / 4, rel=1e-5)]
    longer = finetune({"n_edits": 8}, {"max_epochs": 12}, protocol="joint", learning_rate=1e-2)
    assert (longer.results["source_learned"], longer.results["n_steps"]) == (1.0, 12)


def test_accumulated_gradients_are_those_of_the_larger_batch(finetune):
    joint = {"protocol": "joint", "measured": False}
    large = finetune({"n_edits": 8}, {"max_epochs": 2}, edits_per_step=8, **joint)
    options = {"max_epochs": 2, "accumulate_grad_batches": 4}
    small = finetune({"n_edits": 8}, options, edits_per_step=2, **joint)
    assert large.results["n_steps"] == small.results["n_steps"] == 2
    ours, theirs = weights(large.module.lm.model), weights(small.module.lm.model)
    # Adam takes a gradient's sign: where that is all but zero, rounding decides.
    for name in ours:
        close = torch.isclose(ours[name], theirs[name], atol=1e-5, rtol=1e-4)
        assert close.double().mean() > 0.99, name


# -- what is written ---------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["independent", "joint"])
def test_results_are_those_of_the_contract(finetune, protocol):
    run = finetune(
        {"n_edits": 6},
        {"callbacks": [GradientCorrelation("city->color")]},
        protocol=protocol,
    )
    results = run.results
    assert (results["study"], results["relation"]) == ("source_finetune", "city->country")
    assert results["settings"]["data"]["n_edits"] == results["n_edits"] == 6
    assert all(isinstance(results[name], float) for name in NUMBERS)
    by_hand = by_reference(read_table(run.folder / "tables" / "cases.csv"))
    assert results["constant"] == pytest.approx(by_hand["constant"])
    assert results["macro"] == pytest.approx(by_hand["macro"])
    (shown,) = read_table(run.folder / "tables" / "summary.csv")
    logged = run.trainer.callback_metrics
    assert float(logged["generalization/constant"]) == pytest.approx(by_hand["constant"])
    assert float(shown["macro_generalized"]) == pytest.approx(by_hand["macro"]["generalized"])
    for name, share in by_hand["macro"].items():
        assert float(logged[f"generalization/macro_{name}"]) == pytest.approx(share)
    assert set(results["controls"]["color"]) == {"unchanged"}
    assert set(results["forecast"]) == {results["forecast_default"]} == {"causal_inner_product"}
    assert set(results["gradients"]) == {"city->country", "city->color"}
    own = results["gradients"]["city->country"]
    assert results["gradient_correlation"] == own["gradient_correlation"]

    def table(name):
        return pd.read_csv(run.folder / "tables" / name).to_dict("records")

    edits, cases = (table(f"{name}.csv") for name in ("edits", "cases"))
    assert len(edits) == len(cases) == 6
    for edit, case in zip(edits, cases, strict=True):
        assert edit["subject"] == case["subject"]
        assert edit["answer"] == case["source_answer"]
        assert edit["reference"] == case["reference"]
        assert edit["target_before"] == case["answer_before"]
    figures = {path.stem for path in (run.folder / "figures").glob("*.png")}
    assert figures >= {"training", "outcomes", "reference_weights"}


def test_a_run_that_is_cut_short_counts_what_it_trained(finetune):
    run = finetune({"n_edits": 6}, {"max_steps": 6}, steps_per_edit=3)
    assert run.results["n_edits"] == 2


@pytest.mark.parametrize("protocol", ["joint", "independent"])
def test_a_plain_loader_of_edit_batches_trains_the_same(
    finetune, small_lm, make_trainer, tmp_path, protocol
):
    """A list of batches that somebody made by hand, in a torch DataLoader."""
    expected = finetune({"n_edits": 4}, protocol=protocol, edits_per_step=2, measured=False)
    steps = expected.trainer.train_dataloader.dataset
    batches = [steps[i] for i in range(len(steps))]
    module = SourceFinetune(
        LMConfig(small_lm), protocol, edits_per_step=2, steps_per_edit=3, learning_rate=3e-3
    )
    losses = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(float(outputs["loss"]))

    edits = [{"subject": edit.subject, "answer": edit.answer} for edit in steps.edits]
    # Independent edits are measured from an EditDataset only.
    counts = [Generalization("city->country", edits)] if protocol == "joint" else []
    trainer = make_trainer(callbacks=[Losses(), *counts])
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert losses == expected.losses
    assert_bits(weights(module.lm.model), weights(expected.module.lm.model))
    paths = sorted((tmp_path / "source_finetune").glob("*/results.json"))
    results = json.loads(paths[-1].read_text())
    assert (results["n_edits"], results["protocol"]) == (4, protocol)
    assert results["relation"] == ("city->country" if counts else None)
    assert (results["generalized"] is None) == (not counts)


# -- what goes wrong ---------------------------------------------------------------------------


class Spoil(L.Callback):
    """Breaks the third update, or the weights before it."""

    def __init__(self, what):
        self.what = what

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2 and self.what == "loss":
            with torch.no_grad():
                for parameter in (p for p in pl_module.parameters() if p.requires_grad):
                    parameter[:] = torch.nan

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 2 and self.what == "update":
            for parameter in (p for p in pl_module.parameters() if p.grad is not None):
                parameter.grad[-1:] = torch.nan  # of stacked adapters, the last edit's


class Gradients(L.Callback):
    """Counts the gradients that are held before an update, and after a step."""

    def __init__(self):
        self.n_before, self.n_after = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.n_before.append(sum(p.grad is not None for p in pl_module.parameters()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.n_after.append(sum(p.grad is not None for p in pl_module.parameters()))


def test_gradients_take_no_memory_after_their_step(small_lm, make_trainer):
    module = SourceFinetune(LMConfig(small_lm), method="lora", edits_per_step=2, steps_per_edit=3)
    data = EditsDataModule(module.lm, training=module.edit_training, n_edits=2)
    seen = Gradients()
    make_trainer(callbacks=[seen]).fit(module, data)
    assert len(seen.n_before) == 3 and min(seen.n_before) > 0 and seen.n_after == [0, 0, 0]


@pytest.mark.parametrize("what", ["loss", "update"])
@pytest.mark.parametrize(("protocol", "method"), [("joint", "full"), ("independent", "lora")])
def test_a_run_with_a_loss_that_is_not_finite_stops_and_says_where(
    small_lm, make_trainer, tmp_path, what, protocol, method
):
    module = SourceFinetune(
        LMConfig(small_lm), protocol, method, edits_per_step=2, steps_per_edit=3
    )
    data = EditsDataModule(module.lm, training=module.edit_training, n_edits=8)
    kept = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    trainer = make_trainer(enable_checkpointing=True, callbacks=[Spoil(what), kept])
    with pytest.raises(NonFiniteError, match="at the edit") as error:
        trainer.fit(module, data)
    # The third step is the third batch of joint edits, and still the first independent edit(s).
    steps = data.train_dataloader().dataset
    *others, edit = steps[2 if protocol == "joint" else 0].edits
    assert f"{edit.subject!r} -> {edit.answer!r}" in str(error.value)
    if (method, what) == ("lora", "update"):
        assert not any(repr(other.subject) in str(error.value) for other in others)
    causes = {"loss": "the loss is NaN", "update": "after the update a weight is NaN"}
    assert str(error.value).startswith(causes[what])
    (checkpoint,) = tmp_path.glob("*.ckpt")
    stored = torch.load(checkpoint, weights_only=True)
    assert stored["global_step"] == 2
    assert all(bool(value.isfinite().all()) for value in stored["state_dict"].values())
    assert not list(tmp_path.rglob("results.json"))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (EditTraining, {"n_steps": 0}, "model.steps_per_edit is 0"),
        (SourceFinetune, {"learning_rate": math.nan}, "model.learning_rate is nan"),
        (SourceFinetune, {"protocol": "both"}, "model.protocol is 'both'"),
        (SourceFinetune, {"save_model": True}, "independent edits leave the LM as it was"),
        (AdapterSettings, {"rank": 0}, "model.adapter.rank is 0"),
        (AdapterSettings, {"target_modules": []}, "target_modules is empty; null takes all"),
    ],
)
def test_unusable_settings_are_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


@pytest.mark.parametrize("protocol", ["joint", "independent"])
def test_adapters_of_an_lm_in_half_precision_are_in_float32(finetune, protocol):
    run = finetune(dtype="bfloat16", protocol=protocol, method="lora")
    trained = [p for p in run.module.parameters() if p.requires_grad]
    frozen = {p.dtype for p in run.module.lm.model.parameters() if not p.requires_grad}
    assert {p.dtype for p in trained} == {torch.float32} and frozen == {torch.bfloat16}
    assert run.results["gradient_correlation"] is not None


def test_runs_that_cannot_work_are_refused(small_lm, make_trainer, tmp_path):
    half = LanguageModel.from_pretrained(small_lm, dtype="bfloat16")
    half.model.save_pretrained(tmp_path / "half")
    half.tokenizer.save_pretrained(tmp_path / "half")

    def refused(message, data=None, training=None, trainer=None, **options):
        lm = LMConfig(options.pop("lm", small_lm), dtype=options.pop("dtype", "float32"))
        module = SourceFinetune(lm, **options)
        made = EditsDataModule(module.lm, n_edits=3, training=training or module.edit_training)
        with pytest.raises(ConfigError, match=message):
            make_trainer(**trainer or {}).fit(module, data or made)
        return module

    module = refused(
        r"accumulate_grad_batches is 2.*set model\.steps_per_edit",
        trainer={"accumulate_grad_batches": 2},
    )
    assert not module.lm.is_loaded
    refused("1 independent edits, and not on Tensor", DataLoader([torch.zeros(1)]))
    refused("1 independent edits, and not on EditBatch", training=EditTraining(protocol="joint"))
    refused("1 independent edits", training=EditTraining(edits_per_step=3))
    refused("bf16-true.*bf16-mixed", trainer={"precision": "bf16-true"}, method="lora")
    clipped = {"gradient_clip_val": 0.1}  # of edits that are trained side by side
    refused("gradient_clip_val must be null", trainer=clipped, method="lora")
    refused("weights are in float16", dtype="float16")
    refused("weights are in bfloat16", lm=str(tmp_path / "half"), dtype="auto")
