"""Shares of edits that plain code made equal those of plain forward passes, one at a time."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats

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

pytestmark = pytest.mark.slow

COLOR = "{}’s favorite color is"
N = 14
N_NEIGHBOURS = 12


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


def run(folder: Path, lm: object, edits: object, *options: str) -> SimpleNamespace:
    """Run the study on an edited LM and a file of edits; return its results, cases and folder."""
    arguments = [f"--model.lm.name_or_path={lm}", f"--data.edits_file={edits}"]
    arguments += [f"--trainer.default_root_dir={folder}", "--model.n_subjects=150"]
    arguments += [f"--model.n_others={N_NEIGHBOURS}", *options]
    cli = main(["test", "--config", "edited_lm.yaml", *arguments])
    run_folder = Path(cli.trainer.log_dir)
    return SimpleNamespace(
        results=json.loads((run_folder / "results.json").read_text(encoding="utf-8")),
        cases=read_table(run_folder / "tables" / "cases.csv"),
        folder=run_folder,
    )


class Oracle:
    """What two LMs answer, by a forward pass of transformers for each prompt."""

    def __init__(self, before: Any, after: Any, relation: TokenizedRelation) -> None:
        self.models, self.tokenizer = {"before": before, "after": after}, load()[1]
        color = TokenizedRelation.of("city->color", Catalogue.load(), self.tokenizer).target
        domains = {"source": relation.source, "target": relation.target, "color": color}
        self.ids = {kind: domain.token_ids for kind, domain in domains.items()}
        self.labels = {kind: domain.texts for kind, domain in domains.items()}
        facts, cities = relation.relation.reference or {}, relation.relation.source.answers
        self.known = {city.text: facts.get(city.identity, ()) for city in cities}

    def answer(self, stage: str, prompt: str, kind: str) -> str:
        logits = logits_after(self.models[stage], self.tokenizer, prompt)[self.ids[kind]]
        return self.labels[kind][int(logits.argmax())].strip()

    def is_right(self, country: str, city: str) -> bool:
        names = {"USA": "United States", "UK": "United Kingdom"}
        return bool({country, names.get(country, country)} & {*self.known[city]})

    def shares(self, edits: list[dict[str, str]]) -> dict[str, float]:
        rows = []
        for edit in edits:
            subject, city = edit["subject"], edit["answer"]
            before, after = (
                self.answer(stage, COUNTRY.format(subject), "target") for stage in self.models
            )
            was_right = self.is_right(before, city)
            right = self.is_right(after, city) and not was_right
            colors = {self.answer(stage, COLOR.format(subject), "color") for stage in self.models}
            rows.append(
                {
                    "source_learned": self.answer("after", CITY.format(subject), "source") == city,
                    "generalized": right,
                    "right_before": was_right,
                    "unchanged": before == after and not was_right,
                    "hallucinated": before != after and not was_right and not right,
                    "color": len(colors) == 1,
                }
            )
        return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}

    def leak(self, edits: list[dict[str, str]], people: list[str]) -> dict[str, list[float]]:
        """Of each edit, the share of other people of whom its country leads now, by reference."""
        answers = [
            [self.answer(stage, COUNTRY.format(person), "target") for stage in self.models]
            for person in people
        ]
        leaks: dict[str, list[float]] = {}
        for edit in edits:
            city = edit["answer"]
            hits = [
                self.is_right(now, city) and not self.is_right(was, city) for was, now in answers
            ]
            leaks.setdefault(str(sorted(self.known[city])), []).append(sum(hits) / len(hits))
        return leaks

    def check(self, found: SimpleNamespace, edits: list[dict[str, str]]) -> dict[str, float]:
        shares = self.shares(edits)
        results = found.results | {"color": found.results["controls"]["color"]["unchanged"]}
        assert {name: results[name] for name in shares} == pytest.approx(shares, abs=1e-12)
        assert results["n_edits"] == len(edits)
        return shares


def test_shares_are_those_of_plain_forwards(made, relation, tmp_path):
    found = run(tmp_path, made.lm, made.file)
    oracle = Oracle(load()[0], made.model, relation)
    shares = oracle.check(found, made.edits)
    assert 0 < shares["generalized"] < 1 and shares["hallucinated"] and shares["unchanged"]
    assert {key: found.results[key] for key in ("constant", "macro")} == by_reference(found.cases)
    for case, edit in zip(found.cases, made.edits, strict=True):
        for stage in oracle.models:
            city = oracle.answer(stage, CITY.format(edit["subject"]), "source")
            assert case[f"source_{stage}"].strip() == city

    def share(hits: list[bool]) -> float:
        return pytest.approx(sum(hits) / len(hits), abs=1e-12)

    cities, countries = (x.knowledge.paraphrases for x in (relation.source, relation.target))
    for stage, own in (("before", found.results["before"]), ("after", found.results)):
        learned, right = [], []
        for edit in made.edits:
            subject, city = edit["subject"], edit["answer"]
            for text in cities:
                learned.append(oracle.answer(stage, text.format(subject), "source") == city)
            for text in countries:
                country = oracle.answer(stage, text.format(subject), "target")
                right.append(oracle.is_right(country, city))
        shares = {"source_learned": share(learned), "generalized": share(right)}
        assert own["paraphrases"] == shares | {"n": len(learned), "n_target": len(right)}
        countries_of_edits = [
            oracle.answer(stage, COUNTRY.format(edit["subject"]), "target") for edit in made.edits
        ]
        hits = map(oracle.is_right, countries_of_edits, (edit["answer"] for edit in made.edits))
        assert own["generalized"] == share(list(hits))

    taught = {edit["subject"] for edit in made.edits}
    sampled = sample_subjects(oracle.tokenizer, N_NEIGHBOURS + N)
    near = [x for x in sampled if x not in taught][:N_NEIGHBOURS]
    stays = {
        f"{kind}_unchanged": share(
            [
                len({oracle.answer(s, prompt.format(x), kind) for s in oracle.models}) == 1
                for x in near
            ]
        )
        for kind, prompt in (("source", CITY), ("target", COUNTRY))
    }
    assert found.results["neighbours"] == {**stays, "n": N_NEIGHBOURS}
    leaks = oracle.leak(made.edits, near)
    means = [sum(of_country) / len(of_country) for of_country in leaks.values()]
    leak = found.results["leak"]
    assert leak["mean"] == share(means) and sum(means) > 0
    interval = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    assert (leak["low"], leak["high"]) == pytest.approx(tuple(interval))
    generalized = found.results["macro"]["generalized"]
    assert found.results["specific"]["mean"] == pytest.approx(generalized - leak["mean"])
    rows = read_table(found.folder / "tables" / "reach.csv")
    names = ["before", "after", "paraphrases before", "paraphrases", "neighbours"]
    assert [row["prompts"] for row in rows] == names
    assert float(rows[1]["source_learned"]) == found.results["source_learned"]


def test_wordings_of_the_rows(made, relation, tmp_path):
    """Those of a file in place of the kind of knowledge's; rows that are no edits are counted."""
    wording = "The home of {} is the city of"
    rows = [
        edit | {"paraphrases": [text.format(edit["subject"]) for text in (wording, CITY)]}
        for edit in made.edits
    ]
    rows.append({"subject": "Ada", "answer": "Atlantis"})
    file = tmp_path / "edits.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    found = run(tmp_path, made.lm, file)
    oracle, own = Oracle(load()[0], made.model, relation), found.results["paraphrases"]
    learned = [
        oracle.answer("after", wording.format(x["subject"]), "source") == x["answer"]
        for x in made.edits
    ]
    assert (own["n"], own["source_learned"]) == (N, sum(learned) / N)
    reach = next(table for table in found.results["tables"] if table["name"] == "reach")
    assert "Rows that are no edit: 1 (tables/skipped.csv)" in reach["note"]


def test_the_packaged_adapter_and_its_edits(relation, tmp_path):
    """As the config is shipped; the oracle lets peft's own forward add the adapter."""
    from peft import PeftModel

    found = run(tmp_path, "tiny-world-edited", "null")
    edited = PeftModel.from_pretrained(load()[0], EDITED).eval()
    Oracle(load()[0], edited, relation).check(found, read_table(EDITED / "edits.csv"))
    names = [found.results[lm]["name_or_path"] for lm in ("lm_before", "lm")]
    assert names == ["tiny-world", "tiny-world-edited"]


def test_gguf_files_and_dtypes(made, relation, tmp_path):
    pytest.importorskip("gguf", reason="install lincorr-lightning[gguf]")
    before = load()[0]
    write_gguf(tmp_path / "before.gguf", before)
    write_gguf(tmp_path / "edited.gguf", made.model)
    options = [f"--model.{one}.tokenizer={TINY_WORLD}" for one in ("lm", "before")]
    options.append(f"--model.before.name_or_path={tmp_path / 'before.gguf'}")
    found = run(tmp_path, tmp_path / "edited.gguf", made.file, *options)
    Oracle(before, made.model, relation).check(found, made.edits)
    assert not found.results["warning"]
    write_gguf(tmp_path / "edited.gguf", made.model, "Q8_0")
    with pytest.warns(UserWarning, match=r"model.before and .*quantizations"):
        found = run(tmp_path, tmp_path / "edited.gguf", made.file, *options)
    assert found.results["lm"]["quantization"] == ["Q8_0"]
    found = run(tmp_path, made.lm, made.file, "--model.lm.dtype=bfloat16")
    half = load(made.lm, dtype=torch.bfloat16)[0]
    Oracle(load(dtype=torch.float32)[0], half, relation).check(found, made.edits)
    assert "rounding" in found.results["warning"]


def resized(folder: Path, lm: Path, change: int) -> Path:
    model, tokenizer = load(lm)
    model.resize_token_embeddings(len(tokenizer) + change)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


def test_lms_of_other_tokens_are_refused(made, relation, tmp_path):
    found = run(tmp_path, resized(tmp_path / "larger", made.lm, 7), made.file)
    Oracle(load()[0], made.model, relation).check(found, made.edits)
    way_out = r"model\.before\.name_or_path"
    save_toy_lm(tmp_path / "toy")
    with pytest.raises(ConfigError, match=rf"are other tokens in .*toy: .*{way_out}"):
        run(tmp_path, tmp_path / "toy", made.file)
    smaller = resized(tmp_path / "smaller", made.lm, -9)
    with pytest.raises(ConfigError, match=rf"model\.lm: .*smaller has .* tokens.*{way_out}"):
        run(tmp_path, smaller, made.file)


def test_an_lm_for_each_edit(made, relation, tmp_path, monkeypatch):
    """Each edit counts in its own LM; only one LM is in memory at a time."""
    models = {}
    for i in (0, 1, 3):
        model, tokenizer = load()
        teach(model, tokenizer, made.edits[i : i + 1], 3, 1e-3)
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "lms" / str(i) / "model")
        models[i] = model
    loaded: list[LanguageModel] = []
    load_lm = LanguageModel.load

    def recorded(lm: LanguageModel) -> LanguageModel:
        assert not any(other.is_loaded for other in loaded if other is not lm)
        loaded.append(lm)
        return load_lm(lm)

    monkeypatch.setattr(LanguageModel, "load", recorded)
    where = f"--data.edited_lms={tmp_path}/lms/{{edit}}/model"
    found = run(tmp_path, "tiny-world-edited", made.file, where)
    assert len({id(lm) for lm in loaded}) == 4
    shares = [
        Oracle(load()[0], model, relation).shares([made.edits[i]]) for i, model in models.items()
    ]
    for name in ("source_learned", "generalized", "hallucinated", "unchanged"):
        mean = sum(share[name] for share in shares) / 3
        assert found.results[name] == pytest.approx(mean, abs=1e-12), name
    assert [case["id"] for case in found.cases] == ["0", "1", "3"]
    assert found.results["skipped"] == {"there is no edited LM": N - 3}
    assert found.results["neighbours"]["n"] == N_NEIGHBOURS
    assert found.results["edited_lms"]["n"] == 3


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["1", "1", "2"], r"1 and .*2 have one LM, .*lms/1\. .*FOLDER/\{edit\}"),
        (["run/0", "../0", ".."], r"3: its id is no name of a folder"),
        (["run/0", "..", "0"], {"its id is no name of a folder": 2}),
    ],
)
def test_ids_that_name_no_lm_of_their_own(made, ids, expected, tmp_path):
    rows = [edit | {"id": id} for edit, id in zip(made.edits, ids, strict=False)]
    file = tmp_path / "edits.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "lms" / "run").mkdir(parents=True)
    for name in ("0", "1", "2", "run/0"):
        (tmp_path / "lms" / name).symlink_to(made.lm)
    options = "tiny-world-edited", file, f"--data.edited_lms={tmp_path}/lms/{{edit}}"
    if isinstance(expected, str):
        with pytest.raises(LincorrError, match=expected):
            run(tmp_path, *options)
    else:
        found = run(tmp_path, *options)
        assert found.results["skipped"] == expected
        assert [case["subject"] for case in found.cases] == [rows[2]["subject"]]


def test_an_lm_that_was_not_edited_is_reported(made, tmp_path):
    with pytest.warns(UserWarning, match="same weights: nothing was edited"):
        found = run(tmp_path, "tiny-world", made.file).results
    assert found["unchanged"] + found["generalized"] == found["neighbours"]["source_unchanged"] == 1
    assert found["generalized"] == found["before"]["generalized"]


def test_a_fine_tune_leaves_its_edits_beside_its_lm(tmp_path):
    """And what it measured itself is what is found of its LM."""
    arguments = ["--model.protocol=joint", "--model.save_model=true", "--data.n_edits=8"]
    arguments += ["--trainer.max_epochs=8", f"--trainer.default_root_dir={tmp_path}"]
    cli = main(["fit", "--config", "source_finetune.yaml", *arguments])
    folder = Path(cli.trainer.log_dir)
    own = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found = run(tmp_path, folder / "model", "null").results
    assert own["source_learned"] > 0.5
    for name in ("n_edits", "source_learned", "generalized", "macro", "controls", "skipped"):
        assert found[name] == own[name], name
