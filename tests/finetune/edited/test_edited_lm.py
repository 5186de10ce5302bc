"""Shares of edits that plain code made equal those of plain forward passes, one at a time."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
        ["test", "--config", "edited_lm.yaml", f"--trainer.default_root_dir={folder}",
         "--model.n_subjects=400", "--model.n_neighbours=12", *options]
    )  # fmt: skip
    run_folder = Path(cli.trainer.log_dir)
    results = json.loads((run_folder / "results.json").read_text(encoding="utf-8"))
    return SimpleNamespace(
        results=results, cases=read_table(run_folder / "tables" / "cases.csv"), folder=run_folder,
        module=cli.model,
    )  # fmt: skip


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
    learned = [oracle.answer("after", cities[i].format(x), "source") == city for x, city, i in rows]
    right = [
        oracle.is_right(oracle.answer("after", countries[i].format(x), "target"), city)
        for x, city, i in rows
    ]
    own = {"source_learned": share(learned), "generalized": share(right), "n": 4 * N}
    assert found["paraphrases"] == own

    taught = {edit["subject"] for edit in made.edits}
    near = [x for x in sample_subjects(oracle.tokenizer, 12 + N) if x not in taught][:12]
    stays = {
        f"{kind}_unchanged": share([
            oracle.answer("before", prompt.format(x), kind)
            == oracle.answer("after", prompt.format(x), kind) for x in near
        ]) for kind, prompt in (("source", CITY), ("target", COUNTRY))
    }  # fmt: skip
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
            if i % 2 else
            {"case_id": 70 + i, "requested_rewrite": [rewrite | {"question": text}],
             "questions": [question.replace("{}", edit["subject"])],
             "new_answer": sorted(Oracle.countries(relation)[edit["answer"]])[0],
             "new_answer_alias": [], "new_single_hops": [{"answer": edit["answer"]},
             {"answer": sorted(Oracle.countries(relation)[edit["answer"]])[0]}]}
        )  # fmt: skip
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    found = run(tmp_path, f"--model.lm.name_or_path={made.lm}", f"--data.edits_file={file}")
    oracle, edits = Oracle(load()[0], made.model, relation), made.edits[1:6]
    oracle.check(found, edits)
    results = found.results
    assert results["n_edits"] + sum(results["skipped"].values()) == len(rows)
    assert [case["id"] for case in found.cases] == ["71", "72", "73", "74", "75"]
    learned = [oracle.answer("after", prompt.replace("{}", x["subject"]), "source") == x["answer"]
               for x in edits for prompt in asked]  # fmt: skip
    assert results["paraphrases"]["n"] == 10
    assert results["paraphrases"]["source_learned"] == sum(learned) / 10
    right = [oracle.is_right(oracle.answer("after", question.replace("{}", x["subject"]), "target"),
                             x["answer"]) for x in (edits[1], edits[3])]  # fmt: skip
    assert results["questions"] == {"generalized": sum(right) / 2, "n": 2}


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
        shown = [cell.strip() for cell in row.split("|")[3:8]]
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


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_dtypes(made, relation, dtypes, tmp_path):
    found = measure(tmp_path, made, made.lm, *(f"--model.{name}.dtype={dtype}" for name, dtype
                    in zip(("before", "lm"), dtypes, strict=True)))  # fmt: skip
    models = [load(folder, dtype=getattr(torch, dtype))[0]
              for folder, dtype in zip((TINY_WORLD, made.lm), dtypes, strict=True)]  # fmt: skip
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
    with pytest.raises(ConfigError, match=r"labels of model.before are other tokens in .*toy: .*"
                       r"model\.before\.name_or_path"):  # fmt: skip
        measure(tmp_path, made, tmp_path / "toy")


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
    shares = [Oracle(load()[0], model, relation).shares([made.edits[i]])
              for i, model in folders.items()]  # fmt: skip
    for name in ("source_learned", "generalized", "hallucinated", "unchanged"):
        mean = sum(share[name] for share in shares) / 3
        assert found.results[name] == pytest.approx(mean, abs=1e-12), name
    assert [case["id"] for case in found.cases] == ["0", "1", "3"]
    assert found.results["skipped"] == {"there is no edited LM": N - 3}
    assert found.results["n_edits"] + N - 3 == len(made.edits)
    assert len(read_table(found.folder / "tables" / "skipped.csv")) == N - 3
    assert found.results["neighbours"]["n"] == 12
    assert found.results["lm"]["name_or_path"] == str(tmp_path / "lms" / "0" / "model")


@pytest.mark.parametrize(("options", "message"), [
    (["--data.edited_lms=lms/{id}"], r"edited_lms is lms/\{id\}. Write it as FOLDER/\{edit\}"),
    (["--data.edited_lms=no/{edit}"], r"none of the edited LMs; that of .*edits.csv.* no/0"),
    (["--data.edits_file=null"], r"data\.n_edits and data\.edits_file are null"),
    (["--data.edits_file=null", "--data.edited_lms=lms/{edit}"], r"data\.edits_file are null"),
    (["--data.edits_file=null", "--data.n_edits=4"], r"EditedLM needs data\.edits_file"),
    (["--model.n_neighbours=-1"], r"model\.n_neighbours is -1"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(made, options, message, tmp_path):
    with pytest.raises(LincorrError, match=message):
        measure(tmp_path, made, made.lm, *options)


def test_an_lm_that_was_not_edited_is_told(made, tmp_path):
    with pytest.warns(UserWarning, match="same weights: nothing was edited"):
        found = measure(tmp_path, made, "tiny-world").results
    assert found["warning"].endswith("nothing was edited.")
    assert found["unchanged"] + found["generalized"] == found["neighbours"]["source_unchanged"] == 1
    assert found["generalized"] == found["before"]["generalized"]


def test_a_fine_tune_leaves_its_edits_beside_its_lm(tmp_path):
    """And what it measured itself is what is found of its LM."""
    cli = main(
        ["fit", "--config", "source_finetune.yaml", "--model.protocol=joint",
         "--model.save_model=true", "--model.forecast=false", "--data.n_edits=8",
         "--trainer.max_epochs=8", f"--trainer.default_root_dir={tmp_path}"]
    )  # fmt: skip
    folder = Path(cli.trainer.log_dir)
    own = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found = run(tmp_path, f"--model.lm.name_or_path={folder / 'model'}").results
    assert own["source_learned"] > 0.5
    for name in ("n_edits", "source_learned", "generalized", "hallucinated", "unchanged", "random",
                 "constant", "macro", "controls", "skipped"):  # fmt: skip
        assert found[name] == own[name], name


def test_tables_for_the_reader(made, tmp_path):
    found = measure(tmp_path, made, made.lm)
    rows = read_table(found.folder / "tables" / "reach.csv")
    assert [row["prompts"] for row in rows] == ["before", "after", "paraphrases", "neighbours"]
    assert float(rows[1]["source_learned"]) == found.results["source_learned"]
    names = {path.name for path in found.folder.glob("figures/*.png")}
    assert names == {"outcomes.png", "reference_weights.png"}
    main(["report", str(found.folder), "--output", str(tmp_path / "report")])
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "What the edits of city→country reach" in page
