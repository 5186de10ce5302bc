"""What edits do to the target, against counting by hand; `test_any_loop` counts joint edits."""

import json

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger

from lincorr_lightning.callbacks import Forecast, Generalization
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.finetune.batches import EditTraining
from tests.callbacks import naive

TRAINING = EditTraining(edits_per_step=2, n_steps=3)


@pytest.fixture
def lessons(small_lm):
    return naive.lessons(naive.Module(small_lm).tokenizer)


def test_edits_of_a_benchmark_s_file(small_lm, lessons, own_map, fit, tmp_path):
    records = [
        {"requested_rewrite": {"subject": edit["subject"], "target_new": {"str": edit["answer"]}}}
        for edit in [*naive.EDITS, {"subject": "name300", "answer": "Atlantis"}]
    ]
    (tmp_path / "counterfact.json").write_text(json.dumps(records))
    results = []
    for edits in (naive.EDITS, str(tmp_path / "counterfact.json")):
        count = Generalization("city->country", edits, linear_map=own_map.folder)
        fit(count, module=naive.Module(small_lm), data=lessons)
        results.append(count.results)
        weights = [
            own_map.weight[naive.COUNTRIES.index(naive.PLACES[city]), naive.CITIES.index(city)]
            for city in (edit["answer"] for edit in naive.EDITS)
        ]
        assert [case.weight_reference for case in count.cases] == pytest.approx(weights)
    reason = "its answer is no label of this LM (not one of city)"
    assert [each.pop("skipped") for each in results] == [{}, {reason: 1}]
    assert results[0] == results[1]
    assert results[0]["random"] == pytest.approx(1 / 11)


def test_of_no_learned_edit_there_is_no_share(small_lm, lessons, own_map, fit):
    module = naive.Module(small_lm, lr=0.0)
    subjects = [edit["subject"] for edit in naive.EDITS]
    known = naive.logits(module.backbone, module.tokenizer, "city", subjects).argmax(1)
    pairs = zip(naive.EDITS, known, strict=True)
    edits = [edit for edit, i in pairs if edit["answer"] != naive.CITIES[i]]
    count = Generalization("city->country", edits, linear_map=own_map.folder)
    fit(count, module=module, data=lessons)
    assert count.results["source_learned"] == 0
    for name in ("generalized_of_learned", "hallucinated_of_learned"):
        assert count.results[name] is None
        assert f"generalization/{name}" not in count.history


def test_a_reference_of_an_edit_replaces_that_of_the_relation(fit):
    """A relation without a reference can be measured too."""
    edits = [
        {"subject": "name1", "answer": "Paris", "reference": "red"},
        {"subject": "name2", "answer": "Tokyo", "reference": ["blue", "green"]},
    ]
    count = Generalization("city->color", edits, controls=["country"])
    fit(count)
    references = [set(case.reference.split("|")) for case in count.cases]
    assert references == [{"red"}, {"blue", "green"}]
    assert count.results["random"] == pytest.approx((1 / 6 + 2 / 6) / 2)
    assert list(count.results["controls"]) == ["country"]


# -- subjects without an edit ----------------------------------------------------------------------


def leading(model, tokenizer, subjects):
    answers = naive.answers(model, tokenizer, subjects)
    return {what: logits.argmax(1) for what, logits in answers.items()}


N_EDITS, N_STEPS = 8, 5
STEPS = (1, 2, 3, N_STEPS)


def test_leak_of_independent_edits_by_step_as_by_hand(small_lm, own_map, fit, tmp_path):
    """One prompt at a time, in the LM of each edit.

    Several countries are right for each edit, so that those of a random LM generalize.
    """
    rows = [
        {
            "subject": f"name{i}",
            "answer": naive.CITIES[i % 12],
            "reference": [naive.COUNTRIES[(i % 5 * 2 + j) % 11] for j in range(4)],
        }
        for i in range(N_EDITS)
    ]
    (tmp_path / "edits.json").write_text(json.dumps(rows))
    count = Generalization(linear_map=own_map.folder, edit_steps=[1, 2, 3], n_others=6)
    module = naive.RecordedEdits(small_lm)
    module.others = lambda: count.others
    training = EditTraining(edits_per_step=3, n_steps=N_STEPS)
    file = str(tmp_path / "edits.json")
    data = naive.edits_data(module, edits_file=file, n_edits=None, training=training)
    fit(count, module=module, data=data)
    assert not {*count.others} & {row["subject"] for row in rows}
    assert count.results["neighbours"]["n"] == count.results["n_others"] == len(count.others) == 6
    base = naive.Module(small_lm)
    people = [*(row["subject"] for row in rows), *count.others]
    was = leading(base.backbone, base.tokenizer, people)["country"]

    def numbers(number, step):
        right = tuple(naive.COUNTRIES.index(country) for country in rows[number]["reference"])
        answers = {kind: x.argmax(1) for kind, x in module.read[number, step].items()}
        before = [was[number], *was[N_EDITS:]]
        pairs = zip(answers["country"], before, strict=True)
        hits = [now in right and then not in right for now, then in pairs]
        learned = naive.CITIES[answers["city"][0]] == rows[number]["answer"]
        return right, learned, hits[0], np.mean(hits[1:])

    def by_country(rows, value):
        of_country = {row[0]: [value(*x[1:]) for x in rows if x[0] == row[0]] for row in rows}
        return np.mean([np.mean(values) for values in of_country.values()])

    def check(found, rows):
        assert found["source_learned"] == pytest.approx(np.mean([row[1] for row in rows]))
        assert found["generalized"] == pytest.approx(np.mean([row[2] for row in rows]))
        assert found["leak"] == pytest.approx(by_country(rows, lambda _, own, leak: leak))
        specific = by_country(rows, lambda _, own, leak: own - leak)
        assert found["specific"] == pytest.approx(specific)

    results = count.results
    assert [row["step"] for row in results["by_step"]] == [*STEPS]
    at = {step: [numbers(i, step) for i in range(N_EDITS)] for step in STEPS}
    for row in results["by_step"]:
        check(row, at[row["step"]])
    first = [next((s for s in at if at[s][i][1]), None) for i in range(N_EDITS)]
    learned = [(s, at[s][i]) for i, s in enumerate(first) if s]
    assert learned and results["at_learned"]["n_edits"] == len(learned)
    assert results["at_learned"]["step"] == pytest.approx(np.mean([s for s, _ in learned]))
    check(results["at_learned"], [row for _, row in learned])
    check({**results, **{k: results[k]["mean"] for k in ("leak", "specific")}}, at[N_STEPS])
    assert any(leak for *_, leak in at[N_STEPS]) and any(own for _, _, own, _ in at[N_STEPS])


# -- several relations, and runs without edits -----------------------------------------------------


@pytest.fixture
def painted(tmp_path):
    """Facts that give every city of the small LM a colour, and every country red."""
    color_of = {city: naive.COLORS[i % 6] for i, city in enumerate(naive.CITIES)}
    facts = {city: {"color": color} for city, color in color_of.items()}
    facts = {"city": facts, "country": {country: {"color": "red"} for country in naive.COUNTRIES}}
    file = tmp_path / "painted.yaml"
    file.write_text(yaml.safe_dump({"version": 1, "source": "made up", "entities": facts}))
    return str(file), color_of


def test_several_relations(small_lm, own_map, tmp_path, painted, fit):
    """The first has the plain names; the edits are those of the run, in labels of each relation."""
    file, color_of = painted
    logger = CSVLogger(tmp_path, name="", version="run")
    own = Generalization(linear_map=own_map.folder, controls=[])
    other = Generalization("city->color", controls=["country"])
    forecast = Forecast("city->color")
    module = naive.OnEdits(small_lm, lr=0.01)
    data = naive.edits_data(module, n_edits=6, knowledge_files=[file], batch_size=3)
    fit(own, other, forecast, logger=logger, module=module, data=data)
    tables = {path.name for path in (tmp_path / "run" / "tables").iterdir()}
    assert {"cases.csv", "cases_2.csv"} <= tables
    right = [(edit.subject, color_of[edit.answer]) for edit in data.resolve().edits]
    assert [(case.subject, case.reference) for case in other.cases] == right
    assert [(word["subject"], word["reference"]) for word in forecast.state.words] == right
    for callback, prefix in ((own, ""), (other, "city->color/")):
        assert {tag.startswith("city->color/") for tag in callback.history} == {bool(prefix)}
        assert f"{prefix}generalization/generalized" in callback.history


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "relation", "edits", "error", "message"),
    [
        (Generalization, "city->country", None, ConfigError, r"Generalization\.edits is null"),
        (Forecast, "city->country", None, ConfigError, r"Forecast\.edits is null"),
        (Generalization, None, [("name1", "Pariss")], SubjectsError, "edit 1.*Pariss.*Paris"),
        (Generalization, None, [("unheard", "Oslo")], SubjectsError, "edit 1.*'unheard'"),
    ],
)
def test_bad_edits_are_refused(small_lm, kind, relation, edits, error, message, fit):
    options = {}
    if edits:
        options["edits"] = [{"subject": subject, "answer": answer} for subject, answer in edits]
    module = naive.Module(small_lm)
    with pytest.raises(error, match=message):
        fit(kind(relation, **options), module=module)
    assert module.modes == []


def test_edits_of_another_source_or_that_are_trained_alone(small_lm, fit):
    module = naive.OnEdits(small_lm)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for count, message in (
        (Generalization(edits=naive.EDITS), r"Generalization\.edits null"),
        (Generalization("country->color"), "no edits of country"),
    ):
        with pytest.raises(ConfigError, match=message):
            fit(count, module=module, data=naive.edits_data(module, n_edits=4, training=TRAINING))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_a_control_without_labels_is_left_out(lessons, fit):
    count = Generalization(edits=naive.EDITS, controls=["pet", "color"])
    with pytest.warns(UserWarning, match=r"pet is left out of the controls.*no label"):
        fit(count, data=lessons)
    assert list(count.results["controls"]) == ["color"]
