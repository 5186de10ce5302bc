"""Scores by semantic completeness (paper, table 18), on a vocabulary that cuts words."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lincorr_lightning.knowledge import Completeness
from lincorr_lightning.linear_map.scores import by_completeness
from tests.probe.test_module import run_probe
from tests.toys import read_table, save_toy_lm

KINDS = [Completeness.WHOLE, Completeness.PHRASE, Completeness.SUBWORD, Completeness.WHOLE]
PLACES = "Paris Tokyo Auckland Lisbon Madrid France Japan Spain New Zealand Por ##tugal"


@pytest.fixture(scope="module")
def cutting_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random LM with WordPiece: France is whole, New of a phrase, Por a subword."""
    words = [
        "[PAD]",
        "[UNK]",
        *"lives in the city of country One day , saw a".split(),
        *PLACES.split(),
        *(f"name{i}" for i in range(200)),
    ]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]"
    )
    return str(save_toy_lm(tmp_path_factory.mktemp("cutting_lm"), tokenizer=tokenizer))


@pytest.mark.parametrize("subwords", [False, True])
def test_a_probe_reports_scores_by_completeness(
    cutting_lm: str, tmp_path: Path, subwords: bool
) -> None:
    options = {"pairs": ["city->country"], "subwords": subwords}
    _, _, run = run_probe(tmp_path, cutting_lm, data={"n_subjects": 150}, **options)
    (pair,) = json.loads((run / "results.json").read_text())["pairs"]
    # Bra(zil) and the others are unknown words here.
    counts = {kind: one["n_labels"] for kind, one in pair["completeness"].items()}
    assert counts == {"whole": 3, "phrase": 1, **({"subword": 1} if subwords else {})}
    rows = read_table(run / "tables" / "label_wise.csv")
    r = {row["label"]: float(row["r"]) for row in rows}
    assert set(r) == {"France", "Japan", "Spain", "New"} | ({"Por"} if subwords else set())
    assert pair["completeness"]["phrase"]["label_mean"] == pytest.approx(r["New"])
    whole = np.mean([r["France"], r["Japan"], r["Spain"]])
    assert pair["completeness"]["whole"]["label_mean"] == pytest.approx(whole)
    if subwords:
        assert pair["completeness"]["subword"]["label_mean"] == pytest.approx(r["Por"])
    rows = {row["completeness"]: row for row in read_table(run / "tables" / "completeness.csv")}
    assert {kind: int(row["n_labels"]) for kind, row in rows.items()} == counts
    assert rows["whole"]["influenced_n"] == "3"


def test_hits_are_those_of_each_kind_alone() -> None:
    rng = np.random.default_rng(0)
    r, weight = torch.rand(4), torch.from_numpy(rng.normal(size=(4, 30)))
    reference = torch.from_numpy(rng.random((4, 30)) < 0.4)
    found = by_completeness(r, weight, reference, KINDS)
    assert set(found) == {"whole", "phrase", "subword"}
    for kind, score in found.items():
        mine = [i for i, other in enumerate(KINDS) if other == kind]
        hits = []
        for column in range(30):
            right = [i for i in mine if reference[i, column]]
            if right:
                rivals = [i for i in range(4) if i in mine or not reference[i, column]]
                ranked = sorted(rivals, key=lambda i, c=column: -float(weight[i, c]))
                hits.append(ranked[0] in right)
        assert score["influenced_n"] == len(hits)
        assert score["influenced_1"] == pytest.approx(np.mean(hits))
        assert score["label_mean"] == pytest.approx(float(r[mine].mean()))
    assert by_completeness(r, weight, reference, [Completeness.WHOLE] * 4) == {}


def test_knowledge_without_words_in_the_vocabulary_is_left_out(
    cutting_lm: str, tmp_path: Path
) -> None:
    data = {"n_subjects": 100}
    _, _, run = run_probe(tmp_path, cutting_lm, data=data, knowledge=["attribute"])
    left_out = json.loads((run / "results.json").read_text())["left_out"]
    assert len(left_out) == 21
    assert not {"city", "country"} & set(left_out)
    assert "language" in left_out["language"] or "speaks" in left_out["language"]
