"""Edits: whom they teach what, and how a run that broke down goes on with them."""

import warnings
from collections import Counter

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.nn.functional import cross_entropy

from lincorr_lightning.errors import ConfigError, KnowledgeError, LanguageModelError, SubjectsError
from lincorr_lightning.finetune.batches import EditSchedule
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel


@pytest.fixture(scope="module")
def lm(small_lm):
    return LanguageModel.from_pretrained(small_lm)


class Taught(L.LightningModule):
    """Trains on edits, keeps account of them, and may break down at a batch."""

    def __init__(self, folder, plan=None, breaks_at=None):
        super().__init__()
        self.language_model = LanguageModel(LMConfig(folder))
        if plan is not None:
            self.edit_schedule = plan
        self.breaks_at = breaks_at
        self.seen = []

    def configure_model(self):
        self.language_model.load().model.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.breaks_at:
            raise RuntimeError("pulled the plug")
        self.seen.append((self.current_epoch, batch_idx, batch.edits, batch.step))
        logits = self.language_model.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask
        ).logits
        return cross_entropy(logits.transpose(1, 2), batch.labels)

    def predict_step(self, batch, batch_idx):
        return batch.edits

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(**options):
    return L.Trainer(
        **{
            "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 2,
        }
        | options
    )  # fmt: skip


# -- sampled -----------------------------------------------------------------------------------


def test_sampled_edits_teach_something_new_that_follows_in_the_world(lm):
    data = EditsDataModule(n_edits=150)
    edits = data.prepare_edits(lm)
    facts = Catalogue.load().relation("city->country").reference
    cities, countries = data.asked.source, data.asked.target
    assert len({edit.subject for edit in edits}) == len(edits) == 150
    for edit in edits:
        for template, domain, before in (
            ("{} lives in the city of", cities, edit.source_before),
            ("{} lives in the country of", countries, edit.target_before),
        ):
            ids = lm.tokenizer(template.format(edit.subject), return_tensors="pt")["input_ids"]
            logits = lm.model(ids).logits[0, -1, domain.token_ids]
            assert before == int(logits.argmax())
        assert edit.label != edit.source_before
        assert edit.target_before not in edit.rights
        assert cities.texts[edit.label] == edit.answer
        assert {countries.texts[i] for i in edit.rights} == facts[edit.answer]


def test_answers_cover_the_domain_evenly(lm):
    data = EditsDataModule(n_edits=100)
    counts = Counter(edit.label for edit in data.prepare_edits(lm))
    assert set(counts) == set(data.asked.right.any(0).nonzero()[0].tolist())
    assert max(counts.values()) - min(counts.values()) <= 3


def test_an_lm_that_says_one_country_of_everybody_is_taught_all_others_evenly(lm, monkeypatch):
    def stubborn(prompts, token_ids):
        logits = torch.zeros(len(prompts), len(token_ids))
        logits[:, -1] = 1.0
        return logits

    monkeypatch.setattr(lm, "domain_logits", stubborn)
    data = EditsDataModule(n_edits=200)
    edits = data.prepare_edits(lm)
    says = len(data.asked.target.labels) - 1
    never = {len(data.asked.source.labels) - 1, *data.asked.right[says].nonzero()[0].tolist()}
    counts = Counter(edit.label for edit in edits)
    assert set(counts) == set(data.asked.right.any(0).nonzero()[0].tolist()) - never
    assert max(counts.values()) - min(counts.values()) <= 1


def test_what_fits_nobody_for_a_while_is_made_up_for(lm, monkeypatch):
    subjects = [f"name{i}" for i in range(100)]

    def one_country_first_then_all_in_turn(prompts, token_ids):
        numbers = torch.tensor([int(prompt.split()[0].removeprefix("name")) for prompt in prompts])
        says = torch.where(numbers < 50, 0, numbers % len(token_ids))
        return torch.nn.functional.one_hot(says, len(token_ids))

    monkeypatch.setattr(lm, "domain_logits", one_country_first_then_all_in_turn)
    edits = EditsDataModule(n_edits=99, subjects=subjects).prepare_edits(lm)
    counts = Counter(edit.label for edit in edits)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_the_seed_alone_decides(lm):
    edits = EditsDataModule(n_edits=30, seed=3).prepare_edits(lm)
    assert EditsDataModule(n_edits=30, seed=3).prepare_edits(lm) == edits
    other = EditsDataModule(n_edits=30, seed=4).prepare_edits(lm)
    assert {edit.subject for edit in other} != {edit.subject for edit in edits}
    assert [edit.answer for edit in other] != [edit.answer for edit in edits]


def test_subjects_may_be_given(lm):
    subjects = [f"name{i} name{i + 1}" for i in range(20)]
    edits = EditsDataModule(n_edits=15, subjects=subjects).prepare_edits(lm)
    assert len(edits) == 15
    assert [x for x in subjects if x in {edit.subject for edit in edits}] == [
        edit.subject for edit in edits
    ]
    with pytest.raises(SubjectsError, match="asks for 150 edits, but of 20 subjects only"):
        EditsDataModule(subjects=subjects).prepare_edits(lm)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"relation": "city->color"}, KnowledgeError, "city->color has no reference"),
        ({"relation": "city->contry"}, KnowledgeError, "Did you mean 'country'"),
        ({"subjects": ["name1", "Zzyzx"]}, SubjectsError, "number 2: .* the subject 'Zzyzx'"),
        ({"subjects": ["name1", " "]}, SubjectsError, "number 2: .* the subject ' '"),
        ({"subjects": ["name1", "name1"]}, SubjectsError, "names 'name1' twice"),
        ({"subjects": []}, ConfigError, "data.subjects is empty"),
        ({"subjects": ["a"], "edits_file": "b.csv"}, ConfigError, "Leave one of them null"),
        ({"edits_file": "nowhere.csv"}, SubjectsError, "nowhere.csv cannot be read"),
        ({"n_edits": 0}, ConfigError, "data.n_edits is 0"),
        ({"batch_size": 0}, ConfigError, "data.batch_size is 0"),
        ({"n_edits": 5000}, SubjectsError, "asks for 5000 edits"),
    ],
)
def test_what_cannot_be_taught_is_refused(lm, options, error, message):
    with pytest.raises(error, match=message):
        EditsDataModule(**options).prepare_edits(lm)


def test_what_the_tokenizer_tells_is_refused_before_the_weights_are_read(small_lm):
    module = Taught(small_lm)
    with pytest.raises(KnowledgeError, match="no reference"):
        trainer().fit(module, EditsDataModule("city->color"))
    with pytest.raises(SubjectsError, match="Zzyzx"):
        trainer().fit(module, EditsDataModule(subjects=["Zzyzx"]))
    assert not module.language_model.is_loaded


def test_edits_that_are_not_made_yet_are_asked_for_in_vain():
    data = EditsDataModule()
    with pytest.raises(ConfigError, match="prepare_edits"):
        _ = data.edits
    assert getattr(data, "edits", None) is None
    with pytest.raises(ConfigError, match="Trainer"):
        data.train_dataloader()


# -- batches -----------------------------------------------------------------------------------


def test_only_the_answer_s_tokens_are_asked_for_where_they_are_predicted(lm, small_lm):
    subjects = ["name1", "name2 name3 name4", "name5 name6"]
    data = EditsDataModule(subjects=subjects, n_edits=3)
    module = Taught(small_lm, EditSchedule("independent", 3))
    trainer(max_steps=1).fit(module, data)
    batch = next(iter(data.train_dataloader()))
    assert batch.edits == [0, 1, 2]
    assert batch.input_ids.shape == batch.labels.shape == (3, 9)
    for row, edit in enumerate(data.edits):
        prompt = f"{edit.subject} lives in the city of".split()
        n = len(prompt)
        words = lm.tokenizer.convert_ids_to_tokens(batch.input_ids[row].tolist())
        assert words[: n + 1] == [*prompt, edit.answer]
        assert batch.attention_mask[row].tolist() == [1] * (n + 1) + [0] * (9 - n - 1)
        asked_for = batch.labels[row]
        assert (asked_for != -100).nonzero().tolist() == [[n - 1]]
        assert lm.tokenizer.convert_ids_to_tokens([int(asked_for[n - 1])]) == [edit.answer]
    logits = lm.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    at = logits[torch.arange(3), (batch.labels != -100).int().argmax(1)]
    domain = data.asked.source.token_ids
    expected = lm.domain_logits([f"{x} lives in the city of" for x in subjects], domain)
    torch.testing.assert_close(at[:, domain].double(), expected, atol=1e-4, rtol=1e-4)


def test_an_answer_beyond_the_last_position_is_refused(make_lm, tmp_path):
    folder = str(make_lm(tmp_path / "lm"))
    long = " ".join(["name1"] * 59)  # with "lives in the city of" all 64 positions
    lm = LanguageModel.from_pretrained(folder)
    assert len(lm.rows([f"{long} lives in the city of"])[0]) == 64
    with pytest.raises(SubjectsError, match="65 tokens"):
        trainer().fit(Taught(folder), EditsDataModule(subjects=[long], n_edits=1))


# -- with a trainer ----------------------------------------------------------------------------


def test_a_module_without_a_plan_gets_batches_of_edits(small_lm):
    class Plain(Taught):
        def __init__(self, folder):
            super().__init__(folder)
            asked = self.language_model.load()
            del self.language_model
            self.network, self.tokenizer = asked.model.requires_grad_(True), asked.tokenizer

        def configure_model(self):
            pass

        def training_step(self, batch, batch_idx):
            self.seen.append(batch.edits)
            out = self.network(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
            return cross_entropy(out.logits.transpose(1, 2), batch.labels)

    module, data = Plain(small_lm), EditsDataModule(n_edits=11, batch_size=4)
    trainer(max_epochs=1).fit(module, data)
    assert [len(batch) for batch in module.seen] == [4, 4, 3]
    assert sorted(i for batch in module.seen for i in batch) == list(range(11))


def test_prediction_goes_through_the_edits_in_their_order(small_lm):
    data = EditsDataModule(n_edits=11, batch_size=4)
    predicted = trainer().predict(Taught(small_lm), data)
    assert predicted == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize("option", ["overfit_batches", "limit_train_batches"])
def test_lightning_may_cut_an_epoch_short(small_lm, option):
    module = Taught(small_lm, EditSchedule("joint", 4))
    trainer(**{option: 2}).fit(module, EditsDataModule(n_edits=20))
    assert [(epoch, index) for epoch, index, _, _ in module.seen] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert len({i for _, _, batch, _ in module.seen[:2] for i in batch}) == 8


def test_another_run_makes_the_edits_anew(small_lm, make_lm, tmp_path):
    data = EditsDataModule(n_edits=20)
    first = Taught(small_lm)
    trainer(max_epochs=1).fit(first, data)
    edits = data.edits
    trainer(max_epochs=1).fit(Taught(str(make_lm(tmp_path / "lm", seed=5))), data)
    assert data.edits != edits
    trainer(max_epochs=1).fit(Taught(small_lm), data)
    assert data.edits == edits


PLANS = {
    "joint": EditSchedule("joint", 4),
    "independent": EditSchedule("independent", 4, steps_per_edit=2),
}


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("saved_by", ["exception", "steps"])
@pytest.mark.parametrize("n_seen", [1, 3, 5, 6, 7, 11])
def test_a_run_that_breaks_down_goes_on_where_it_stopped(
    small_lm, tmp_path, plan, saved_by, n_seen
):
    n_edits = 22 if plan == "joint" else 10  # 6 steps an epoch
    whole = Taught(small_lm, PLANS[plan])
    trainer().fit(whole, EditsDataModule(n_edits=n_edits))
    assert len(whole.seen) == 12

    broken = Taught(small_lm, PLANS[plan], breaks_at=n_seen)
    if saved_by == "exception":
        callback, name = OnExceptionCheckpoint(tmp_path, "on_exception"), "on_exception.ckpt"
    else:  # saved while callbacks are still at the batch's end
        callback, name = ModelCheckpoint(tmp_path, "last", every_n_train_steps=n_seen), "last.ckpt"
    data = EditsDataModule(n_edits=n_edits)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        trainer(callbacks=[callback], enable_checkpointing=True).fit(broken, data)
    assert broken.seen == whole.seen[:n_seen]

    resumed, again = Taught(small_lm, PLANS[plan]), EditsDataModule(n_edits=n_edits)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not resumable.*")
        trainer().fit(resumed, again, ckpt_path=tmp_path / name)
    assert resumed.seen == whole.seen[n_seen:]
    assert again.edits == data.edits
    assert torch.equal(weights(resumed), weights(whole))


def test_a_run_that_was_stopped_at_the_end_of_an_epoch_goes_on_with_the_next(small_lm, tmp_path):
    plan = PLANS["joint"]
    whole = Taught(small_lm, plan)
    trainer(max_epochs=3).fit(whole, EditsDataModule(n_edits=22))
    first = trainer(
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(tmp_path, "last", save_on_train_epoch_end=True)],
    )
    first.fit(Taught(small_lm, plan), EditsDataModule(n_edits=22))
    resumed = Taught(small_lm, plan)
    trainer(max_epochs=3).fit(
        resumed, EditsDataModule(n_edits=22), ckpt_path=tmp_path / "last.ckpt"
    )
    assert resumed.seen == whole.seen[12:]
    assert torch.equal(weights(resumed), weights(whole))


@pytest.fixture
def broken_off(small_lm, tmp_path):
    """A checkpoint of the middle of an epoch."""
    callback = OnExceptionCheckpoint(tmp_path, "broken")
    run = trainer(callbacks=[callback], enable_checkpointing=True)
    with pytest.raises(RuntimeError):
        run.fit(Taught(small_lm, PLANS["joint"], breaks_at=3), EditsDataModule(n_edits=22))
    return tmp_path / "broken.ckpt"


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (EditSchedule("joint", 5), {}, "with .*edits_per_step 4.*this run has .*edits_per_step 5"),
        (PLANS["joint"], {"n_edits": 23}, "another data.n_edits"),
        (PLANS["joint"], {"seed": 1}, "another data.seed"),
        (PLANS["joint"], {"relation": "city->beast"}, "another data.relation"),
    ],
)
def test_a_run_is_not_resumed_with_other_edits(
    small_lm, broken_off, tmp_path, plan, options, message
):
    facts = tmp_path / "pets.yaml"
    facts.write_text(
        'version: 1\nsource: "made up"\nentities:\n'
        "  animal: {name1: {}, name2: {}}\n  city:\n    Paris: {animal: name1}\n"
        "    Oslo: {animal: name2}\nknowledge:\n"
        '  beast: {family: attribute, language: en, template: "{} saw a", answers: animal}\n'
    )
    files = [str(facts)] if "relation" in options else None
    data = EditsDataModule(**{"n_edits": 22, "knowledge_files": files} | options)
    with pytest.raises(ConfigError, match=message):
        trainer().fit(Taught(small_lm, plan), data, ckpt_path=broken_off)


def test_other_labels_are_not_the_checkpoint_s(small_lm, broken_off, tmp_path):
    (tmp_path / "more.yaml").write_text(
        'version: 1\nsource: "made up"\nentities:\n  city:\n    name399: {country: France}\n'
    )
    data = EditsDataModule(n_edits=22, knowledge_files=[str(tmp_path / "more.yaml")])
    with pytest.raises(ConfigError, match="other labels of city->country"):
        trainer().fit(Taught(small_lm, PLANS["joint"]), data, ckpt_path=broken_off)


def test_the_lm_must_be_found():
    class Without(L.LightningModule):
        def training_step(self, batch, batch_idx):
            return None

        def configure_optimizers(self):
            return None

    with pytest.raises(LanguageModelError, match="no Hugging Face causal LM"):
        trainer().fit(Without(), EditsDataModule())


def test_edits_that_ask_for_nothing_new_are_told(small_lm, tmp_path):
    """They count as generalized whatever training does."""
    lm = LanguageModel.from_pretrained(small_lm)
    sampled = EditsDataModule(n_edits=4)
    sampled.prepare_edits(lm)
    asked = sampled.asked
    edit = next(
        e for e in sampled.edits if asked.right[e.target_before].any()
    )  # some city lies in what the LM says already
    city = asked.source.texts[int(np.flatnonzero(asked.right[edit.target_before])[0])]
    file = tmp_path / "edits.csv"
    file.write_text(f"subject,answer\n{edit.subject},{city}\n")
    with pytest.warns(UserWarning, match=f"1 of 1 edits.*{edit.subject}.*no other target"):
        EditsDataModule(edits_file=str(file)).prepare_edits(lm)
