"""Forecasts of edits: the nearest word, and what `lincorr predict` writes."""

import json
from itertools import product
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score

from lincorr_lightning.cli import main
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edit_files import RawEdit
from lincorr_lightning.finetune.edits import Edit, nearness
from lincorr_lightning.finetune.forecasts import NearestWord, forecast_edits, forecast_results
from tests.nearness import causal_nearness


@pytest.fixture(scope="module")
def edits(lm) -> list[Edit]:
    """Edits of the small LM; all labels but one are right for the last one."""
    *others, last = EditsDataModule(lm, n_edits=12).resolve().edits
    return [*others, last._replace(reference=tuple(range(10)))]


# -- what is forecast ---------------------------------------------------------------------------


def test_the_nearest_word_is_that_of_numpy(lm, edits, relation):
    head = lm.model.get_output_embeddings().weight.detach().numpy()
    near = causal_nearness(head, relation.source.token_ids, relation.target.token_ids)
    labels = list(relation.target.texts)
    words = forecast_edits(nearness(lm.nearest_words(), relation), edits, relation)
    assert [word.subject for word in words] == [edit.subject for edit in edits]
    for edit, found in zip(edits, words, strict=True):
        cosines = near[:, edit.label]
        order = [labels[i] for i in np.argsort(-cosines)]
        right = [labels[i] for i in edit.reference]
        assert found.answer == edit.answer
        assert found.reference == "|".join(right)
        assert found.nearest == order[0]
        assert found.right == (order[0] in right)
        assert found.rank == 1 + min(order.index(label) for label in right)
        wrong = [i for i in range(len(labels)) if i not in edit.reference]
        margin = cosines[list(edit.reference)].max() - cosines[wrong].max()
        assert found.margin == pytest.approx(margin, abs=1e-12)
    assert {found.right for found in words} == {True, False}


def test_equally_near_labels_and_no_wrong_label():
    near = torch.tensor([[0.9, 0.1], [0.5, 0.1], [0.25, -0.5]])
    relation = SimpleNamespace(target=SimpleNamespace(texts=["France", "Spain", "Italy"]))
    edits = [
        Edit("Ann", "Paris", (1,), 0, (1, 2), 1, 0),
        Edit("Bob", "Rome", (2,), 1, (1,), 0, 0),
        Edit("Cy", "Paris", (1,), 0, (0, 1, 2), 1, 0),
    ]
    ahead, tie, every = forecast_edits(near, edits, relation)
    assert (ahead.nearest, ahead.right, ahead.rank) == ("France", False, 2)
    assert ahead.margin == pytest.approx(-0.4)
    assert (tie.right, tie.margin, tie.rank) == (False, 0.0, 2)
    assert (every.right, every.margin, every.rank) == (True, None, 1)


# -- results ------------------------------------------------------------------------------------


def test_results_are_shares_of_the_words_and_the_least_safe_answers_first():
    margins = np.random.default_rng(0).permutation(np.linspace(-0.5, 0.5, 20))
    words = [
        NearestWord(
            subject=f"x{i}",
            answer=f"city{i % 20}",
            reference="Italy" if i % 3 else "Peru",
            nearest="Spain",
            right=margins[i % 20] > 0,
            margin=margins[i % 20],
            rank=1 if margins[i % 20] > 0 else 2,
        )
        for i in range(23)
    ]
    skipped = [RawEdit("e.csv, line 2", "Ada", "Atlantis", problem="no label")]
    results = forecast_results(words, "city->country", skipped)
    frame = results.table("forecast").frame
    assert len(frame) == 23 and len(results.table("skipped")) == 1
    assert results.values == {
        "relation": "city->country",
        "n_edits": 23,
        "skipped": {"no label": 1},
        "nearest": {
            "right": pytest.approx(frame["right"].mean()),
            "macro": pytest.approx(frame.groupby("reference")["right"].mean().mean()),
        },
    }
    (headline,) = (table for table in results.tables if table.headline)
    groups = frame.groupby(["answer", "reference"])["margin"].agg(["first", "size"])
    expected = groups.sort_values("first", kind="stable").head(12)
    assert headline.frame["margin"].tolist() == expected["first"].tolist()
    assert headline.frame["n_edits"].sum() == expected["size"].sum()


# -- lincorr predict ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_forecast_is_scored_by_the_fine_tune_of_the_same_edits(
    small_lm, relation, tmp_path, finetune
):
    """Half of all countries are right for each city, so that edits of a random LM generalize."""
    cities = relation.source.texts
    countries = relation.target.texts
    rows = [
        {
            "subject": f"name{i}",
            "answer": cities[i % len(cities)],
            "reference": [countries[(i % 3 * 4 + j) % len(countries)] for j in range(6)],
        }
        for i in range(24)
    ]
    file = tmp_path / "edits.json"
    file.write_text(json.dumps(rows))
    main(
        [
            "predict",
            "--config",
            "forecast.yaml",
            f"--model.lm.name_or_path={small_lm}",
            f"--trainer.default_root_dir={tmp_path}/ahead",
            "--trainer.enable_progress_bar=false",
            f"--data.edits_file={file}",
        ]
    )
    (path,) = (tmp_path / "ahead").rglob("results.json")
    results = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (results["study"], results["relation"], results["n_edits"]) == (
        "forecast",
        "city->country",
        24,
    )
    table = pd.read_csv(path.parent / "tables" / "forecast.csv")
    columns = ["subject", "answer", "reference", "nearest", "right", "margin", "rank"]
    assert list(table) == columns
    assert results["nearest"]["right"] == pytest.approx(table["right"].mean())
    run = finetune({"edits_file": str(file), "n_edits": None}, steps_per_edit=5)
    cases = pd.read_csv(run.folder / "tables" / "cases.csv")
    assert table["subject"].tolist() == cases["subject"].tolist()
    assert cases["nearest_risk"].tolist() == pytest.approx((-table["margin"]).tolist())
    cases = cases[cases["outcome"] != "right_before"]
    failed = cases["outcome"] != "generalized"
    assert run.results["forecast_default"] == "causal_inner_product"
    scores = run.results["forecast"]["causal_inner_product"]
    assert scores["auroc"] == pytest.approx(roc_auc_score(failed, cases["nearest_risk"]))
    wins = []
    for _, group in cases.assign(failed=failed).groupby("reference"):
        of_class = {name: part["nearest_risk"] for name, part in group.groupby("failed")}
        pairs = product(of_class.get(True, ()), of_class.get(False, ()))
        wins += [(above > below) + (above == below) / 2 for above, below in pairs]
    assert scores["auroc_within"] == pytest.approx(np.mean(wins))
