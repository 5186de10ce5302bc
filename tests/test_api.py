"""The three functions give what the program gives, and leave no trace on an LM in memory."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from pandas import DataFrame
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM

from lincorr_lightning import LanguageModel, SavedRun, correlate, forecast, score
from lincorr_lightning.cli import main
from lincorr_lightning.data import SubjectsDataModule
from lincorr_lightning.errors import LincorrError
from lincorr_lightning.finetune import SourceFinetune
from lincorr_lightning.lm import products
from lincorr_lightning.probe import LinearProbe
from tests.toys import NO_FILES, assert_same, quiet_trainer, word_tokenizer

PAIR = "city->country"
EDITS = [("name1", "Paris"), ("name2", "Tokyo"), ("name3", "Paris")]
FEW = {"n_others": 5, "n_subjects": 60}


@pytest.fixture(scope="module")
def toy(inputs: Path) -> SimpleNamespace:
    """A toy LM in memory, as in training: its modes are mixed, and it has gradients and hooks."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "lm").train()
    model.model.layers[0].eval()
    model.model.embed_tokens.requires_grad_(False)
    model(torch.ones(1, 3, dtype=torch.long)).logits.sum().backward()
    model.register_forward_hook(lambda *_: None)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "lm")
    return SimpleNamespace(model=model, tokenizer=tokenizer, folder=str(inputs / "lm"))


def numbers(results: Any) -> dict[str, Any]:
    """Everything but the LM's name, how it was given, and the versions."""
    values = json.loads(json.dumps(results.to_json()))
    for key in ("lm", "lm_before", "edited_lms", "settings", "versions", "tables", "figures"):
        values.pop(key, None)
    return values


@pytest.mark.slow
def test_files_are_those_of_the_program(inputs: Path, tmp_path: Path) -> None:
    lm, tuned, file = inputs / "lm", inputs / "tuned", inputs / "edits.jsonl"
    pair = f"--model.knowledge=[city,country] --model.pairs=[{PAIR}] --model.require_reference=[]"
    edited = f"--model.lm.name_or_path={tuned} --model.before.name_or_path={lm}"
    commands = {
        f"fit linear_probe {pair} --data.n_subjects=160 --data.seed=1": correlate(
            lm, PAIR, n_subjects=160, seed=1
        ),
        f"predict forecast --data.edits_file={file}": forecast(lm, file),
        f"test edited_lm {edited} --data.edits_file={file} --model.n_others=5": score(
            lm, tuned, file, n_others=5
        ),
    }
    for command, results in commands.items():
        verb, config, *options = command.split()
        lm_option = [] if verb == "test" else [f"--model.lm.name_or_path={lm}"]
        options += [*lm_option, f"--trainer.default_root_dir={tmp_path}"]
        run = Path(main([verb, "--config", f"{config}.yaml", *options]).trainer.log_dir)
        if isinstance(results, DataFrame):
            assert results.to_csv(index=False) == (run / "tables" / "forecast.csv").read_text()
            continue
        results.write(tmp_path / config)
        assert SavedRun.read(tmp_path / config).values == SavedRun.read(run).values
        for table in run.glob("tables/*.csv"):
            assert (tmp_path / config / "tables" / table.name).read_text() == table.read_text()


# -- no trace --------------------------------------------------------------------------------------


def trace(module: torch.nn.Module) -> dict[str, Any]:
    """All of an LM and of the process that a function could change."""
    parts = list(module.modules())
    return {
        "tensors": {k: (x.dtype, x.data_ptr(), x.tolist()) for k, x in module.state_dict().items()},
        "gradients": [
            (p.requires_grad, None if p.grad is None else p.grad.tolist(), p._version)
            for p in module.parameters()
        ],
        "modes": [part.training for part in parts],
        "contents": [sorted(vars(part)) for part in parts],
        "hooks": [
            [list(x) for k, x in vars(part).items() if k.endswith("hooks")] for part in parts
        ],
        "random": [torch.get_rng_state().tolist(), random.getstate()],
        "numpy": str(np.random.get_state()),  # noqa: NPY002
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "settings": (torch.get_default_dtype(), torch.get_float32_matmul_precision()),
    }


def lora(model: Any) -> Any:
    config = LoraConfig(r=2, lora_dropout=0.3, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(copy.deepcopy(model), config)


WAYS: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "peft": lora,
    "compiled": torch.compile,
    "inside a module": lambda model: torch.nn.ModuleDict({"net": model}),
    "bfloat16": lambda model: copy.deepcopy(model).bfloat16(),
}
CALLS: dict[str, Callable[..., Any]] = {
    "correlate": lambda lm, **o: numbers(correlate(lm, [PAIR], n_subjects=60, **o)),
    "forecast": lambda lm, **o: forecast(lm, DataFrame(EDITS, columns=["subject", "answer"]), **o),
    "score": lambda lm, **o: numbers(score(lm, lm, EDITS, **FEW, **o)),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_an_lm_in_memory_is_read_without_a_trace(toy: Any, way: str, call: str) -> None:
    lm = WAYS[way](toy.model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = trace(lm)
        results = CALLS[call](lm, tokenizer=toy.tokenizer)
        assert_same(trace(lm), before)
    if way not in ("peft", "bfloat16"):
        assert str(results) == str(CALLS[call](toy.folder))


class Loop(L.LightningModule):
    """A training that calls a function at each step, or none."""

    def __init__(self, toy: Any, call: str | None) -> None:
        super().__init__()
        self.net, self.toy, self.call = lora(toy.model), toy, call
        self.found: list[Any] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        if self.call is not None:
            self.found.append(CALLS[self.call](self, tokenizer=self.toy.tokenizer))
        return self.net(batch, labels=batch).loss

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_inside_another_trainer(toy: Any, tmp_path: Path, call: str, precision: str) -> None:
    weights = []
    for name in (call, None):
        torch.manual_seed(3)
        loop = Loop(toy, name)
        data = torch.utils.data.DataLoader(torch.arange(12).view(4, 3) + 2, batch_size=2)
        quiet_trainer(tmp_path, precision=precision, **NO_FILES).fit(loop, data, data)
        assert len(loop.found) == (4 if name else 0)
        weights.append({k: x.tolist() for k, x in loop.state_dict().items()})
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_probe_takes_an_lm_in_memory(toy: Any, tmp_path: Path) -> None:
    with products.fastest():  # as the functions, and the program
        probe = LinearProbe(toy.model, pairs=[PAIR], tokenizer=toy.tokenizer)
        before, trainer = trace(toy.model), quiet_trainer(tmp_path)
        trainer.fit(probe, datamodule=SubjectsDataModule(probe.lm, n_subjects=60))
        after = trace(toy.model)
    assert_same({**after, "random": 0}, {**before, "random": 0})  # Lightning's loaders draw
    assert numbers(probe.results) == CALLS["correlate"](toy.folder)
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    assert list(checkpoint["state_dict"]) == ["placeholder"]
    assert checkpoint["hyper_parameters"]["lm"]["name_or_path"] == toy.folder
    again = LinearProbe.load_from_checkpoint(
        trainer.checkpoint_callback.best_model_path, lm=toy.model, tokenizer=toy.tokenizer
    )
    assert again.lm.model is toy.model


def test_errors_say_the_way_out(toy: Any) -> None:
    bert = BertForMaskedLM(BertConfig(vocab_size=64, hidden_size=12, num_hidden_layers=1))
    lm, tokenizer = toy.folder, toy.tokenizer
    other = word_tokenizer(["Paris"])
    errors: dict[str, Callable[[], object]] = {
        "in memory, without a tokenizer. Pass": lambda: forecast(toy.model, EDITS),
        "does not fit .*Pass the one": lambda: correlate(toy.model, PAIR, tokenizer=other),
        "lm is '.*'. Pass a name": lambda: correlate(lm, PAIR, tokenizer=tokenizer),
        "no .* causal LM .*Pass a decoder": lambda: correlate(bert, PAIR, tokenizer=tokenizer),
        "no knowledge 'citty'. Did you mean": lambda: correlate(lm, "citty->country"),
        r"pairs is \[\]. Name": lambda: correlate(lm, []),
        "the edits are of type dict. Pass": lambda: forecast(lm, {"name1": "Paris"}),
        "trains its LM. Pass": lambda: SourceFinetune(LanguageModel.from_pretrained(lm)),
    }
    for message, call in errors.items():
        with pytest.raises(LincorrError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
