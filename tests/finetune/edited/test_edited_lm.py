"""Shares of edits that plain code made equal those of plain forward passes, one at a time."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score

from lincorr_lightning.cli import main
from lincorr_lightning.errors import ConfigError, LincorrError
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_subjects
from tests.finetune.edited.plain import (
    CITY,
    COUNTRY,
    EDITED,
    TINY_WORLD,
    load,
    logits_after,
    some_edits,
    teach,
    write_edits,
)
from tests.toys import by_reference, read_table, save_toy_lm, write_gguf

COLOR = "{}’s favorite color is"
N = 14


@pytest.fixture(scope="module")
def relation() -> TokenizedRelation:
    return TokenizedRelation.of("city->country", Catalogue.load(), load()[1])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The tiny world with edits that plain code taught it, and their file."""
    folder = tmp_path_factory.mktemp("made")
    model, tokenizer = load()
    edits = some_edits(N, seed=3)
    teach(model, tokenizer, edits, 4, 2e-3)
    model.save_pretrained(folder / "edited")
    tokenizer.save_pretrained(folder / "edited")
    file = write_edits(folder / "edits.csv", edits)
    return SimpleNamespace(model=model, edits=edits, lm=folder / "edited", file=file)


def run(folder: Path, *options: str) -> SimpleNamespace:
    """Run the study; return its results, its cases and its folder."""
    cli = main(
        [
            "test",
            "--config",
            "edited_lm.yaml",
            f"--trainer.default_root_dir={folder}",
            "--model.n_subjects=400",
            "--model.n_neighbours=12",
            *options,
        ]
    )
    run_folder = Path(cli.trainer.log_dir)
    results = json.loads((run_folder / "results.json").read_text(encoding="utf-8"))
    return SimpleNamespace(
        results=results,
        cases=read_table(run_folder / "tables" / "cases.csv"),
        folder=run_folder,
        module=cli.model,
    )


def measure(folder: Path, made: SimpleNamespace, lm: object, *options: str) -> SimpleNamespace:
    return run(folder, f"--model.lm.name_or_path={lm}", f"--data.edits_file={made.file}", *options)


class Oracle:
    """What two LMs answer, by a forward pass of transformers for each prompt."""

    def __init__(self, before: Any, after: Any, relation: TokenizedRelation) -> None:
        self.models, self.tokenizer = {"before": before, "after": after}, load()[1]
        self.ids = {"source": relation.source.token_ids, "target": relation.target.token_ids}
        self.labels = {"source": relation.source.texts, "target": relation.target.texts}
        color = TokenizedRelation.of("city->color", Catalogue.load(), self.tokenizer).target
        self.ids["color"], self.labels["color"] = color.token_ids, color.texts
        self.known = self.countries(relation)

    @staticmethod
    def countries(relation: TokenizedRelation) -> dict[str, Any]:
        facts, cities = relation.relation.reference or {}, relation.relation.source.answers
        return {city.text: facts.get(city.identity, ()) for city in cities}

    def answer(self, stage: str, prompt: str, kind: str) -> str:
        logits = logits_after(self.models[stage], self.tokenizer, prompt)[self.ids[kind]]
        return self.labels[kind][int(logits.argmax())].strip()

    def is_right(self, country: str, city: str) -> bool:
        names = {"USA": "United States", "UK": "United Kingdom"}
        return bool({country, names.get(country, country)} & {*self.known[city]})

    def shares(self, edits: list[dict[str, str]]) -> dict[str, float]:
        counts = dict.fromkeys(
            ("source_learned", "generalized", "hallucinated", "unchanged", "color"), 0
        )
        for edit in edits:
            subject, city = edit["subject"], edit["answer"]
            before, after = (
                self.answer(stage, COUNTRY.format(subject), "target") for stage in self.models
            )
            counts["source_learned"] += self.answer("after", CITY.format(subject), "source") == city
            counts["generalized"] += self.is_right(after, city)
            counts["unchanged"] += before == after and not self.is_right(after, city)
            counts["hallucinated"] += before != after and not self.is_right(after, city)
            color = {self.answer(stage, COLOR.format(subject), "color") for stage in self.models}
            counts["color"] += len(color) == 1
        return {name: count / len(edits) for name, count in counts.items()}

    def check(self, found: SimpleNamespace, edits: list[dict[str, str]]) -> dict[str, float]:
        shares = self.shares(edits)
        for name, share in shares.items():
            own = found.results.get(name)
            own = found.results["controls"]["color"]["unchanged"] if name == "color" else own
            assert own == pytest.approx(share, abs=1e-12), name
        assert found.results["n_edits"] == len(edits)
        return shares


def test_shares_are_those_of_plain_forwards(made, relation, tmp_path):
    found = measure(tmp_path, made, made.lm)
    oracle = Oracle(load()[0], made.model, relation)
    shares = oracle.check(found, made.edits)
    assert 0 < shares["generalized"] < 1 and shares["hallucinated"] and shares["unchanged"]
    assert {key: found.results[key] for key in ("constant", "macro")} == by_reference(found.cases)
    risks = [float(case["vocabulary_risk"]) for case in found.cases]
    auroc = roc_auc_score([case["outcome"] != "generalized" for case in found.cases], risks)
    assert found.results["forecast_default"] == "vocabulary"
    assert found.results["forecast"]["vocabulary"]["auroc"] == pytest.approx(auroc)
    assert found.results["skipped"] == {} and found.results["questions"]["n"] == 0
    for case, edit in zip(found.cases, made.edits, strict=True):
        prompt = CITY.format(edit["subject"])
        assert case["source_before"].strip() == oracle.answer("before", prompt, "source")
        assert case["source_after"].strip() == oracle.answer("after", prompt, "source")
        for stage, model in oracle.models.items():
            p = logits_after(model, oracle.tokenizer, prompt).softmax(0)
            labels = {"new": edit["answer"], "old": case["source_before"].strip()}
            for name, label in labels.items():
                token = oracle.ids["source"][oracle.labels["source"].index(label)]
                own = float(case[f"p_{name}_{stage}"])
                assert own == pytest.approx(float(p[token]), rel=1e-4, abs=1e-9)


def test_other_wordings_and_subjects_without_an_edit(made, relation, tmp_path):
    found = measure(tmp_path, made, made.lm).results
    oracle = Oracle(load()[0], made.model, relation)

    def share(hits: list[bool]) -> float:
        return pytest.approx(sum(hits) / len(hits), abs=1e-12)

    cities, countries = (x.knowledge.paraphrases for x in (relation.source, relation.target))
    assert len(cities) == len(countries) == 4
    rows = [(edit["subject"], edit["answer"], i) for edit in made.edits for i in range(4)]
    for stage, own in (("before", found["before"]), ("after", found)):
        learned = [oracle.answer(stage, cities[i].format(x), "source") == c for x, c, i in rows]
        right = [
            oracle.is_right(oracle.answer(stage, countries[i].format(x), "target"), city)
            for x, city, i in rows
        ]
        shares = {"source_learned": share(learned), "generalized": share(right)}
        assert own["paraphrases"] == shares | {"n": 4 * N, "n_target": 4 * N}

    taught = {edit["subject"] for edit in made.edits}
    near = [x for x in sample_subjects(oracle.tokenizer, 12 + N) if x not in taught][:12]
    stays = {
        f"{kind}_unchanged": share(
            [
                oracle.answer("before", prompt.format(x), kind)
                == oracle.answer("after", prompt.format(x), kind)
                for x in near
            ]
        )
        for kind, prompt in (("source", CITY), ("target", COUNTRY))
    }
    assert found["neighbours"] == {**stays, "n": 12}


def test_prompts_and_questions_of_a_benchmarks_file(made, relation, tmp_path):
    """Rows in CounterFact's and MQuAKE's shape, of which some are no edits: none is dropped."""
    asked = ["The city where {} lives is", "{} lives in the city of"]
    question = "{} lives in the continent where the country is"
    rows: list[dict[str, Any]] = []
    for i, edit in enumerate(made.edits[:6]):
        new = {"str": edit["answer"] if i else "Atlantis"}
        rewrite = {"subject": edit["subject"], "prompt": asked[1], "target_new": new}
        text = asked[0].replace("{}", edit["subject"])
        rows.append(
            {"case_id": 70 + i, "requested_rewrite": rewrite, "paraphrase_prompts": [text]}
            if i % 2
            else {
                "case_id": 70 + i,
                "requested_rewrite": [rewrite | {"question": text}],
                "questions": [question.replace("{}", edit["subject"])],
                "new_answer": sorted(Oracle.countries(relation)[edit["answer"]])[0],
                "new_answer_alias": [],
                "new_single_hops": [
                    {"answer": edit["answer"]},
                    {"answer": sorted(Oracle.countries(relation)[edit["answer"]])[0]},
                ],
            }
        )
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    found = run(tmp_path, f"--model.lm.name_or_path={made.lm}", f"--data.edits_file={file}")
    oracle, edits = Oracle(load()[0], made.model, relation), made.edits[1:6]
    oracle.check(found, edits)
    results = found.results
    assert results["n_edits"] + sum(results["skipped"].values()) == len(rows)
    reach = next(table for table in results["tables"] if table["name"] == "reach")
    assert "Rows that are no edit: 1 (tables/skipped.csv)" in reach["note"]
    prompts = read_table(found.folder / "tables" / "prompts.csv")
    for kind, n in (("paraphrases_source_learned", 5), ("questions_generalized", 2)):
        held = [row["holds"] == "True" for row in prompts if row["kind"] == kind]
        group, name = kind.split("_", 1)
        assert len(held) == n and sum(held) / n == results[group][name]
    assert [case["id"] for case in found.cases] == ["71", "72", "73", "74", "75"]
    for stage, own in (("before", results["before"]), ("after", results)):
        # The prompt that was taught, asked[1], is no other wording.
        learned = [
            oracle.answer(stage, asked[0].replace("{}", x["subject"]), "source") == x["answer"]
            for x in edits
        ]
        assert own["paraphrases"]["n"] == 5 and own["paraphrases"]["n_target"] == 20
        assert own["paraphrases"]["source_learned"] == sum(learned) / 5
        answers = [
            oracle.answer(stage, question.replace("{}", x["subject"]), "target")
            for x in (edits[1], edits[3])
        ]
        right = [
            oracle.is_right(*pair)
            for pair in zip(answers, (edits[1]["answer"], edits[3]["answer"]), strict=True)
        ]
        assert own["questions"] == {"generalized": sum(right) / 2, "n": 2}


def test_paraphrases_of_own_rows(made, relation, tmp_path):
    wording = "The home of {} is the city of"
    rows = [
        edit | {"paraphrases": [text.format(edit["subject"]) for text in (wording, CITY)]}
        for edit in made.edits
    ]
    file = tmp_path / "edits.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    found = run(tmp_path, f"--model.lm.name_or_path={made.lm}", f"--data.edits_file={file}")
    oracle, own = Oracle(load()[0], made.model, relation), found.results["paraphrases"]
    learned = [
        oracle.answer("after", wording.format(x["subject"]), "source") == x["answer"]
        for x in made.edits
    ]
    assert (own["n"], own["source_learned"]) == (N, sum(learned) / N)


def test_an_answer_of_several_tokens_is_shown_as_its_label_too(made, tmp_path):
    file = tmp_path / "towns.yaml"
    file.write_text(
        "{version: 1, source: made up, entities: {town: {Paris Hill: {country: [France]}, "
        "Rome Valley: {country: [Italy]}}}, knowledge: {town: {family: attribute, language: en, "
        "template: '{} lives in the city of', answers: town}}}"
    )
    rows = [{"subject": made.edits[0]["subject"], "answer": "Paris Hill"}]
    found = run(
        tmp_path,
        f"--data.edits_file={write_edits(tmp_path / 'edits.csv', rows)}",
        f"--data.knowledge_files=[{file}]",
        "--data.relation=town->country",
    )
    assert found.cases[0]["source_answer"] == "Paris Hill"
    assert found.cases[0]["source_label"] == "Paris"
    learned = found.cases[0]["source_after"] == found.cases[0]["source_label"]
    assert found.cases[0]["source_learned"] == str(learned)


def test_a_taught_answer_that_led_before_has_no_old_one(made, relation, tmp_path):
    oracle = Oracle(load()[0], made.model, relation)
    (same, first), *_ = [
        (edit, city)
        for edit in made.edits
        if (city := oracle.answer("before", CITY.format(edit["subject"]), "source"))
        != edit["answer"]
    ]
    rows = [same | {"answer": first}, *(x for x in made.edits if x != same)]
    file = write_edits(tmp_path / "edits.csv", rows)
    found = run(tmp_path, f"--model.lm.name_or_path={made.lm}", f"--data.edits_file={file}")
    assert found.cases[0]["source_label"] == found.cases[0]["source_before"]
    assert found.cases[0]["p_old_after"] == found.cases[0]["p_old_before"] == ""
    for stage, own in (("before", found.results["before"]), ("after", found.results)):
        old = [float(p) for case in found.cases if (p := case[f"p_old_{stage}"])]
        assert len(old) == sum(x["source_label"] != x["source_before"] for x in found.cases) < N
        assert own["p_old"] == pytest.approx(sum(old) / len(old), rel=1e-9)


def test_the_packaged_adapter_and_its_edits(relation, tmp_path):
    """As the config is shipped; the oracle lets peft's own forward add the adapter."""
    from peft import PeftModel

    found = run(tmp_path)
    edits = read_table(EDITED / "edits.csv")
    Oracle(load()[0], PeftModel.from_pretrained(load()[0], EDITED).eval(), relation).check(
        found, edits
    )
    page = (Path(__file__).parents[3] / "docs" / "edited_lm.md").read_text(encoding="utf-8")
    rows = page.split("<!-- edited: begin -->\n")[1].splitlines()[2:4]
    for row, stage in zip(rows, (found.results["before"], found.results), strict=True):
        shown = [cell.strip() for cell in row.split("|")[4:9]]
        names = ("source_learned", "generalized", "p_new", "p_old", "efficacy")
        assert shown == [f"{stage[name]:.0%}" for name in names]
    assert found.results["lm_before"]["name_or_path"] == "tiny-world"
    assert found.results["lm"]["name_or_path"] == "tiny-world-edited"


def test_gguf_files(made, relation, tmp_path):
    pytest.importorskip("gguf", reason="install lincorr-lightning[gguf]")
    before = load()[0]
    write_gguf(tmp_path / "before.gguf", before)
    write_gguf(tmp_path / "edited.gguf", made.model)
    options = [f"--model.{one}.tokenizer={TINY_WORLD}" for one in ("lm", "before")]
    options.append(f"--model.before.name_or_path={tmp_path / 'before.gguf'}")
    found = measure(tmp_path, made, tmp_path / "edited.gguf", *options)
    Oracle(before, made.model, relation).check(found, made.edits)
    assert not found.results["warning"]
    write_gguf(tmp_path / "edited.gguf", made.model, "Q8_0")
    with pytest.warns(UserWarning, match="model.before and model.lm have .*quantizations"):
        found = measure(tmp_path, made, tmp_path / "edited.gguf", *options)
    assert found.results["lm"]["quantization"] == ["Q8_0"]


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_dtypes(made, relation, dtypes, tmp_path):
    found = measure(
        tmp_path,
        made,
        made.lm,
        *(
            f"--model.{name}.dtype={dtype}"
            for name, dtype in zip(("before", "lm"), dtypes, strict=True)
        ),
    )
    models = [
        load(folder, dtype=getattr(torch, dtype))[0]
        for folder, dtype in zip((TINY_WORLD, made.lm), dtypes, strict=True)
    ]
    Oracle(*models, relation).check(found, made.edits)
    assert ("rounding" in found.results["warning"]) == (dtypes[0] != dtypes[1])


def test_a_resized_vocabulary_is_the_same_lm(made, relation, tmp_path):
    model, tokenizer = load(made.lm)
    tokenizer.add_tokens(["<new>"])
    model.resize_token_embeddings(len(tokenizer) + 7)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "resized")
    found = measure(tmp_path, made, tmp_path / "resized")
    Oracle(load()[0], made.model, relation).check(found, made.edits)


def test_an_lm_of_other_tokens_is_refused(made, tmp_path):
    save_toy_lm(tmp_path / "toy")
    with pytest.raises(
        ConfigError,
        match=r"labels of model.before are other tokens in .*toy: .*"
        r"model\.before\.name_or_path",
    ):
        measure(tmp_path, made, tmp_path / "toy")


def test_an_lm_of_fewer_tokens_is_refused_before_weights_are_read(made, tmp_path, monkeypatch):
    model, tokenizer = load(made.lm)
    model.resize_token_embeddings(len(tokenizer) - 9)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "lms" / "3")
    monkeypatch.setattr(LanguageModel, "load", lambda _: pytest.fail("weights are read"))
    message = rf"has {len(tokenizer) - 9:,} tokens, and model.before has {len(tokenizer):,}"
    with pytest.raises(ConfigError, match=rf"model\.lm: .*lms/3 {message}\. Pass the LM that was"):
        measure(tmp_path, made, tmp_path / "lms" / "3")
    many = (
        measure,
        tmp_path,
        made,
        "tiny-world-edited",
        f"--data.edited_lms={tmp_path}/lms/{{edit}}",
    )
    for name in ("1", "2"):
        (tmp_path / "lms" / name).symlink_to(made.lm)
    with pytest.raises(ConfigError, match=rf"edits\.csv, .*5: .*lms/3 {message}"):
        many[0](*many[1:])
    (tmp_path / "lms" / "2").unlink()
    (tmp_path / "lms" / "2").mkdir()
    with pytest.raises(
        ConfigError, match=r"edits\.csv, .*4: the folder .*2 of the LM has no config"
    ):
        many[0](*many[1:])


def test_an_lm_for_each_edit(made, relation, tmp_path, monkeypatch):
    """Each edit counts in its own LM; only one LM is in memory at a time."""
    folders = {}
    for i in (0, 1, 3):
        model, tokenizer = load()
        teach(model, tokenizer, made.edits[i : i + 1], 3, 1e-3)
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "lms" / str(i) / "model")
        folders[i] = model
    loaded: list[LanguageModel] = []
    load_lm = LanguageModel.load

    def recorded(lm: LanguageModel) -> LanguageModel:
        assert not any(other.is_loaded for other in loaded if other is not lm)
        loaded.append(lm)
        return load_lm(lm)

    monkeypatch.setattr(LanguageModel, "load", recorded)
    where = f"--data.edited_lms={tmp_path}/lms/{{edit}}/model"
    found = measure(tmp_path, made, "tiny-world-edited", where)
    assert len({id(lm) for lm in loaded}) == 4
    shares = [
        Oracle(load()[0], model, relation).shares([made.edits[i]]) for i, model in folders.items()
    ]
    for name in ("source_learned", "generalized", "hallucinated", "unchanged"):
        mean = sum(share[name] for share in shares) / 3
        assert found.results[name] == pytest.approx(mean, abs=1e-12), name
    assert [case["id"] for case in found.cases] == ["0", "1", "3"]
    assert found.results["skipped"] == {"there is no edited LM": N - 3}
    assert found.results["n_edits"] + N - 3 == len(made.edits)
    assert len(read_table(found.folder / "tables" / "skipped.csv")) == N - 3
    assert found.results["neighbours"]["n"] == 12
    assert found.results["lm"]["name_or_path"] == str(tmp_path / "lms" / "0" / "model")

    copies = tmp_path / "copies"
    for i, folder in ((0, made.lm), (1, TINY_WORLD)):
        (copies / str(i)).mkdir(parents=True)
        (copies / str(i) / "model").symlink_to(folder)
    with pytest.warns(UserWarning, match=r"1 of 2 edited LMs, such as .*1/model, have the same w"):
        others = measure(tmp_path, made, "tiny-world-edited", where.replace("lms/{", "copies/{"))
    assert [x.results["edited_lms"]["n"] for x in (found, others)] == [3, 2]
    assert found.results["edited_lms"]["fingerprint"] != others.results["edited_lms"]["fingerprint"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["1", "1", "2"], r"1 and .*2 have one id, '1', and so one LM, .*lms/1\. Give each row"),
        (["1", None, "2"], r"1 and .*2 have one id, '1'"),
        (
            ["run/0", "../0", ".."],
            r"that of .*1 would be .*lms/run/0 \(its id is no name of a folder",
        ),
        (["run/0", "..", "0"], {"its id is no name of a folder": 2}),
    ],
)
def test_ids_that_name_no_lm_of_their_own(made, ids, expected, tmp_path):
    rows = [edit | ({"id": id} if id else {}) for edit, id in zip(made.edits, ids, strict=False)]
    file = tmp_path / "edits.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "lms" / "run").mkdir(parents=True)
    for name in ("0", "1", "2", "run/0"):
        (tmp_path / "lms" / name).symlink_to(made.lm)
    options = f"--data.edited_lms={tmp_path}/lms/{{edit}}", f"--data.edits_file={file}"
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            run(tmp_path, *options)
    else:
        found = run(tmp_path, *options)
        assert found.results["skipped"] == expected and found.results["n_edits"] == 1
        assert [case["subject"] for case in found.cases] == [rows[2]["subject"]]


def test_rows_that_are_no_edits_have_no_lm(made, tmp_path):
    file = tmp_path / "edits.json"
    file.write_text(json.dumps([{"note": 1}, {"note": 2}, made.edits[2] | {"id": "0"}]))
    (tmp_path / "lms").mkdir()
    (tmp_path / "lms" / "0").symlink_to(made.lm)
    options = f"--data.edited_lms={tmp_path}/lms/{{edit}}", f"--data.edits_file={file}"
    found = run(tmp_path, *options)
    assert found.results["skipped"] == {"it lacks the fields of an edit": 2}
    assert [case["subject"] for case in found.cases] == [made.edits[2]["subject"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data.edited_lms=lms/{id}"], r"edited_lms is lms/\{id\}. Write it as FOLDER/\{edit\}"),
        (["--data.edited_lms=no/{edit}"], r"none of the edited LMs; that of .*edits.csv.* no/0"),
        (["--data.edits_file=null"], r"data\.edits_file is null. Name the file of the edits"),
        (
            [
                "--data.edits_file=null",
                "--data.edited_lms=lms/{edit}",
                "--model.lm.name_or_path=tiny-world-edited",
            ],
            r"data\.edits_file is null",
        ),
        (["--data.edits_file=null", "--data.n_edits=4"], r"data\.edits_file is null"),
        (["--model.n_neighbours=-1"], r"model\.n_neighbours is -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(made, options, message, tmp_path):
    with pytest.raises(LincorrError, match=message):
        measure(tmp_path, made, made.lm, *options)


@pytest.mark.parametrize("verb", ["fit", "validate", "predict"])
def test_it_is_run_by_test_alone(verb):
    with pytest.raises(ConfigError, match=rf"EditedLM has no `lincorr {verb}`. Run `lincorr test`"):
        main([verb, "--config", "edited_lm.yaml"])


def test_warnings_speak_of_edits_that_were_made(made, tmp_path):
    rows = [*made.edits, made.edits[0] | {"answer": made.edits[1]["answer"]}]
    file = write_edits(tmp_path / "edits.csv", rows)
    with pytest.warns(UserWarning) as told:
        run(tmp_path, f"--model.lm.name_or_path={made.lm}", f"--data.edits_file={file}")
    texts = " ".join(str(one.message) for one in told)
    assert "In one LM, these contradict each other." in texts
    assert "whatever training does" not in texts and "protocol" not in texts


def test_an_lm_that_was_not_edited_is_told(made, tmp_path):
    with pytest.warns(UserWarning, match="same weights: nothing was edited"):
        found = measure(tmp_path, made, "tiny-world").results
    assert found["warning"].endswith("nothing was edited.")
    assert found["unchanged"] + found["generalized"] == found["neighbours"]["source_unchanged"] == 1
    assert found["generalized"] == found["before"]["generalized"]


def test_a_fine_tune_leaves_its_edits_beside_its_lm(tmp_path):
    """And what it measured itself is what is found of its LM."""
    cli = main(
        [
            "fit",
            "--config",
            "source_finetune.yaml",
            "--model.protocol=joint",
            "--model.save_model=true",
            "--data.n_edits=8",
            "--trainer.max_epochs=8",
            f"--trainer.default_root_dir={tmp_path}",
        ]
    )
    folder = Path(cli.trainer.log_dir)
    own = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found = run(tmp_path, f"--model.lm.name_or_path={folder / 'model'}").results
    assert own["source_learned"] > 0.5
    for name in (
        "n_edits",
        "source_learned",
        "generalized",
        "hallucinated",
        "unchanged",
        "random",
        "constant",
        "macro",
        "controls",
        "skipped",
    ):
        assert found[name] == own[name], name


def test_tables_for_the_reader(made, tmp_path):
    found = measure(tmp_path, made, made.lm)
    rows = read_table(found.folder / "tables" / "reach.csv")
    names = ["before", "after", "paraphrases before", "paraphrases", "neighbours"]
    assert [row["prompts"] for row in rows] == names
    assert rows[3]["n"] == rows[3]["n_target"] == str(4 * N)
    assert float(rows[1]["source_learned"]) == found.results["source_learned"]
    figures = {path.name for path in found.folder.glob("figures/*.png")}
    assert figures == {"outcomes.png", "reference_weights.png"}
    main(["report", str(found.folder), "--output", str(tmp_path / "report")])
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "What the edits of city→country reach" in page
