"""Forecasts of edits: the nearest word, and what `lincorr predict` writes."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from lincorr_lightning.cli import main
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edit_files import RawEdit, read_edits
from lincorr_lightning.finetune.edits import Edit, ListedEdits, plan_edits
from lincorr_lightning.finetune.forecasts import NearestWord, forecast_edits, forecast_results
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm import loading
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from tests.nearness import causal_nearness
from tests.toys import save_toy_lm


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
    texts = [
        {"subject": f"x{i}", "answer": f"city{i % 20}", "reference": "Italy" if i % 3 else "Peru"}
        for i in range(23)
    ]
    words = [
        NearestWord(**text, nearest="Spain", right=x > 0, margin=x, rank=1)
        for text, x in zip(texts, np.resize(margins, 23), strict=True)
    ]
    skipped = [RawEdit("e.csv, line 2", "Ada", "Atlantis", problem="no label")]
    results = forecast_results("forecast", words, "city->country", skipped)
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
    expected = groups.sort_values("first", kind="stable")
    assert headline.frame["margin"].tolist() == expected["first"].tolist()
    assert headline.frame["n_edits"].sum() == expected["size"].sum()


# -- lincorr predict ---------------------------------------------------------------------------


def predict(lm, folder, *options):
    """Forecast edits without any LM; return results and table."""
    words = ["predict", "--config", "forecast.yaml", "--trainer.enable_progress_bar=false"]
    paths = f"--model.lm.name_or_path={lm}", f"--trainer.default_root_dir={folder}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "read_model", None)
        main([*words, *paths, *options])
    (path,) = folder.rglob("results.json")
    results = json.loads(path.read_text(), parse_constant=pytest.fail)
    return results, pd.read_csv(path.parent / "tables" / "forecast.csv")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
def test_no_lm_is_built_for_a_forecast(architecture, dtype, tmp_path):
    folder = save_toy_lm(tmp_path / "lm", architecture=architecture)
    lm = LanguageModel.from_pretrained(str(folder), dtype=dtype)
    lm.model.save_pretrained(folder)
    head = lm.model.get_output_embeddings().weight.float().numpy()
    relation = TokenizedRelation.of("city->country", Catalogue.load(), lm.tokenizer)
    near = causal_nearness(head, relation.source.token_ids, relation.target.token_ids)
    results, table = predict(folder, tmp_path / "runs", "--data.n_edits=20")
    for row in table.itertuples():
        cosines = near[:, relation.source.texts.index(row.answer)]
        labels = np.array(relation.target.texts)
        is_right = np.isin(labels, row.reference.split("|"))
        assert row.rank == 1 + (cosines > cosines[is_right].max()).sum()
        assert row.nearest == labels[cosines.argmax()] and row.right == is_right[cosines.argmax()]
        assert row.margin == pytest.approx(cosines[is_right].max() - cosines[~is_right].max())
    assert results["lm"].keys() == {"name_or_path", "dtype", "fingerprint", "n_parameters"}
    assert results["lm"]["fingerprint"].keys() == {"tokenizer", "dtype", "weights"}
    assert (results["lm"]["dtype"], results["lm"]["n_parameters"]) == (dtype, head.size)


def test_planned_edits_take_the_answers_in_turn(lm, small_lm, tmp_path):
    """Each round has every city once; those of a file are the edits that are trained."""
    _, table = predict(small_lm, tmp_path, "--data.n_edits=25", "--data.seed=3")
    data = EditsDataModule(LanguageModel(LMConfig(small_lm)), n_edits=25, seed=3)
    data.setup("predict")
    planned = data.predict_dataloader().dataset.edits
    assert [edit.subject for edit in planned] == table["subject"].tolist()
    assert {(edit.source_before, edit.target_before) for edit in planned} == {(None, None)}
    cities = {edit.answer for edit in planned}
    n = len(cities)
    for first in (0, n):
        assert set(table["answer"][first : first + n]) == cities
    trained = EditsDataModule(lm, n_edits=25, seed=3).resolve()
    rows = [{"subject": edit.subject, "answer": edit.answer} for edit in trained.edits]
    given = plan_edits(ListedEdits(read_edits(rows)), data.tokenized, lm).edits
    assert [edit[:5] for edit in given] == [edit[:5] for edit in trained.edits]
