"""A repair on the small LM, against separate fine-tunes, merged weights and plain transformers."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from scipy.stats import ttest_rel
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lincorr_lightning.errors import ConfigError, NonFiniteError, SubjectsError
from lincorr_lightning.finetune import EditsDataModule, Repair, RepairDataModule
from lincorr_lightning.finetune.repair.results import (
    hallucinated_interval,
    repair_results,
    summarize_cases,
)
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.results import Results
from tests.finetune.repair.test_datamodule import SMALL
from tests.toys import by_reference

EDITS = {
    "edit_learning_rate": 3e-3, "steps_per_edit": 3, "preserve_weight": 1.0, "text_weight": 1.0,
}  # fmt: skip


@pytest.fixture
def repair(small_lm: str, make_trainer: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Repair the small LM; return the run."""

    def run(
        data: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **model: Any
    ) -> SimpleNamespace:
        module = Repair(LMConfig(small_lm, dtype="float32"), **EDITS | model)
        loaders = RepairDataModule(module.lm, **SMALL | (data or {}))
        options = {"num_sanity_val_steps": -1, "max_epochs": 1} | (trainer or {})
        ckpt_path = options.pop("ckpt_path", None)
        made = make_trainer(**options)
        made.fit(module, loaders, ckpt_path=ckpt_path)
        files = sorted(tmp_path.glob("repair/*/results.json"), key=lambda f: f.stat().st_mtime)
        results = json.loads(files[-1].read_text(), parse_constant=pytest.fail) if files else {}
        return SimpleNamespace(
            module=module, data=loaders, results=results, trainer=made,
            folder=files[-1].parent if files else None,
        )  # fmt: skip

    return run


@pytest.mark.parametrize(("examples", "method"), [("edits", "lora"), ("statements", "full")])
def test_a_run_writes_the_public_contract(repair, examples, method):
    run = repair({"examples": examples}, method=method)
    results = run.results
    assert results["study"] == "repair"
    for part in ("shown", "held_out"):
        for stage in ("before", "after"):
            one = results[part][stage]
            assert (one["n"], one["controls"]) == (4, {})
            assert 0 <= one["source_learned"] <= 1
    assert results["n_steps"] == 2
    assert (run.folder / "figures" / "repair.png").read_bytes().startswith(b"\x89PNG")
    tables = run.folder / "tables"
    answers = pd.read_csv(tables / "answers.csv", index_col="answer")["part"]
    cases = pd.read_csv(tables / "cases.csv")
    assert (cases["source_answer"].map(answers) == cases["part"]).all()
    assert {answers[edit.answer] for edit in run.data.examples} == {"shown"}
    logged = run.trainer.callback_metrics
    assert float(logged["val/shown/hallucinated"]) == results["shown"]["after"]["hallucinated"]
    for (part, stage), rows in cases.groupby(["part", "stage"]):
        expected = by_reference(rows.to_dict("records"))
        one = results[part][stage]
        assert one["constant"] == pytest.approx(expected["constant"])
        assert one["macro"] == pytest.approx(expected["macro"])
        if stage == "after":
            share = float(logged[f"val/{part}/macro_generalized"])
            assert share == pytest.approx(expected["macro"]["generalized"])


def test_before_are_the_outcomes_of_a_fine_tune_of_the_same_edits(repair, finetune, tmp_path):
    run = repair({"preserve": [], "controls": ["color"]})
    for part in ("shown", "held_out"):
        edits = run.data.measured[part]
        file = tmp_path / f"{part}.jsonl"
        rows = ({"subject": edit.subject, "answer": edit.answer} for edit in edits)
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        theirs = finetune(
            {"edits_file": str(file), "n_edits": None}, method="lora", edits_per_step=4,
        ).results  # fmt: skip
        ours = run.results[part]["before"]
        for name in ("source_learned", "generalized", "hallucinated", "unchanged", "random"):
            assert ours[name] == pytest.approx(theirs[name]), name
        assert ours["controls"]["color"] == theirs["controls"]["color"]["unchanged"]


@pytest.mark.parametrize("teacher", ["reference", "in_context"])
def test_the_loss_of_edits_is_that_of_their_merged_adapters(repair, small_lm, monkeypatch, teacher):
    """Each adapter is merged into a copy of the LM, which transformers then reads alone."""
    run = repair(learning_rate=0.0, teacher=teacher)
    before_edit = AutoModelForCausalLM.from_pretrained(small_lm, dtype=torch.float32)
    module, batch = run.module, run.data.train_dataloader().dataset[0]
    relation, names = run.data.tokenized, [edit.subject for edit in batch.edits.edits]
    monkeypatch.setattr(module, "log", lambda *args, **options: None)  # outside of a run
    loss = float(module._edit_loss(batch))
    adapters, changes = module.edit_adapters, []
    target_losses = []
    for i, (edit, name) in enumerate(zip(batch.edits.edits, names, strict=True)):
        plain = AutoModelForCausalLM.from_pretrained(small_lm, dtype=torch.float32)
        for layer in adapters.targets:
            key = layer.replace(".", "/")
            product = adapters.lora_B[key][i] @ adapters.lora_A[key][i]
            plain.get_submodule(layer).weight.data += adapters.scaling * product
        with torch.no_grad():
            ids = module.lm.tokenizer(relation.target_prompts([name]), return_tensors="pt")
            logits = plain(**ids).logits[0, -1, relation.target.token_ids].double()
            colors = run.data._domains["color"]
            ids = module.lm.tokenizer([colors.knowledge.prompt(name)], return_tensors="pt")
            after = plain(**ids).logits[0, -1, colors.token_ids].double().softmax(0)
            text = (f"{name} lives in the city of {edit.answer}. "
                    f"{name} lives in the country of")  # fmt: skip
            ids = module.lm.tokenizer([text], return_tensors="pt")
            said = before_edit(**ids).logits[0, -1, relation.target.token_ids].double().softmax(0)
        taught = float(logits.softmax(0)[list(edit.reference)].sum())
        divergence = float((said * (said / logits.softmax(0)).log()).sum())
        target_losses.append(-math.log(taught) if teacher == "reference" else divergence)
        before = batch.before["color"][i].softmax(0)
        changes.append(float((before * (before / after).log()).sum()))
    n = len(names)
    assert loss == pytest.approx(sum(target_losses) / n + sum(changes) / n, rel=1e-4)


def test_what_an_edit_does_not_change_stays(repair, small_lm, monkeypatch):
    """The KL divergence of cities and countries without an edit, from the LM before."""
    run = repair({"preserve": []}, learning_rate=1e-2, save_model=True)
    batch, relation = run.data.train_dataloader().dataset[0], run.data.tokenized
    logged: dict[str, float] = {}
    monkeypatch.setattr(run.module, "log", lambda name, x, **_: logged.update({name: float(x)}))
    loss = run.module._edit_loss(batch)
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (small_lm, run.folder / "model")
    )
    changes = []
    for edit in batch.edits.edits:
        for domain in (relation.source, relation.target):
            prompt = domain.knowledge.prompt(edit.subject)
            ids = run.module.lm.tokenizer([prompt], return_tensors="pt")
            with torch.no_grad():
                p, q = (
                    lm(**ids).logits[0, -1, domain.token_ids].double().softmax(0)
                    for lm in (before, after)
                )
            changes.append(float((p * (p / q).log()).sum()))
    found = logged["train/unedited_kl"]
    assert found == pytest.approx(sum(changes) / len(changes), rel=1e-3)
    assert found > 1e-4
    assert float(loss.detach()) == pytest.approx(logged["train/target_loss"] + found)
    logged.clear()
    run.module.preserve_unedited = False
    run.module._edit_loss(batch)
    assert set(logged) == {"train/target_loss"}


def test_a_repair_makes_shown_edits_generalize(repair):
    run = repair(
        {"n_examples": 32, "batch_size": 16, "held_out": 0.9, "n_edits": 8, "preserve": []},
        {"max_epochs": 20, "check_val_every_n_epoch": 20}, learning_rate=1e-2,
    )  # fmt: skip
    before, after = (run.results["shown"][stage] for stage in ("before", "after"))
    assert after["generalized"] > before["generalized"] + 0.3


def test_nothing_changes_without_a_learning_rate(repair, small_lm):
    """The perplexity is that of transformers."""
    run = repair(learning_rate=0.0)
    assert run.module.cases["before"] == run.module.cases["after"]
    assert run.results["perplexity"]["before"] == run.results["perplexity"]["after"]
    plain = AutoModelForCausalLM.from_pretrained(small_lm, dtype=torch.float32)
    losses = []
    for batch in run.data.val_dataloader():
        if not hasattr(batch, "tokens"):
            continue
        with torch.no_grad():  # this tokenizer has no special tokens
            logits = plain(batch.tokens).logits[:, :-1].flatten(0, 1)
        losses += cross_entropy(logits, batch.tokens[:, 1:].flatten(), reduction="none").tolist()
    expected = math.exp(sum(losses) / len(losses))
    assert run.results["perplexity"]["before"] == pytest.approx(expected, rel=1e-4)


def test_subjects_of_a_repair_are_not_edited_afterwards(repair, tmp_path):
    run = repair({"n_examples": 40}, save_model=True)
    examples = [edit.subject for edit in run.data.examples]
    plain = EditsDataModule(run.module.lm, n_edits=100).prepare_edits()
    assert {edit.subject for edit in plain} & set(examples)  # the same vocabulary and seed
    lm = LanguageModel.from_pretrained(str(run.folder / "model"))
    assert lm.model.config.repaired_subjects == sorted(examples)
    sampled = EditsDataModule(lm, n_edits=100).prepare_edits()
    assert len(sampled) == 100
    assert not {edit.subject for edit in sampled} & set(examples)
    free = next(edit for edit in plain if edit.subject not in examples)
    file = tmp_path / "edits.jsonl"
    rows = [{"subject": x, "answer": free.answer} for x in (examples[0], free.subject)]
    file.write_text("\n".join(map(json.dumps, rows)))
    for named in ({"subjects": [examples[0], free.subject]}, {"edits_file": str(file)}):
        with pytest.warns(UserWarning, match=f"1 of 2 .*{examples[0]}") as warned:
            (kept,) = EditsDataModule(lm, n_edits=2, **named).prepare_edits()
        assert kept.subject == free.subject
        assert re.search(r"examples? of the LM's repair", str(warned[0].message))
    file.write_text(json.dumps(rows[0]))
    with pytest.raises(SubjectsError, match="1: the subject was an example of the LM's repair"):
        EditsDataModule(lm, edits_file=str(file)).prepare_edits()
    again = RepairDataModule(lm, **SMALL)
    again.prepare_edits()
    measured = (edit for edits in again.measured.values() for edit in edits)
    assert not {edit.subject for edit in (*again.examples, *measured)} & set(examples)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(repair, tmp_path):
    epochs = {"max_epochs": 2, "check_val_every_n_epoch": 2}
    whole = repair(trainer=epochs)
    half = repair(trainer={"max_epochs": 1})
    file = tmp_path / "half.ckpt"
    half.trainer.save_checkpoint(file)
    resumed = repair(trainer={**epochs, "ckpt_path": str(file)})
    assert resumed.module.cases == whole.module.cases
    for name, weight in whole.module.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(resumed.module.get_parameter(name), weight)


def test_settings_that_cannot_work_are_refused(repair, small_lm, make_trainer):
    every_three = {"max_epochs": 5, "check_val_every_n_epoch": 3}
    for wrong in ({"num_sanity_val_steps": 0}, every_three, {"max_steps": 1}):
        with pytest.raises(ConfigError, match=r"Set trainer\.num_sanity_val_steps and"):
            repair(trainer=wrong)
    stop = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", True)
    )
    with pytest.raises(ConfigError, match="ended without a validation"):
        two = {"max_epochs": 2, "check_val_every_n_epoch": 2}
        repair(trainer={**two, "callbacks": [stop]})
    with pytest.raises(ConfigError, match=r"a batch has 5 edits, but at most 4"):
        repair(edits_per_step=4)
    with pytest.raises(ConfigError, match=r"model\.text_weight"):
        Repair(text_weight=-1.0)
    with pytest.raises(ConfigError, match=r"in_context needs data\.examples edits, not source"):
        repair({"examples": "source"}, teacher="in_context")
    loaders = RepairDataModule(LanguageModel.from_pretrained(small_lm), **SMALL,
                               examples="statements")  # fmt: skip
    step = Repair(teacher="in_context").training_step
    with pytest.raises(ConfigError, match="takes batches of RepairBatch, not StatementBatch"):
        step(loaders.train_dataloader().dataset[0], 0)
    with pytest.raises(ConfigError, match=r"model\.teacher is 'city'"):
        Repair(teacher="city")
    module = Repair(LMConfig(small_lm, dtype="float32"))
    with pytest.raises(
        ConfigError, match="takes batches of RepairBatch or StatementBatch, not dict"
    ):
        trainer = make_trainer(num_sanity_val_steps=-1, max_epochs=1)
        trainer.fit(module, DataLoader([{"x": torch.zeros(1)}], batch_size=None))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_change_of_texts_is_that_from_the_lm_before(repair, small_lm, monkeypatch, method):
    run = repair(method=method, learning_rate=1e-2, save_model=True, text_weight=2.0)
    texts = run.data.train_dataloader().dataset[0].texts
    monkeypatch.setattr(run.module, "log", lambda *args, **options: None)  # outside of a run
    found = float(run.module._text_loss(texts))
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (small_lm, run.folder / "model")
    )
    changes = []
    for row in texts:
        ids = torch.tensor([[*run.module.lm.prefix, *row.tolist()]])
        with torch.no_grad():
            p, q = (lm(ids).logits[0].double().softmax(1) for lm in (before, after))
        changes += (p * (p / q).log()).sum(1).tolist()
    assert found == pytest.approx(2 * sum(changes) / len(changes), rel=1e-3)  # of the saved LM
    assert found > 1e-3
    if method == "full":
        next(run.module.lm.model.parameters()).data.fill_(torch.nan)
        with pytest.raises(NonFiniteError, match=r"Lower model\.learning_rate"):
            run.module.training_step(run.data.train_dataloader().dataset[0], 0)


def test_texts_that_leave_none_to_keep_are_refused(repair, tmp_path):
    file = tmp_path / "texts.txt"
    words = "city of country speaks language favorite color was born One day saw"
    file.write_text(f"{words}\nthe {words}\n")
    with pytest.raises(
        SubjectsError, match=r"data\.texts has 2 texts, and data\.n_texts takes all"
    ):
        repair({"texts": str(file)})
    run = repair({"texts": str(file), "n_preserved_texts": 1, "n_texts": 1})
    (kept,) = run.data.train_dataloader().dataset[0].texts.tolist()
    assert kept not in run.data._texts[0].tolist()


def test_cases_show_the_answers(repair):
    run = repair({"preserve": [], "controls": ["color"]})
    rows = pd.read_csv(run.folder / "tables" / "cases.csv").to_dict("records")
    assert len(rows) == 16
    texts = run.data.tokenized.target.texts
    edits = run.data.measured["held_out"] + run.data.measured["shown"]
    for row, edit in zip(rows[:8], edits, strict=True):
        assert row["stage"] == "before"
        assert row["reference"] == "|".join(texts[i].strip() for i in edit.reference)
        assert row["answer_before"] == texts[edit.target_before].strip()
        is_right = row["answer_after"] in row["reference"].split("|")
        assert is_right == (row["outcome"] == "generalized")
        targets = {label for example in run.data.examples for label in example.reference}
        assert row["target_shown"] == (not targets.isdisjoint(edit.reference))
    examples = pd.read_csv(run.folder / "tables" / "examples.csv")
    assert examples["subject"].tolist() == [edit.subject for edit in run.data.examples]
    assert run.results["example_references"] == examples["reference"].value_counts().to_dict()


def test_the_summary_says_whether_other_answers_are_helped():
    """Over references, each of which counts once, by scipy's paired t-test."""
    case = {
        "source_learned": True, "target_shown": True, "right_before": False, "in_context": False,
        "random": 0.1, "subject": "Ada", "source_answer": "Paris", "answer_before": "Italy",
        "answer_after": "Italy",
    }  # fmt: skip

    def verdict(**wrong: list[tuple[int, int]]) -> str:
        """Of each part: how many of ten edits of each reference hallucinate before and after."""

        def cases(stage: int) -> list[dict[str, Any]]:
            return [case | {"part": part, "reference": f"r{r}", "outcome": outcome}
                    for part, counts in wrong.items() for r, n in enumerate(counts)
                    for i in range(10)
                    for outcome in ["hallucinated" if i < n[stage] else "unchanged"]]  # fmt: skip

        stages = {"before": cases(0), "after": cases(1)}
        results = repair_results(stages, {}, n_steps=1, dataset=None)
        parts = {row[0] for row in results.tables[0].texts()}
        assert parts <= {"answers of the repair's examples", "other answers"}
        return results.tables[0].note.partition("\n")[0]

    better, worse = [(9, 2), (8, 1), (7, 1), (9, 3)], [(2, 9), (1, 8), (1, 7), (3, 9)]
    text = verdict(shown=better, held_out=worse)
    assert text.startswith("The repair harms other answers (hallucinated +65 points, 95 % ")
    expected = ttest_rel(*zip(*[(b / 10, a / 10) for a, b in worse], strict=True))
    low, high = (round(100 * end) for end in expected.confidence_interval())
    assert f"95 % {low:+d} to {high:+d}, over 4 references)" in text
    assert text.endswith("It helps those of its examples (95 %): see docs/repair.md.")
    # One reference of four is helped, and nothing can be said.
    text = verdict(shown=[(5, 5)] * 4, held_out=[(10, 0), (1, 1), (1, 2), (2, 1)])
    assert "does not help other answers" in text
    assert text.endswith("Nor does it help those of its examples (95 %): see docs/repair.md.")
    assert verdict(held_out=better).startswith("The repair helps other answers")


def test_summaries():
    case = {
        "part": "held_out", "outcome": "generalized", "source_learned": True, "target_shown": True,
        "right_before": False, "in_context": False, "random": 0.1, "reference": "France",
    }  # fmt: skip
    one = summarize_cases(
        [case, case | {"right_before": True},
         case | {"outcome": "hallucinated", "target_shown": False, "reference": "Italy|Peru"},
         case | {"outcome": "unchanged", "target_shown": False}]
    )["held_out"]  # fmt: skip
    assert (one["n"], one["generalized"], one["right_before"]) == (4, 0.5, 0.25)
    macro = {"generalized": pytest.approx(1 / 3), "hallucinated": 0.5}
    assert (one["constant"], one["macro"]) == (0.75, macro)
    assert one["new_targets"] == {
        "n": 2, "generalized": 0.0, "hallucinated": 0.5, "unchanged": 0.5,
    }  # fmt: skip
    # The bounds solve |p - x| = z sqrt(x (1 - x) / n).
    for x in hallucinated_interval(one):
        assert abs(0.25 - x) == pytest.approx(1.959964 * math.sqrt(x * (1 - x) / 4), rel=1e-5)
    assert hallucinated_interval({"n": 75, "hallucinated": 0.0}) == pytest.approx(
        (0, 1.959964**2 / (75 + 1.959964**2))
    )


def test_callbacks_with_the_same_keys_keep_their_numbers():
    callbacks = [Results("resilience", {"relation": "a", "before": 0.5}),
                 Results("resilience_2", {"relation": "b", "before": 0.4})]  # fmt: skip
    results = repair_results({"before": [], "after": []}, {}, 1, None, callbacks)
    assert (results.values["relation"], results.values["before"]) == ("a", 0.5)
    assert [one.values for one in results.included] == [{}, {"relation": "b", "before": 0.4}]
