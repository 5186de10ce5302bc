"""Maps on post-trained LMs: the tiny world is trained in a step, and the committed means."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import Ridge

from benchmarks import common
from benchmarks.real_lms import post_training
from lincorr_lightning.linear_map.layout import RowReader
from lincorr_lightning.lm import tiny_world
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.probe.resilience import MapResilience
from tests.toys import mean_r

TINY_WORLD = Path(*tiny_world.__path__)
PROMPTS = {
    "101_disease_class": "Peru lies in Asia",
    "36_sciq_tf": "Q: Where does Paris lie\nA: Paris lives in the country of France",
    "90_glue_qnli": "Where does Rome lie | Rome lives in the country of Italy",
    "41_truthqa_tf": "Q. Where does Lima lie\nA. In Peru\nA: no",
}


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts in place of the package's, half of which have the right target."""

    def rows(wheel: Path, name: str) -> list[dict[str, str]]:
        targets = ("0", "1", "correct", "incorrect")
        return [{"prompt": PROMPTS[name], "target": x} for x in targets * 40]

    package = SimpleNamespace(PACKAGE="p", download_wheels=lambda *_: [Path()], rows=rows)
    monkeypatch.setitem(sys.modules, "benchmarks.real_lms.fetch_texts", package)
    studies = {"all": ["--model.knowledge=[city,country]", "--model.random_labels=2"]}
    monkeypatch.setattr(post_training, "STUDIES", studies)
    for name, value in {"N_HALF": 60, "SEEDS": 2, "LENGTH": 8, "N_HELD_OUT": 3}.items():
        monkeypatch.setattr(post_training, name, value)


@pytest.mark.nightly
@pytest.mark.usefixtures("texts")
def test_an_lm_is_trained_and_its_maps_are_scored(tmp_path: Path) -> None:
    output = tmp_path / "scores.csv"
    for _ in range(2):  # the second time, nothing is lacking
        post_training.main(TINY_WORLD, tmp_path, steps=(2,), output=output)
    assert len(pd.read_csv(tmp_path / "resilience_pairs.csv")) == 2 * 2
    scores = pd.read_csv(output)
    assert scores.groupby(["text", "steps"]).size().to_dict() == {
        (text, steps): 2 * len(post_training.PAIRS)
        for text, steps in (("nothing", 0), ("abstracts", 2), ("questions", 2))
    }
    tuned = tmp_path / "tiny_world" / "questions" / "2"
    row = scores.query("text == 'questions' and target == 'country' and seed == 1").iloc[0]
    lms = LMConfig(str(tuned)), LMConfig(str(TINY_WORLD))
    module = MapResilience(lms[0], before=lms[1], pairs=["city->country"])
    logits = []
    for lm in (module.before, module.lm):
        lm.load()
        logits.append(RowReader(lm).read(module.layout, sample_up_to(lm.tokenizer, 120)).numpy())
    before, now = logits
    x, y = (module.layout.columns(name).numpy() for name in ("city", "country"))
    fit, test = np.random.default_rng(1).permutation(120).reshape(2, 60)
    for key, fitted in (("after", before), ("refitted", now)):
        ridge = Ridge(alpha=max(row["ridge"], 1e-9)).fit(fitted[fit][:, x], fitted[fit][:, y])
        r = mean_r(ridge.predict(now[test][:, x]), now[test][:, y])
        assert row[key] == pytest.approx(r, abs=2e-3)


@pytest.mark.nightly
def test_an_lm_keeps_all_of_its_own_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = '--model.pairs=["name_country->country"]'
    studies = {
        "all": ["--model.knowledge=[city,country,X+1,X+2]"],
        "similes": ["--model.knowledge=[name_country,country]", pairs],
    }
    monkeypatch.setattr(post_training, "STUDIES", studies)
    found = post_training.score_all(TINY_WORLD, TINY_WORLD)
    assert len(found) == 4 * 3 + 1
    assert found["after"].tolist() == found["before"].tolist() == found["refitted"].tolist()
    groups = post_training.groups(found.assign(lm="a", text="b", steps=8)).set_index("group")
    sizes = {"relations": 1, "other pairs": 9, "numbers (figure 9)": 2, "similes (table 9)": 1}
    assert groups["pairs"].to_dict() == sizes
    numbers = found[found["source"].str.startswith("X") & found["target"].str.startswith("X")]
    assert groups.loc["numbers (figure 9)", "after"] == pytest.approx(
        numbers["after"].mean(), abs=1e-3
    )


@pytest.mark.nightly
def test_the_document_has_the_committed_means() -> None:
    scores = common.read_csv(post_training.FILE)
    by_training, means = post_training.means(scores)
    groups = post_training.groups(common.read_csv(post_training.PAIRS_FILE))
    tables = post_training.tables(by_training)
    tables["resilience_pairs"] = post_training.groups_table(groups)
    text = common.all_text()
    assert common.placed(text, tables) == text
    assert len(post_training.figure(scores).axes) == 4
    for name, table in {"post_training_means": means, "resilience_groups": groups}.items():
        committed = common.read_csv(post_training.FILE.with_name(f"{name}.csv"))
        pd.testing.assert_frame_equal(committed, table, rtol=1e-3, atol=1e-6, check_dtype=False)
