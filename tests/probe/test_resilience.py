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
from lincorr_lightning.probe.resilience import MapResilience
from tests.probe.test_module import run_probe
from tests.probe.test_wordings import COUNTRY_OF
from tests.toys import mean_r, quiet_trainer, read_table

NAMES = ["city", "country", "color"]


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


@pytest.fixture(scope="module")
def compared(small_lm, changed_lm, tmp_path_factory):
    """The study of all pairs, whose maps are fitted on the old LM."""
    folder = tmp_path_factory.mktemp("compared")
    return score_again(folder, changed_lm, before=LMConfig(small_lm))


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


@pytest.fixture(scope="module")
def logits(small_lm, changed_lm, compared):
    """Of the old and the new LM, each at the labels and at the random words."""
    module, *_ = compared
    halves = module.trainer.datamodule.halves
    return [
        (logits_of(lm, halves), logits_of(lm, halves, module.layout.words))
        for lm in (small_lm, changed_lm)
    ]


def test_numbers_are_those_of_scikit_learn(compared, logits):
    module, results, folder = compared
    (old, _), (new, _) = logits
    assert (results["study"], results["n_fit"], results["n_test"]) == ("resilience", 120, 120)
    assert len(results["pairs"]) == 6
    for pair in results["pairs"]:
        s, t = pair["source"], pair["target"]
        then = LinearRegression().fit(old["fit", s], old["fit", t])
        now = LinearRegression().fit(new["fit", s], new["fit", t])
        before = mean_r(then.predict(old["test", s]), old["test", t])
        after = mean_r(then.predict(new["test", s]), new["test", t])
        refitted = mean_r(now.predict(new["test", s]), new["test", t])
        assert pair["before"] == pytest.approx(before, abs=1e-6)
        assert pair["after"] == pytest.approx(after, abs=1e-6)
        assert pair["refitted"] == pytest.approx(refitted, abs=1e-6)
        assert pair["difference"] == pytest.approx(after - before, abs=1e-6)
        kept = pytest.approx(after / refitted, abs=1e-5) if refitted >= 0.2 else None
        assert pair["kept"] == kept
    mean = np.mean([pair["after"] for pair in results["pairs"]])
    assert results["mean"]["after"] == pytest.approx(mean)
    assert module.trainer.callback_metrics["test/after"].item() == pytest.approx(mean)
    rows = read_table(folder / "tables" / "after_matrix.csv")
    found = {(r["source"], t): r[t] for r in rows for t in NAMES if r[t]}
    assert {k: float(v) for k, v in found.items()} == {
        (p["source"], p["target"]): p["after"] for p in results["pairs"]
    }


@pytest.mark.slow
def test_random_words_of_the_old_lm_are_scored_on_the_new_one(small_lm, compared, logits):
    """Their maps and W₀ by scikit-learn; means over other draws of words."""
    module, results, _ = compared
    layout, rng = module.layout, np.random.default_rng(0)
    (old, old_words), (new, new_words) = logits
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
        targets = {s: layout.domains[t].token_ids}
        half = {"fit": module.trainer.datamodule.halves["fit"]}
        at_source = logits_of(small_lm, half, targets)
        unchanged = LinearRegression().fit(old["fit", s], at_source["fit", s])
        r = mean_r(unchanged.predict(new["test", s]), new["test", t])
        assert pair["same_prompt_label_mean"] == pytest.approx(r, abs=1e-6)
        # There are fewer labels than are compared: all of them.
        excess = pair["after"] - np.mean(after)
        assert pair["excess_over_random"] == pytest.approx(excess, abs=0.03)
        kept = pair["random_label_mean"] / pair["random_refitted"]
        assert pair["random_kept"] == (
            pytest.approx(kept) if pair["random_refitted"] >= 0.2 else None
        )


def test_pairing_and_cosines_of_old_and_refitted_maps(small_lm, changed_lm, compared):
    """Hit@1, and W beside W₀, by scikit-learn and by hand."""
    module, results, _ = compared
    pair, layout = results["pairs"][0], module.layout
    assert (pair["source"], pair["target"]) == ("city", "country")
    cities, countries = (layout.domains[name].texts for name in ("city", "country"))
    fit = {"fit": module.trainer.datamodule.halves["fit"]}
    maps = []
    for lm in (small_lm, changed_lm):
        at_labels = logits_of(lm, fit)
        at_source = logits_of(lm, fit, {"city": layout.domains["country"].token_ids})
        sides = at_labels["fit", "country"], at_source["fit", "city"]
        maps.append([LinearRegression().fit(at_labels["fit", "city"], y).coef_ for y in sides])
    (old, old_w0), (new, new_w0) = maps
    for key, a, b in (
        ("cosine", old, new),
        ("same_prompt_cosine", old_w0, new_w0),
        ("rest_cosine", old - old_w0, new - new_w0),
    ):
        # States are float32: their rounding depends on batch and processor.
        assert pair[key] == pytest.approx(1 - distance.cosine(a.ravel(), b.ravel()), abs=1e-5)
    for prefix, weight in (("", old), ("refitted_", new), ("gaussian_states", old_w0)):
        hits = defaultdict(list)
        for i, city in enumerate(cities):
            if city.strip() in COUNTRY_OF:
                country = COUNTRY_OF[city.strip()]
                hits[country].append(countries[weight[:, i].argmax()].strip() == country)
        micro, macro = ("_1", "_macro_1") if "gaussian" in prefix else ("influenced_1", "macro_1")
        assert sum(map(len, hits.values())) > 8
        assert pair[prefix + micro] == pytest.approx(np.mean(np.concatenate([*hits.values()])))
        assert pair[prefix + macro] == pytest.approx(np.mean([*map(np.mean, hits.values())]))


def test_an_lm_keeps_its_own_maps_whole(small_lm, tmp_path):
    """Also the map of a ridge that was chosen on the old LM."""
    module, results, _ = score_again(tmp_path, small_lm, before=LMConfig(small_lm), ridge="auto")
    for pair in results["pairs"]:
        assert pair["difference"] == pytest.approx(0, abs=1e-12)
        assert pair["after"] == pytest.approx(pair["refitted"], abs=1e-12)
    assert max(module.ridges.values()) > 0


def other_vocabulary(small_lm, folder, word, other):
    """The folder of the small LM with a word of its vocabulary replaced."""
    AutoModelForCausalLM.from_pretrained(small_lm).save_pretrained(folder)
    AutoTokenizer.from_pretrained(small_lm).save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace(f'"{word}"', f'"{other}"'))
    return LMConfig(str(folder))


def test_vocabularies_with_other_words_have_no_random_words(compared, small_lm, tmp_path):
    """Those of the old LM may be other tokens, or, at the same places, other words."""
    layout, tokenizer = compared[0].layout, compared[0].lm.tokenizer
    labels = {token for domain in layout.domains.values() for token in domain.token_ids}
    token = next(token for token in layout.words["city"] if token not in labels)
    other = other_vocabulary(small_lm, tmp_path, tokenizer.convert_ids_to_tokens(token), "another")
    module = MapResilience(LMConfig(small_lm), before=other, knowledge=NAMES, ridge=0.0)
    assert not module.layout.words and not module.layout_before.words and layout.words


@pytest.fixture(scope="module")
def probed(small_lm, tmp_path_factory):
    """A probe's run, with a ridge of its own."""
    folder, options = tmp_path_factory.mktemp("probe"), {"knowledge": NAMES, "control": None}
    return (
        run_probe(folder, small_lm, data={"n_subjects": 240}, ridge=1.0, **options)[2]
        / "linear_map"
    )


def test_maps_of_a_folder(probed, small_lm, changed_lm, logits, tmp_path):
    _, alone, _ = score_again(tmp_path / "alone", changed_lm, linear_map=str(probed))
    stored = LinearMap.from_pretrained(probed)
    _, (new, _) = logits
    for pair in alone["pairs"]:
        s, t = pair["source"], pair["target"]
        weight = stored.weight(f"{s}->{t}").numpy()
        after = mean_r(new["test", s] @ weight.T, new["test", t])
        assert pair["after"] == pytest.approx(after, abs=1e-6)
        assert pair["random_label_mean"] is pair["before"] is pair["difference"] is None
    assert alone["lm_before"] == small_lm and alone["mean"]["before"] is None
    options = {"pairs": ["city->country"], "before": LMConfig(small_lm)}
    _, both, _ = score_again(tmp_path / "both", changed_lm, linear_map=str(probed), **options)
    (pair,) = both["pairs"]
    assert pair["after"] == pytest.approx(alone["pairs"][0]["after"], abs=1e-7)
    assert pair["random_label_mean"] is not None and pair["before"] is not None


def test_dtypes(probed, small_lm, tmp_path):
    """Both LMs are read in that of the new one; maps of a folder may be of another."""
    half, whole = LMConfig(small_lm, dtype="bfloat16"), LMConfig(small_lm, dtype="float32")
    assert MapResilience(half, before=whole).before.config.dtype == "bfloat16"
    with pytest.warns(UserWarning, match=r"in float32, .*model\.lm\.dtype to float32"):
        module = MapResilience(half, linear_map=str(probed), knowledge=NAMES)
        data = SubjectsDataModule(module.lm, n_subjects=240, batch_size=64, test_on="all")
        quiet_trainer(tmp_path, logger=False).test(module, data, verbose=False)


def test_what_does_not_fit_is_refused(probed, small_lm, changed_lm, tmp_path):
    lm = LMConfig(small_lm)
    with pytest.raises(ConfigError, match="no map to test"):
        MapResilience(lm)
    with pytest.raises(LinearMapError, match="city->pet"):
        MapResilience(lm, linear_map=str(probed), pairs=["city->pet"])
    with pytest.raises(LinearMapError, match="cannot read nowhere"):
        MapResilience(lm, linear_map="nowhere")
    other = other_vocabulary(small_lm, tmp_path / "other", "Peru", "Chad")
    with pytest.raises(LinearMapError, match=r"country has other labels.*only there Peru"):
        MapResilience(other, before=lm, knowledge=NAMES)
    with pytest.raises(ConfigError, match=r"data\.test_on"):
        score_again(tmp_path, small_lm, {"test_on": "held_out"}, before=lm)
    with pytest.raises(SubjectsError, match="the maps were fitted on"):
        score_again(tmp_path, changed_lm, {"seed": 5}, linear_map=str(probed))
