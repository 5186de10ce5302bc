"""Edits of a datamodule: sampled, checked, distributed over steps, and resumed."""

import json
from collections import Counter

import lightning as L
import pytest
import torch
from torch.nn.functional import cross_entropy

from lincorr_lightning.errors import CheckpointError, ConfigError, KnowledgeError, SubjectsError
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from tests.toys import NO_FILES, quiet_trainer


class Taught(L.LightningModule):
    """Trains on edits."""

    def __init__(self, folder):
        super().__init__()
        self.lm = LanguageModel(LMConfig(folder))

    def configure_model(self):
        self.lm.load().model.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        model = self.lm.model
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        return cross_entropy(logits.transpose(1, 2), batch.labels)

    def predict_step(self, batch, batch_idx):
        return batch.ids

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trainer(**options):
    return quiet_trainer(None, **NO_FILES | {"max_epochs": 2} | options)


# -- sampled -----------------------------------------------------------------------------------


def test_sampled_edits_are_new_to_the_lm_and_have_a_reference(lm, relation):
    edits = EditsDataModule(lm, n_edits=60).resolve().edits
    facts = Catalogue.load().relation("city->country").reference
    cities, countries = relation.source, relation.target
    assert len({edit.subject for edit in edits}) == len(edits) == 60
    for edit in edits:
        for template, domain, before in (
            ("{} lives in the city of", cities, edit.source_before),
            ("{} lives in the country of", countries, edit.target_before),
        ):
            ids = lm.tokenizer(template.format(edit.subject), return_tensors="pt")["input_ids"]
            assert before == int(lm.model(ids).logits[0, -1, domain.token_ids].argmax())
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
    edits = EditsDataModule(lm, n_edits=99, subjects=subjects).resolve().edits
    counts = Counter(edit.label for edit in edits)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_limit_of_edits_per_reference(lm, relation, tmp_path):
    """Most edits have the same reference."""
    rare = {0: "blue", 1: "green"}
    facts = {city: {"color": rare.get(i, "red")} for i, city in enumerate(relation.source.texts)}
    file = tmp_path / "red.yaml"
    file.write_text(json.dumps({"version": 1, "source": "made up", "entities": {"city": facts}}))
    options = {"relation": "city->color", "knowledge_files": [str(file)]}

    def edits(**more):
        return EditsDataModule(lm, **options | more).resolve().edits

    free = edits(n_edits=12)
    assert max(Counter(edit.reference for edit in free).values()) > 4
    assert edits(n_edits=12, max_edits_per_reference=12) == free
    limited = edits(n_edits=6, max_edits_per_reference=2)
    assert sorted(Counter(edit.reference for edit in limited).values()) == [2, 2, 2]
    assert len({edit.subject for edit in limited}) == 6
    for edit in limited:
        assert edit.label != edit.source_before and edit.target_before not in edit.reference
    # Of a file, the first ones.
    table = tmp_path / "edits.csv"
    table.write_text("subject,answer\n" + "".join(f"{e.subject},{e.answer}\n" for e in free))
    counts, first = Counter(), []
    for edit in free:
        counts[edit.reference] += 1
        if counts[edit.reference] <= 2:
            first.append(edit)
    with pytest.warns(UserWarning, match=rf"{12 - len(first)}: above data.max_edits_per_ref"):
        assert edits(edits_file=str(table), max_edits_per_reference=2) == first


def test_subjects_may_be_given(lm):
    subjects = [f"name{i} name{i + 1}" for i in range(20)]

    def edits(**options):
        return EditsDataModule(lm, n_edits=15, subjects=subjects, **options).resolve().edits

    chosen = {edit.subject for edit in edits()}
    assert len(chosen) == 15 and [x for x in subjects if x in chosen] == [
        edit.subject for edit in edits()
    ]
    assert [edit.answer for edit in edits(seed=1)] != [edit.answer for edit in edits()]
    words = EditsDataModule(lm, n_edits=4, subject_kind="words").resolve().edits
    assert all(edit.subject.isalpha() for edit in words)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"relation": "city->color"}, KnowledgeError, "city->color has no reference"),
        ({"relation": "city->contry"}, KnowledgeError, "Did you mean 'country'"),
        ({"subjects": ["name1", "Zzyzx"]}, SubjectsError, "data.subjects: 'Zzyzx'"),
        ({"subjects": ["a"], "edits_file": "b.csv"}, ConfigError, "Leave one of them null"),
        ({"edits_file": "nowhere.csv"}, SubjectsError, "nowhere.csv cannot be read"),
        ({"n_edits": 0}, ConfigError, "data.n_edits is 0"),
        ({"max_edits_per_reference": 0}, ConfigError, "data.max_edits_per_reference is 0"),
        (
            {"n_edits": 12, "max_edits_per_reference": 1},
            SubjectsError,
            "only 11 can be taught .* raise data.max_edits_per_reference",
        ),
        ({"n_edits": None}, ConfigError, r"data\.edits_file is null.* data\.n_edits"),
        ({"subject_kind": "dogs"}, ConfigError, "'dogs'; it must be any, words or names"),
    ],
)
def test_unusable_settings_are_refused(lm, options, error, message):
    with pytest.raises(error, match=message):
        EditsDataModule(**{"lm": lm} | options).resolve()


def test_settings_are_checked_before_weights_are_read(small_lm):
    module = Taught(small_lm)
    for wrong in ({"relation": "city->color"}, {"subjects": ["Zzyzx"]}):
        with pytest.raises((KnowledgeError, SubjectsError)):
            trainer().fit(module, EditsDataModule(module.lm, **wrong))
    assert not module.lm.is_loaded


def test_an_answer_beyond_the_last_position_is_refused(small_lm):
    module = Taught(small_lm)
    long = " ".join(["name1"] * 59)  # with "lives in the city of" all 64 positions
    with pytest.raises(SubjectsError, match="65 tokens"):
        trainer().fit(module, EditsDataModule(module.lm, subjects=[long], n_edits=1))


# -- with a trainer ----------------------------------------------------------------------------


def test_prediction_goes_through_the_edits_in_order(small_lm):
    module = Taught(small_lm)
    predicted = trainer().predict(module, EditsDataModule(module.lm, n_edits=11, batch_size=4))
    assert predicted == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_a_run_is_not_resumed_with_other_edits(lm, tmp_path):
    more = tmp_path / "more.yaml"
    more.write_text(
        'version: 1\nsource: "made up"\nentities: {city: {name399: {country: France}}}\n'
    )

    def data(**options):
        made = EditsDataModule(lm, **{"n_edits": 22} | options)
        made.setup("fit")
        return made

    for changed, message in (
        ({"n_edits": 23}, "with data.n_edits 22, this run has 23"),
        ({"knowledge_files": [str(more)]}, r"with data.knowledge_files \(contents\) \w+, this run"),
    ):
        with pytest.raises(CheckpointError, match=message):
            data(**changed).load_state_dict(data().state_dict())
