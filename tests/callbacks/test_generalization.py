"""What edits do to the target, against counting by hand."""

import json

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lincorr_lightning.callbacks import Forecast, Generalization
from lincorr_lightning.errors import ConfigError, KnowledgeError, SubjectsError
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.lm.vocabulary import usable_strings
from tests.toys import by_reference


@pytest.fixture
def lessons(naive, small_lm):
    """Whole texts of the edits."""
    tokenizer = naive.module(small_lm).tokenizer
    texts = [f"{e['subject']} lives in the city of {e['answer']}" for e in naive.edits]
    rows = tokenizer(texts, return_tensors="pt")["input_ids"]
    return DataLoader(rows, batch_size=4)


def counted(naive, base, model, tokenizer, edits, right):
    """Numbers of some edits, one by one."""
    subjects = [edit["subject"] for edit in edits]
    before, after = (naive.logits(m, tokenizer, "country", subjects) for m in (base, model))
    source = naive.logits(model, tokenizer, "city", subjects)
    found = dict.fromkeys(("generalized", "hallucinated", "unchanged", "source_learned"), 0)
    reference, old, rows, of_learned = 0.0, 0.0, [], []
    for i in range(len(edits)):
        now, then = after[i].argmax(), before[i].argmax()
        known = right(i, source[i])
        if naive.countries[now] in known:
            found["generalized"] += 1
        else:
            found["unchanged" if now == then else "hallucinated"] += 1
        learned = naive.cities[source[i].argmax()] == edits[i].get("answer")
        found["source_learned"] += learned
        outcome = "unchanged" if now == then else "hallucinated"
        outcome = "generalized" if naive.countries[now] in known else outcome
        rows += [{"outcome": outcome, "reference": "|".join(known)}] if known else []
        of_learned += [outcome] if learned else []
        chance = np.exp(after[i]) / np.exp(after[i]).sum()
        reference += sum(chance[naive.countries.index(country)] for country in known)
        old += chance[then]
    colors = [naive.logits(m, tokenizer, "color", subjects).argmax(1) for m in (base, model)]
    shares = {name: n / len(edits) for name, n in found.items()}
    scores = by_reference(rows)
    shares["constant"] = scores["constant"] * len(rows) / len(edits)
    for name, share in scores["macro"].items():
        shares[f"macro_{name}"] = share
        if of_learned:
            shares[f"{name}_of_learned"] = of_learned.count(name) / len(of_learned)
    return shares | {
        "reference": reference / len(edits),
        "old_answer": old / len(edits),
        "color": float((colors[0] == colors[1]).mean()),
    }


TAGS = {
    **dict.fromkeys(("constant", "macro_generalized", "macro_hallucinated"), "generalization"),
    **dict.fromkeys(("generalized_of_learned", "hallucinated_of_learned"), "generalization"),
    "generalized": "generalization",
    "hallucinated": "generalization",
    "unchanged": "generalization",
    "source_learned": "generalization",
    "reference": "probability",
    "old_answer": "probability",
    "color": "control_unchanged",
}


def test_edits_of_a_benchmark_s_file(naive, small_lm, lessons, own_map, fit, tmp_path):
    records = [
        {
            "case_id": i,
            "requested_rewrite": {
                "prompt": "{} lives in",
                "subject": edit["subject"],
                "target_new": {"str": edit["answer"]},
            },
        }
        for i, edit in enumerate([*naive.edits, {"subject": "name300", "answer": "Atlantis"}])
    ]
    (tmp_path / "counterfact.json").write_text(json.dumps(records))
    results = []
    for edits in (naive.edits, str(tmp_path / "counterfact.json")):
        count = Generalization("city->country", edits, linear_map=own_map.folder)
        fit(count, module=naive.module(small_lm), data=lessons)
        results.append(count.results)
    assert results[0].pop("skipped") == {}
    reason = "its answer is no label of this LM (not one of city)"
    assert results[1].pop("skipped") == {reason: 1}
    assert results[0] == results[1]


def test_edits_are_counted_as_by_hand(naive, small_lm, lessons, own_map, fit):
    """Some of them as they are trained, all of them in the end."""
    module = naive.module(small_lm, lr=0.02)
    states = naive.loop(module, list(lessons) * 4).states
    count = Generalization("city->country", naive.edits, linear_map=own_map.folder, n_watch=4)
    fit(count, max_epochs=4, module=module, data=lessons)

    def right(i, _):
        return {naive.places[naive.edits[i]["answer"]]}

    n_learned = 0  # steps after which any source is learned
    for step, state in enumerate(states):
        watched = naive.edits[: 4 if step < len(states) - 1 else None]
        few = counted(naive, states[0], state, module.tokenizer, watched, right)
        for name, value in few.items():
            history = dict(count.history[f"{TAGS[name]}/{name}"])
            assert history[step] == pytest.approx(value, abs=1e-4), (name, step)
        n_learned += "generalized_of_learned" in few
    final = counted(naive, states[0], states[-1], module.tokenizer, naive.edits, right)
    assert final["source_learned"] > 0.5, "the test teaches nothing"
    assert n_learned == len(count.history["generalization/hallucinated_of_learned"])
    macro = {name: final[f"macro_{name}"] for name in ("generalized", "hallucinated")}
    assert count.results["macro"] == pytest.approx(macro)
    for name in ("constant", "generalized_of_learned", "hallucinated_of_learned"):
        assert count.results[name] == pytest.approx(final[name])
    for name in ("generalized", "hallucinated", "unchanged", "source_learned"):
        assert count.results[name] == pytest.approx(final[name])
    assert count.results["probability_reference"] == pytest.approx(final["reference"], abs=1e-4)
    assert count.results["probability_old_answer"] == pytest.approx(final["old_answer"], abs=1e-4)
    assert count.results["controls"] == {"color": {"unchanged": pytest.approx(final["color"])}}
    assert count.results["random"] == pytest.approx(1 / 11)
    assert count.results["n_edits"] == 7
    weights = [
        own_map.weight[
            naive.countries.index(naive.places[e["answer"]]), naive.cities.index(e["answer"])
        ]
        for e in naive.edits
    ]
    assert [case.weight_reference for case in count.cases] == pytest.approx(weights)


def test_of_no_learned_edit_there_is_no_share(naive, small_lm, lessons, own_map, fit):
    module = naive.module(small_lm, lr=0.0)
    subjects = [edit["subject"] for edit in naive.edits]
    known = naive.logits(module.backbone, module.tokenizer, "city", subjects).argmax(1)
    pairs = zip(naive.edits, known, strict=True)
    edits = [edit for edit, i in pairs if edit["answer"] != naive.cities[i]]
    count = Generalization("city->country", edits, linear_map=own_map.folder)
    fit(count, module=module, data=lessons)
    assert count.results["source_learned"] == 0
    for name in ("generalized_of_learned", "hallucinated_of_learned"):
        assert count.results[name] is None
        assert f"generalization/{name}" not in count.history


def test_without_edits_the_target_is_compared_with_the_source(naive, small_lm, own_map, fit):
    module = naive.module(small_lm, lr=0.02)
    states = naive.loop(module, list(naive.sentences(small_lm))).states
    count = Generalization(linear_map=own_map.folder, n_watch=9)
    fit(count, module=module)
    subjects = [case.subject for case in count.cases]
    assert len(set(subjects)) == 9
    assert set(subjects) <= set(usable_strings(module.tokenizer))

    def right(_, source):
        return {naive.places[naive.cities[source.argmax()]]} - {None}

    watched = [{"subject": subject} for subject in subjects]
    final = counted(naive, states[0], states[-1], module.tokenizer, watched, right)
    for name in ("generalized", "hallucinated", "unchanged"):
        assert count.results[name] == pytest.approx(final[name])
    assert "source_learned" not in count.results
    assert "generalized_of_learned" not in count.results
    assert count.results["constant"] == pytest.approx(final["constant"])
    assert count.results["macro"]["hallucinated"] == pytest.approx(final["macro_hallucinated"])
    assert count.results["probability_reference"] == pytest.approx(final["reference"], abs=1e-4)


def test_a_reference_of_an_edit_replaces_that_of_the_relation(tmp_path, fit):
    """A relation without a reference can be measured too."""
    edits = [
        {"subject": "name1", "answer": "Paris", "reference": "red"},
        {"subject": "name2", "answer": "Tokyo", "reference": ["blue", "green"]},
    ]
    file = tmp_path / "edits.jsonl"
    file.write_text("\n".join(json.dumps(edit) for edit in edits))
    count = Generalization("city->color", str(file), controls=["country"])
    fit(count)
    references = [set(case.reference.split("|")) for case in count.cases]
    assert references == [{"red"}, {"blue", "green"}]
    assert count.results["random"] == pytest.approx((1 / 6 + 2 / 6) / 2)
    assert list(count.results["controls"]) == ["country"]


# -- other wordings, and subjects without an edit --------------------------------------------------

WORDINGS = ["the city of {} is", "{} lives in"]


def unchanged(naive, states, tokenizer, knowledge, subjects):
    before, after = (naive.logits(one, tokenizer, knowledge, subjects).argmax(1) for one in states)
    return (before == after).mean()


def test_other_wordings_and_neighbours_as_by_hand(naive, small_lm, lessons, own_map, fit):
    module = naive.module(small_lm, lr=0.02)
    states = naive.loop(module, list(lessons) * 4).states
    count = Generalization(
        "city->country",
        naive.edits,
        linear_map=own_map.folder,
        paraphrases=WORDINGS,
        n_neighbours=20,
        n_watch=3,
    )
    trainer = fit(count, max_epochs=4, module=module, data=lessons)
    subjects = [edit["subject"] for edit in naive.edits]
    cities = [
        naive.logits(states[-1], module.tokenizer, "city", subjects, template=wording).argmax(1)
        for wording in WORDINGS
    ]
    learned = [
        [naive.cities[i] == edit["answer"] for i, edit in zip(row, naive.edits, strict=True)]
        for row in cities
    ]
    assert count.results["paraphrases"] == {"source_learned": np.mean(learned), "n": 2}
    logged = trainer.callback_metrics["paraphrases/source_learned"]
    assert float(logged) == pytest.approx(np.mean(learned))
    others = count.results["neighbours"]
    assert others["n"] == len(count.neighbours) > 10
    assert not {*count.neighbours} & {*subjects}
    for side, knowledge in (("source", "city"), ("target", "country")):
        ends = states[0], states[-1]
        share = unchanged(naive, ends, module.tokenizer, knowledge, count.neighbours)
        assert others[f"{side}_unchanged"] == pytest.approx(share)
    assert others["source_unchanged"] < 1, "the test changes nobody else"


def test_neighbours_of_independent_edits_are_read_in_the_lm_of_each(naive, small_lm, own_map, fit):
    last = {}

    class Stacked(naive.stacked):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch.last:
                for adapter, edit in enumerate(batch.ids):
                    with self.adapters.rows([adapter]):
                        last[edit] = self.answers()

        def answers(self):
            return [
                naive.logits(self.backbone, self.tokenizer, what, count.neighbours).argmax(1)
                for what in ("city", "country")
            ]

    module = Stacked(small_lm)
    base = naive.module(small_lm)
    data = naive.data(module, n_edits=5, training=EditTraining(edits_per_step=2, n_steps=3))
    count = Generalization(linear_map=own_map.folder, n_neighbours=8, every_n_steps=2)
    fit(count, module=module, data=data)
    before = [
        naive.logits(base.backbone, base.tokenizer, what, count.neighbours).argmax(1)
        for what in ("city", "country")
    ]
    assert len(last) == 5
    for i, side in enumerate(("source", "target")):
        share = np.mean([last[edit][i] == before[i] for edit in last])
        assert count.results["neighbours"][f"{side}_unchanged"] == pytest.approx(share)
    assert share < 1


# -- what is written -------------------------------------------------------------------------------


@pytest.fixture
def painted(naive, tmp_path):
    """Facts that give every city of the small LM a colour, and every country red."""
    color_of = {city: naive.colors[i % 6] for i, city in enumerate(naive.cities)}
    facts = {city: {"color": color} for city, color in color_of.items()}
    facts = {"city": facts, "country": {country: {"color": "red"} for country in naive.countries}}
    file = tmp_path / "painted.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "source": "made up", "entities": facts}))
    return str(file), color_of


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["first", "last"])
def test_several_relations(naive, small_lm, own_map, tmp_path, painted, order, fit):
    """The run's own relation has the plain names, wherever its callback stands."""
    file, color_of = painted
    logger = CSVLogger(tmp_path, name="", version="run")
    own = Generalization(linear_map=own_map.folder, controls=[])
    other = Generalization("city->color", controls=["country"])
    module = naive.on_edits(small_lm, lr=0.01)
    data = naive.data(module, n_edits=6, knowledge_files=[file], batch_size=3)
    callbacks = [[own, other][i] for i in order]
    fit(*callbacks, logger=logger, module=module, data=data)
    edits = data.prepare_edits()
    tables = {path.name for path in (tmp_path / "run" / "tables").iterdir()}
    assert tables == {"cases.csv", "cases_city-color.csv"}
    figures = {path.name for path in (tmp_path / "run" / "figures").iterdir()}
    assert {name for name in figures if "city-color" not in name} == {
        name.replace("_city-color", "") for name in figures if "city-color" in name
    }
    # The edits are those of the run; what is right by them is looked up for this relation.
    right = [(edit.subject, color_of[edit.answer]) for edit in edits]
    assert [(case.subject, case.reference) for case in other.cases] == right
    for callback, prefix in ((own, ""), (other, "city->color/")):
        assert {tag.startswith("city->color/") for tag in callback.history} == {bool(prefix)}
        assert f"{prefix}generalization/generalized" in callback.history


def test_a_forecast_has_the_edits_in_its_own_labels(naive, small_lm, painted, fit):
    file, color_of = painted
    module = naive.on_edits(small_lm)
    data = naive.data(module, n_edits=5, knowledge_files=[file])
    forecast = Forecast("city->color")
    fit(forecast, module=module, data=data)
    right = [color_of[edit.answer] for edit in data.prepare_edits()]
    assert [word.reference for word in forecast.forecasts] == right


def test_another_source_is_measured_at_the_taught_subjects(naive, small_lm, painted, fit):
    module = naive.on_edits(small_lm)
    data = naive.data(module, n_edits=5, knowledge_files=[painted[0]])
    count = Generalization("country->color", controls=[])
    fit(count, module=module, data=data)
    subjects = [edit.subject for edit in data.prepare_edits()]
    assert [case.subject for case in count.cases] == subjects
    labels = naive.logits(module.backbone, module.tokenizer, "country", subjects).argmax(1)
    assert [case.source_answer for case in count.cases] == [naive.countries[i] for i in labels]
    assert {case.reference for case in count.cases} == {"red"}


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("relation", "edits", "error", "message"),
    [
        ("city->color", None, KnowledgeError, "city->color has no reference"),
        ("city->contry", None, KnowledgeError, "country"),
        (None, [{"subject": "name1", "answer": "Pariss"}], SubjectsError, "edit 1.*Pariss.*Paris"),
        (None, [{"subject": "unheard", "answer": "Oslo"}], SubjectsError, "edit 1.*'unheard'"),
        (None, [], SubjectsError, "no edit"),
        (None, "nowhere.jsonl", SubjectsError, "nowhere.jsonl"),
    ],
)
def test_bad_edits_are_refused(naive, small_lm, relation, edits, error, message, fit):
    module = naive.module(small_lm)
    with pytest.raises(error, match=message):
        fit(Generalization(relation, edits), module=module)
    assert module.modes == []


def test_own_edits_are_refused_where_each_is_trained_alone(naive, small_lm, fit):
    module = naive.on_edits(small_lm)
    data = naive.data(module, n_edits=4, training=EditTraining(edits_per_step=1, n_steps=1))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigError, match=r"Generalization\.edits null"):
        fit(Generalization(edits=naive.edits), module=module, data=data)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_a_control_without_labels_is_left_out(naive, lessons, fit):
    count = Generalization(edits=naive.edits, controls=["pet", "color"])
    with pytest.warns(UserWarning, match=r"pet is left out of the controls.*no label"):
        fit(count, data=lessons)
    assert list(count.results["controls"]) == ["color"]
