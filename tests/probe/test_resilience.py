"""Maps of one LM on another, against scikit-learn on logits taken from the run's own subjects."""

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from scipy.spatial import distance
from sklearn.linear_model import LinearRegression
from transformers import AutoModelForCausalLM, AutoTokenizer

from lincorr_lightning import LanguageModel, LinearMap
from lincorr_lightning.data.subjects import SubjectsDataModule
from lincorr_lightning.errors import ConfigError, LinearMapError, SubjectsError
from lincorr_lightning.knowledge import Catalogue, build_domain
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.probe.module import LinearProbe
from lincorr_lightning.probe.resilience import MapResilience
from tests.toys import mean_r, quiet_trainer, read_table

NAMES = ["city", "country", "color"]
COUNTRIES = {
    "Paris": "France",
    "Tokyo": "Japan",
    "Berlin": "Germany",
    "Madrid": "Spain",
    "Rome": "Italy",
    "Vienna": "Austria",
    "Oslo": "Norway",
    "Cairo": "Egypt",
    "Lima": "Peru",
    "Beijing": "China",
    "Moscow": "Russia",
}


@pytest.fixture(scope="module")
def changed_lm(small_lm, tmp_path_factory):
    """The small LM with noise in its weights."""
    folder = tmp_path_factory.mktemp("changed")
    model = AutoModelForCausalLM.from_pretrained(small_lm)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(small_lm).save_pretrained(folder)
    return str(folder)


def score_again(folder, lm, data=None, **options):
    module = MapResilience(LMConfig(lm), **{"knowledge": NAMES, "ridge": 0.0, **options})
    data = {"n_subjects": 240, "batch_size": 64, "test_on": "all", **(data or {})}
    quiet_trainer(folder, logger=False).test(
        module, SubjectsDataModule(module.lm, **data), verbose=False
    )
    (path,) = folder.rglob("resilience/*/results.json")
    return module, json.loads(path.read_text(), parse_constant=pytest.fail), path.parent


def logits_of(lm, halves, tokens=None):
    """At the labels, or at other tokens after the prompt of each kind of knowledge."""
    model = LanguageModel.from_pretrained(lm)
    catalogue = Catalogue.load()
    return {
        (half, name): model.domain_logits(
            [catalogue[name].prompt(x) for x in subjects],
            (tokens or {}).get(name) or build_domain(catalogue[name], model.tokenizer).token_ids,
        ).numpy()
        for half, subjects in halves.items()
        for name in NAMES
    }


def test_numbers_are_those_of_scikit_learn(small_lm, changed_lm, tmp_path):
    module, results, folder = score_again(tmp_path, changed_lm, before=LMConfig(small_lm))
    halves = module.trainer.datamodule.halves
    old, new = logits_of(small_lm, halves), logits_of(changed_lm, halves)
    assert (results["study"], results["n_fit"], results["n_test"]) == ("resilience", 120, 120)
    assert len(results["pairs"]) == 6
    for pair in results["pairs"]:
        s, t = pair["source"], pair["target"]
        then = LinearRegression().fit(old["fit", s], old["fit", t])
        now = LinearRegression().fit(new["fit", s], new["fit", t])
        before = mean_r(then.predict(old["test", s]), old["test", t])
        after = mean_r(then.predict(new["test", s]), new["test", t])
        own = mean_r(now.predict(new["test", s]), new["test", t])
        assert pair["before"] == pytest.approx(before, abs=1e-6)
        assert pair["after"] == pytest.approx(after, abs=1e-6)
        assert pair["refitted"] == pytest.approx(own, abs=1e-6)
        assert pair["difference"] == pytest.approx(after - before, abs=1e-6)
        assert pair["kept"] == (pytest.approx(after / own, abs=1e-5) if own >= 0.2 else None)
    mean = np.mean([pair["after"] for pair in results["pairs"]])
    assert results["mean"]["after"] == pytest.approx(mean)
    assert module.trainer.callback_metrics["test/after"].item() == pytest.approx(mean)
    rows = read_table(folder / "tables" / "after_matrix.csv")
    found = {(r["source"], t): r[t] for r in rows for t in NAMES if r[t]}
    assert {k: float(v) for k, v in found.items()} == {
        (p["source"], p["target"]): p["after"] for p in results["pairs"]
    }
    assert (folder / "figures" / "difference_matrix.png").is_file()


def test_random_words_of_the_old_lm_are_scored_on_the_new_one(small_lm, changed_lm, tmp_path):
    """Their maps and W₀ by scikit-learn; means over other draws of words."""
    module, results, _ = score_again(tmp_path, changed_lm, before=LMConfig(small_lm))
    layout, rng = module.layout, np.random.default_rng(0)
    sides = [
        (
            logits_of(lm, module.trainer.datamodule.halves),
            logits_of(lm, module.trainer.datamodule.halves, layout.words),
        )
        for lm in (small_lm, changed_lm)
    ]
    (old, old_words), (new, new_words) = sides
    assert results["without_random_words"] is None
    for pair in results["pairs"]:
        s, t = pair["source"], pair["target"]
        n, n_words = len(layout.domains[s].labels), len(layout.words[s])
        assert n_words == len(set(layout.words[s])) > n
        after, refitted = [], []
        for _ in range(40):
            x = rng.permutation(n_words)[:n]
            for words, target, r in ((old_words, old, after), (new_words, new, refitted)):
                one = LinearRegression().fit(words["fit", s][:, x], target["fit", t])
                r.append(mean_r(one.predict(new_words["test", s][:, x]), new["test", t]))
        assert pair["random_label_mean"] == pytest.approx(np.mean(after), abs=0.03)
        assert pair["random_refitted"] == pytest.approx(np.mean(refitted), abs=0.03)
        to_words = LinearRegression().fit(old["fit", s], old_words["fit", t])
        r = mean_r(to_words.predict(new["test", s]), new_words["test", t])
        assert pair["random_target_label_mean"] == pytest.approx(r, abs=0.05)
        targets = {s: layout.domains[t].token_ids}
        half = {"fit": module.trainer.datamodule.halves["fit"]}
        for lm, own, key in ((small_lm, old, "label_mean"), (changed_lm, new, "refitted")):
            at_source = logits_of(lm, half, targets)
            unchanged = LinearRegression().fit(own["fit", s], at_source["fit", s])
            r = mean_r(unchanged.predict(new["test", s]), new["test", t])
            assert pair[f"same_prompt_{key}"] == pytest.approx(r, abs=1e-6)
        # There are fewer labels than are compared: all of them.
        excess = pair["after"] - np.mean(after)
        assert pair["excess_over_random"] == pytest.approx(excess, abs=0.03)
        kept = pair["random_label_mean"] / pair["random_refitted"]
        assert pair["random_kept"] == (
            pytest.approx(kept) if pair["random_refitted"] >= 0.2 else None
        )


def test_pairing_and_cosines_of_old_and_refitted_maps(small_lm, changed_lm, tmp_path):
    """Hit@1, and W beside W₀, by scikit-learn and by hand."""
    module, results, _ = score_again(
        tmp_path, changed_lm, before=LMConfig(small_lm), pairs=["city->country"]
    )
    (pair,), layout = results["pairs"], module.layout
    cities, countries = (layout.domains[name].texts for name in ("city", "country"))
    fit = {"fit": module.trainer.datamodule.halves["fit"]}
    maps = []
    for lm in (small_lm, changed_lm):
        own = logits_of(lm, fit)
        at_source = logits_of(lm, fit, {"city": layout.domains["country"].token_ids})
        x = own["fit", "city"]
        maps.append(
            [
                LinearRegression().fit(x, y).coef_
                for y in (own["fit", "country"], at_source["fit", "city"])
            ]
        )
    (old, old_w0), (new, new_w0) = maps
    for key, a, b in (
        ("cosine", old, new),
        ("same_prompt_cosine", old_w0, new_w0),
        ("rest_cosine", old - old_w0, new - new_w0),
    ):
        assert pair[key] == pytest.approx(1 - distance.cosine(a.ravel(), b.ravel()), abs=1e-6)
    for prefix, weight in (("", old), ("refitted_", new), ("gaussian_states", old_w0)):
        hits = defaultdict(list)
        for i, city in enumerate(cities):
            if city.strip() in COUNTRIES:
                country = COUNTRIES[city.strip()]
                hits[country].append(countries[weight[:, i].argmax()].strip() == country)
        micro, macro = ("_1", "_macro_1") if "gaussian" in prefix else ("influenced_1", "macro_1")
        assert sum(map(len, hits.values())) > 8
        assert pair[prefix + micro] == pytest.approx(np.mean(np.concatenate([*hits.values()])))
        assert pair[prefix + macro] == pytest.approx(np.mean([*map(np.mean, hits.values())]))


def test_without_the_old_lm_there_are_no_random_words(probed, changed_lm, small_lm, tmp_path):
    _, alone, _ = score_again(tmp_path / "alone", changed_lm, linear_map=str(probed))
    assert "they need model.before" in alone["without_random_words"]
    assert {pair["random_label_mean"] for pair in alone["pairs"]} == {None}
    _, both, _ = score_again(
        tmp_path / "both", changed_lm, linear_map=str(probed), before=LMConfig(small_lm)
    )
    assert both["without_random_words"] is None
    for one, other in zip(alone["pairs"], both["pairs"], strict=True):
        assert other["after"] == pytest.approx(one["after"], abs=1e-9)
        assert other["random_label_mean"] is not None


def test_vocabularies_with_other_words_have_no_random_words(small_lm, changed_lm, tmp_path):
    """Those of the old LM may be other tokens, or, at the same places, other words."""
    whole = MapResilience(
        LMConfig(changed_lm), before=LMConfig(small_lm), knowledge=NAMES, ridge=0.0
    )
    labels = {token for domain in whole.layout.domains.values() for token in domain.token_ids}
    token = next(token for token in whole.layout.words["city"] if token not in labels)
    word = whole.lm.tokenizer.convert_ids_to_tokens(token)
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(small_lm).save_pretrained(other)
    AutoTokenizer.from_pretrained(small_lm).save_pretrained(other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace(f'"{word}"', '"another"'))
    module = MapResilience(
        LMConfig(small_lm), before=LMConfig(str(other)), knowledge=NAMES, ridge=0.0
    )
    assert not module.layout.words and not module.layout_before.words and whole.layout.words


def test_a_test_of_the_held_out_half_alone_is_refused(small_lm, tmp_path):
    with pytest.raises(ConfigError, match=r"Set data\.test_on to all"):
        score_again(tmp_path, small_lm, {"test_on": "held_out"}, before=LMConfig(small_lm))


def test_an_lm_keeps_its_own_maps_whole(small_lm, tmp_path):
    _, results, _ = score_again(tmp_path, small_lm, before=LMConfig(small_lm))
    for pair in results["pairs"]:
        assert pair["difference"] == pytest.approx(0, abs=1e-12)
        assert pair["after"] == pytest.approx(pair["refitted"], abs=1e-12)


@pytest.fixture(scope="module")
def probed(small_lm, tmp_path_factory):
    """A probe's run, with a ridge of its own."""
    folder = tmp_path_factory.mktemp("probe")
    probe = LinearProbe(LMConfig(small_lm), knowledge=NAMES, ridge=1.0, control=None)
    quiet_trainer(folder, logger=False).fit(
        probe, SubjectsDataModule(probe.lm, n_subjects=240, batch_size=64)
    )
    (path,) = folder.rglob("linear_probe/*/linear_map")
    return path


def test_maps_of_a_folder(probed, small_lm, changed_lm, tmp_path):
    module, results, _ = score_again(tmp_path, changed_lm, linear_map=str(probed))
    stored = LinearMap.from_pretrained(probed)
    probed_results = json.loads((probed.parent / "results.json").read_text())
    before = {(p["source"], p["target"]): p["label_mean"] for p in probed_results["pairs"]}
    new = logits_of(changed_lm, module.trainer.datamodule.halves)
    for pair in results["pairs"]:
        s, t = pair["source"], pair["target"]
        assert pair["before"] == before[s, t]
        weight = stored.weight(f"{s}->{t}").numpy()
        after = mean_r(new["test", s] @ weight.T, new["test", t])
        assert pair["after"] == pytest.approx(after, abs=1e-6)
    assert results["lm_before"] == small_lm
    (tmp_path / "some").mkdir()
    _, some, _ = score_again(
        tmp_path / "some", changed_lm, linear_map=str(probed), pairs=["city->country"]
    )
    assert [(p["source"], p["target"]) for p in some["pairs"]] == [("city", "country")]


def test_subjects_that_the_maps_were_fitted_on_are_refused(probed, changed_lm, tmp_path):
    with pytest.raises(SubjectsError, match="the maps were fitted on"):
        score_again(tmp_path, changed_lm, {"seed": 5}, linear_map=str(probed))


def test_without_its_run_a_map_has_no_earlier_r(probed, changed_lm, tmp_path):
    LinearMap.from_pretrained(probed).save(tmp_path / "alone")
    with pytest.warns(UserWarning, match="model.before"):
        _, results, _ = score_again(tmp_path, changed_lm, linear_map=str(tmp_path / "alone"))
    assert {pair["before"] for pair in results["pairs"]} == {None}
    assert {pair["difference"] for pair in results["pairs"]} == {None}
    assert results["mean"]["before"] is None


def test_lms_of_other_labels_are_refused(small_lm, tmp_path):
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(small_lm)
    model.save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(small_lm)
    tokenizer.save_pretrained(other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"Peru"', '"Chad"'))
    message = "country has other labels.*only there Peru; only here nothing"
    with pytest.raises(LinearMapError, match=message):
        MapResilience(LMConfig(str(other)), before=LMConfig(small_lm), knowledge=NAMES, ridge=0.0)


def test_both_lms_are_read_in_one_dtype(small_lm, tmp_path):
    half, whole = LMConfig(small_lm, dtype="bfloat16"), LMConfig(small_lm, dtype="float32")
    module, results, _ = score_again(tmp_path, small_lm, before=half)
    assert module.before.model.dtype == module.lm.model.dtype == torch.float32
    assert results["dtypes"] == {"before": "float32", "after": "float32"}
    assert results["warning"] is None
    assert MapResilience(half, before=whole).before.config.dtype == "bfloat16"


def test_other_dtypes_are_compared_with_a_warning(probed, small_lm, tmp_path):
    half = LMConfig(small_lm, dtype="bfloat16")
    with pytest.warns(UserWarning, match="in bfloat16, and the new LM is in float32"):
        module, results, _ = score_again(tmp_path / "lms", small_lm, before=half, same_dtype=False)
    assert module.before.model.dtype == torch.bfloat16
    assert results["dtypes"] == {"before": "bfloat16", "after": "float32"}
    assert results["warning"].endswith("Set model.lm.dtype to bfloat16.")
    with pytest.warns(UserWarning, match="in float32, and the new LM is in bfloat16"):
        quiet = quiet_trainer(tmp_path / "map", logger=False)
        stored = MapResilience(half, linear_map=str(probed))
        data = SubjectsDataModule(stored.lm, n_subjects=240, batch_size=64, test_on="all")
        quiet.test(stored, data, verbose=False)


def test_refused_settings(probed, small_lm):
    with pytest.raises(ConfigError, match="no map to test"):
        MapResilience(LMConfig(small_lm))
    with pytest.raises(ConfigError, match="names city->pet"):
        MapResilience(LMConfig(small_lm), linear_map=str(probed), pairs=["city->pet"])
    with pytest.raises(LinearMapError, match="cannot read nowhere"):
        MapResilience(LMConfig(small_lm), linear_map="nowhere")
