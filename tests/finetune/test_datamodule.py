"""Edits of a datamodule: sampled, from a file, distributed over steps, and resumed."""

import json
import warnings
from collections import Counter

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.nn.functional import cross_entropy

from lincorr_lightning.errors import CheckpointError, ConfigError, KnowledgeError, SubjectsError
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from tests.toys import NO_FILES, quiet_trainer


class Taught(L.LightningModule):
    """Trains on edits, records them, and may fail at a batch."""

    def __init__(self, folder, fails_at=None):
        super().__init__()
        self.lm = LanguageModel(LMConfig(folder))
        self.fails_at = fails_at
        self.seen = []

    def configure_model(self):
        self.lm.load().model.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.fails_at:
            raise RuntimeError("failed on purpose")
        self.seen.append((self.current_epoch, batch_idx, batch.ids, batch.step))
        logits = self.lm.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask
        ).logits
        return cross_entropy(logits.transpose(1, 2), batch.labels)

    def predict_step(self, batch, batch_idx):
        return batch.ids

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(**options):
    return quiet_trainer(None, **NO_FILES | {"max_epochs": 2} | options)


def edits_for(module, training=None, **options):
    return EditsDataModule(module.lm, training=training, **options)


# -- sampled -----------------------------------------------------------------------------------


def test_sampled_edits_are_new_to_the_lm_and_have_a_reference(lm, relation):
    data = EditsDataModule(lm, n_edits=150)
    edits = data.prepare_edits()
    facts = Catalogue.load().relation("city->country").reference
    cities, countries = relation.source, relation.target
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
        assert edit.target_before not in edit.reference
        assert cities.texts[edit.label] == edit.answer
        assert {countries.texts[i] for i in edit.reference} == facts[edit.answer]


def test_answers_that_fit_no_subject_at_first_are_used_later(lm, monkeypatch):
    subjects = [f"name{i}" for i in range(100)]

    def one_country_first_then_all_in_turn(prompts, token_ids):
        numbers = torch.tensor([int(prompt.split()[0].removeprefix("name")) for prompt in prompts])
        labels = torch.where(numbers < 50, 0, numbers % len(token_ids))
        return torch.nn.functional.one_hot(labels, len(token_ids))

    monkeypatch.setattr(lm, "domain_logits", one_country_first_then_all_in_turn)
    edits = EditsDataModule(lm, n_edits=99, subjects=subjects).prepare_edits()
    counts = Counter(edit.label for edit in edits)
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.fixture
def mostly_red(relation, tmp_path):
    """Options of edits of which most have the same reference."""
    rare = {0: "blue", 1: "green"}
    facts = {city: {"color": rare.get(i, "red")} for i, city in enumerate(relation.source.texts)}
    file = tmp_path / "red.yaml"
    file.write_text(json.dumps({"version": 1, "source": "made up", "entities": {"city": facts}}))
    return {"relation": "city->color", "knowledge_files": [str(file)]}


def test_a_limit_of_edits_per_reference(lm, mostly_red):
    free = EditsDataModule(lm, n_edits=12, **mostly_red).prepare_edits()
    assert max(Counter(edit.reference for edit in free).values()) > 4
    for limit in (None, 12):
        data = EditsDataModule(lm, n_edits=12, max_edits_per_reference=limit, **mostly_red)
        assert data.prepare_edits() == free
    limited = {"n_edits": 6, "max_edits_per_reference": 2, **mostly_red}
    data = EditsDataModule(lm, **limited)
    edits = data.prepare_edits()
    assert sorted(Counter(edit.reference for edit in edits).values()) == [2, 2, 2]
    assert len({edit.subject for edit in edits}) == 6
    for edit in edits:
        assert edit.label != edit.source_before and edit.target_before not in edit.reference
    # Until a reference has two, they are sampled as without a limit.
    counts = Counter()
    for one, other in zip(free, edits, strict=False):
        if 2 in counts.values():
            break
        assert one == other
        counts[one.reference] += 1
    assert EditsDataModule(lm, **limited).prepare_edits() == edits
    more = EditsDataModule(lm, **limited | {"max_edits_per_reference": 3})
    with pytest.raises(CheckpointError, match=r"data\.max_edits_per_reference 2, this run has 3"):
        more.load_state_dict(data.state_dict())


def test_a_limit_of_edits_of_a_file(lm, mostly_red, tmp_path):
    free = EditsDataModule(lm, n_edits=12, **mostly_red).prepare_edits()
    file = tmp_path / "edits.csv"
    file.write_text("subject,answer\n" + "".join(f"{e.subject},{e.answer}\n" for e in free))
    counts, first = Counter(), []
    for edit in free:
        counts[edit.reference] += 1
        if counts[edit.reference] <= 2:
            first.append(edit)
    data = EditsDataModule(lm, edits_file=str(file), max_edits_per_reference=2, **mostly_red)
    above = rf"{12 - len(first)} of 12 edits .*{12 - len(first)}: above data.max_edits_per_ref"
    with pytest.warns(UserWarning, match=above):
        assert data.prepare_edits() == first


def test_subjects_may_be_given(lm):
    subjects = [f"name{i} name{i + 1}" for i in range(20)]
    edits = EditsDataModule(lm, n_edits=15, subjects=subjects).prepare_edits()
    assert len(edits) == 15
    assert [x for x in subjects if x in {edit.subject for edit in edits}] == [
        edit.subject for edit in edits
    ]
    assert EditsDataModule(lm, n_edits=15, subjects=subjects).prepare_edits() == edits
    other = EditsDataModule(lm, n_edits=15, subjects=subjects, seed=1).prepare_edits()
    assert [edit.answer for edit in other] != [edit.answer for edit in edits]
    with pytest.raises(SubjectsError, match="asks for 150 edits, but of 20 subjects only"):
        EditsDataModule(lm, subjects=subjects).prepare_edits()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"relation": "city->color"}, KnowledgeError, "city->color has no reference"),
        ({"relation": "city->contry"}, KnowledgeError, "Did you mean 'country'"),
        ({"subjects": ["name1", "Zzyzx"]}, SubjectsError, "data.subjects: 'Zzyzx' has no token"),
        ({"subjects": ["name1", "name1"]}, SubjectsError, "names 'name1' twice"),
        ({"subjects": ["a"], "edits_file": "b.csv"}, ConfigError, "Leave one of them null"),
        ({"edits_file": "nowhere.csv"}, SubjectsError, "nowhere.csv cannot be read"),
        ({"n_edits": 0}, ConfigError, "data.n_edits is 0"),
        ({"max_edits_per_reference": 0}, ConfigError, "data.max_edits_per_reference is 0"),
        (
            {"n_edits": 12, "max_edits_per_reference": 1},
            SubjectsError,
            "only 11 can be taught .* raise data.max_edits_per_reference",
        ),
        (
            {"n_edits": 9, "max_edits_per_reference": 1, "subjects": ["name1", "name2"]},
            SubjectsError,
            "only 2 can be taught .* raise data.max_edits_per_reference",
        ),
        ({"n_edits": None}, ConfigError, r"data\.n_edits and data\.edits_file are null"),
        ({"subject_kind": "dogs"}, ConfigError, "'dogs'; it must be any, words or names"),
        ({"n_edits": 5000}, SubjectsError, "asks for 5000 edits"),
        # There are no names in this vocabulary.
        ({"n_edits": 4, "subject_kind": "names"}, SubjectsError, "only 0 can be taught"),
    ],
)
def test_unusable_settings_are_refused(lm, options, error, message):
    with pytest.raises(error, match=message):
        EditsDataModule(**{"lm": lm} | options).prepare_edits()


def test_settings_are_checked_before_weights_are_read(small_lm):
    module = Taught(small_lm)
    for wrong in ({"relation": "city->color"}, {"subjects": ["Zzyzx"]}):
        with pytest.raises((KnowledgeError, SubjectsError), match=r"no reference|Zzyzx"):
            trainer().fit(module, edits_for(module, **wrong))
    assert not module.lm.is_loaded


def test_an_answer_beyond_the_last_position_is_refused(make_lm, tmp_path):
    folder = str(make_lm(tmp_path / "lm"))
    long = " ".join(["name1"] * 59)  # with "lives in the city of" all 64 positions
    lm = LanguageModel.from_pretrained(folder)
    assert len(lm.rows([f"{long} lives in the city of"])[0]) == 64
    with pytest.raises(SubjectsError, match="65 tokens"):
        trainer().fit(Taught(folder), EditsDataModule(lm, subjects=[long], n_edits=1))


# -- with a trainer ----------------------------------------------------------------------------


def test_prediction_goes_through_the_edits_in_order(small_lm):
    module = Taught(small_lm)
    predicted = trainer().predict(module, edits_for(module, n_edits=11, batch_size=4))
    assert predicted == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


SCHEDULES = {
    "joint": EditTraining(protocol="joint", edits_per_step=4),
    "independent": EditTraining(edits_per_step=4, n_steps=2),
}


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("saved_by", ["exception", "steps"])
@pytest.mark.parametrize("n_seen", [1, 6, 7])
def test_a_failed_run_resumes_where_it_stopped(small_lm, tmp_path, schedule, saved_by, n_seen):
    n_edits = 22 if schedule == "joint" else 10  # 6 steps an epoch

    def edits(module):
        return edits_for(module, SCHEDULES[schedule], n_edits=n_edits)

    whole = Taught(small_lm)
    trainer().fit(whole, edits(whole))
    assert len(whole.seen) == 12

    broken = Taught(small_lm, fails_at=n_seen)
    if saved_by == "exception":
        callback, name = OnExceptionCheckpoint(tmp_path, "on_exception"), "on_exception.ckpt"
    else:  # saved while callbacks are still at the batch's end
        callback, name = ModelCheckpoint(tmp_path, "last", every_n_train_steps=n_seen), "last.ckpt"
    data = edits(broken)
    with pytest.raises(RuntimeError, match="failed on purpose"):
        trainer(callbacks=[callback], enable_checkpointing=True).fit(broken, data)
    assert broken.seen == whole.seen[:n_seen]

    resumed = Taught(small_lm)
    again = edits(resumed)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*not resumable.*")
        trainer().fit(resumed, again, ckpt_path=tmp_path / name)
    assert resumed.seen == whole.seen[n_seen:]
    assert again.prepare_edits() == data.prepare_edits()
    assert torch.equal(weights(resumed), weights(whole))


def test_a_run_is_not_resumed_with_other_edits(small_lm, lm, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text(
        'version: 1\nsource: "made up"\nentities: {city: {name399: {country: France}}}\n'
    )
    data = EditsDataModule(lm, n_edits=22)
    data.prepare_edits()
    for changed, message in (
        ({"n_edits": 23}, "with data.n_edits 22, this run has 23"),
        (
            {"knowledge_files": [str(more)]},
            r"with data.knowledge_files \(contents\) \w+, this run has \w+",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            other = EditsDataModule(lm, **{"n_edits": 22} | changed)
            other.setup("fit")
            other.load_state_dict(data.state_dict())
    broken, again = Taught(small_lm, fails_at=3), Taught(small_lm)
    run = trainer(callbacks=[OnExceptionCheckpoint(tmp_path, "b")], enable_checkpointing=True)
    with pytest.raises(RuntimeError):
        run.fit(broken, edits_for(broken, SCHEDULES["joint"], n_edits=22))
    other = EditTraining(protocol="joint", edits_per_step=5)
    with pytest.raises(CheckpointError, match="with edits_per_step 4, this run has 5"):
        trainer().fit(again, edits_for(again, other, n_edits=22), ckpt_path=tmp_path / "b.ckpt")


def test_edits_of_words(lm):
    edits = EditsDataModule(lm, n_edits=4, subject_kind="words").prepare_edits()
    assert len(edits) == 4 and all(edit.subject.isalpha() for edit in edits)


def test_edits_that_ask_for_nothing_new_are_reported(lm, relation, tmp_path):
    """They count as generalized where nothing changes."""
    edits = EditsDataModule(lm, n_edits=4).prepare_edits()
    edit = next(one for one in edits if relation.reference_mask[one.target_before].any())
    # A city that lies in the country that the LM answers already.
    city = relation.source.texts[relation.reference_mask[edit.target_before].argmax()]
    file = tmp_path / "edits.csv"
    file.write_text(f"subject,answer\n{edit.subject},{city}\n")
    with pytest.warns(UserWarning, match=f"1 of 1 edits.*{edit.subject}.*answers already"):
        EditsDataModule(lm, edits_file=str(file)).prepare_edits()
