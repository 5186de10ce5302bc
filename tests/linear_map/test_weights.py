"""Are Rome and Italy paired? The weights of one label, in Python and by ``lincorr weights``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pandas import read_csv

from lincorr_lightning import LinearMap
from lincorr_lightning.cli import main
from lincorr_lightning.errors import ConfigError, LinearMapError
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map import fit_linear_map
from lincorr_lightning.linear_map.artifact import PairMap
from lincorr_lightning.linear_map.weights import LabelSet
from lincorr_lightning.lm import LanguageModel
from tests.cli.test_startup import HEAVY, imported
from tests.toys import NAMES

CITIES = ["Paris", "Rome", "Seoul", "Lima"]
COUNTRIES = ["France", "Italy", "South", "Peru"]
W = [[3.0, 0.5, 0.1, 0.0], [0.2, 2.0, 0.1, 0.0], [0.1, 0.5, -1.0, 0.0], [0.0, 0.5, 4.0, 0.0]]
NEAR = [[0.9, 0.1, 0.3, 0.0], [0.1, 0.8, 0.2, 0.0], [0.0, 0.2, 0.25, 0.0], [0.0, 0.0, 0.1, 0.5]]
PAIR = "city->country"


ANSWERS = [["France"], ["Italy"], ["South Korea", "South Africa"], ["Peru"]]
CITY = LabelSet("city", "{} lives in", CITIES, [1, 2, 3, 4], [[city] for city in CITIES])
COUNTRY = LabelSet("country", "{} is from", COUNTRIES, [5, 6, 7, 8], ANSWERS)


def make_map(near: list[list[float]]) -> LinearMap:
    weight, reference = torch.tensor(W, dtype=torch.float64), [[0], [1], [2], []]
    one = PairMap(weight, torch.zeros(4), 31.6, reference, torch.tensor(near))
    return LinearMap({PAIR: one}, [CITY, COUNTRY], "tiny-world", {})


MAP = make_map(NEAR)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    MAP.save(tmp_path / "linear_map")
    return tmp_path


def test_top_and_rank(run: Path) -> None:
    for linear_map in (MAP, LinearMap.from_pretrained(run / "linear_map")):
        frame = linear_map.top(PAIR, "Rome", n=3)
        columns = ["label", "weight", "rank", "reference", "rank_nearest", "rank_constant"]
        assert list(frame.columns) == columns
        # Equal weights share a rank, and come in the order of the labels.
        rows = [
            ("Italy", 2.0, 1, True, 1, 2),
            ("France", 0.5, 2, False, 3, 1),
            ("South (South Korea, South Africa)", 0.5, 2, False, 2, 3),
        ]
        assert list(frame.itertuples(index=False, name=None)) == rows
        for city, column in zip(CITIES, np.array(W).T, strict=True):
            for country, weight in zip(COUNTRIES, column, strict=True):
                n_above = sum(other > weight for other in column)
                assert linear_map.rank(PAIR, city, country) == 1 + n_above
        # A label is named by an answer that it stands for, too.
        assert linear_map.rank(PAIR, "Seoul", "South Korea") == 4
        assert linear_map.rank(PAIR, "Seoul", "South (South Korea, South Africa)") == 4
        assert linear_map.top(PAIR, "Lima")["reference"].tolist() == [None] * 4


def test_a_fitted_map_knows_its_reference(small_lm: str) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    relation = TokenizedRelation.of(PAIR, Catalogue.load(), lm.tokenizer)
    linear_map = fit_linear_map(lm, relation, NAMES[:60], ridge=0.0)
    frame = linear_map.top(PAIR, "Rome", n=len(relation.target.labels)).set_index("label")
    assert frame.index[frame["reference"] == True].tolist() == ["Italy"]  # noqa: E712
    assert frame["weight"].is_monotonic_decreasing


# -- the command -----------------------------------------------------------------------------------


def lines(capsys: pytest.CaptureFixture[str], *args: object) -> list[str]:
    main(["weights", *map(str, args)])
    return capsys.readouterr().out.splitlines()


def test_the_command_shows_the_same_rows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [
        "W of city->country in tiny-world, ridge 31.6",
        "Highest weights of Seoul:",
        "rank  weight  country",
        "   1    4.00  Peru",
        "   2    0.10  France",
        "   2    0.10  Italy",
        "   4   -1.00  South (South Korea, South Africa)  (right)",
        "South (South Korea, South Africa), right: rank 4 of 4 by W, 2 by the nearest word, "
        "3 by a constant answer.",
        "W is wrong.",
    ]
    for folder in (run, run / "linear_map"):
        shown = lines(capsys, folder, PAIR, "Seoul", "South Africa")
        assert shown == expected
    assert lines(capsys, run, PAIR, "Rome")[3] == "   1    2.00  Italy  (right)"
    assert lines(capsys, run, PAIR, "Lima", "Peru")[-1] == (
        "Peru: rank 1 of 4 by W, 1 by the nearest word, 4 by a constant answer."
    )
    assert lines(capsys, run, PAIR, "Rome", "Italy")[-1] == (
        "W is right, and so is the nearest word: no more than the vocabulary."
    )


def test_it_lists_what_w_alone_gets_right(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = [NEAR[0], [1.0, *NEAR[1][1:]], *NEAR[2:]]  # the nearest word of Paris is Italy
    make_map(near).save(run / "linear_map")
    shown = lines(capsys, run, PAIR, "--csv", run / "all.csv")
    assert shown[1:-1] == [
        "W is right first for 2 of 3 answers, the nearest word for 1.",
        "W alone is right for 1:",
        "  Paris: France",
    ]
    assert (run / "all.csv").read_text().splitlines() == [
        "answer,reference,rank,rank_nearest,rank_constant",
        "Paris,France,1,2,1",
        "Rome,Italy,1,1,2",
        '"Seoul","South (South Korea, South Africa)",4,2,3'.replace('"Seoul"', "Seoul"),
    ]
    lines(capsys, run, PAIR, "Rome", "--csv", run / "rome.csv")
    frame = read_csv(run / "rome.csv").sort_values("label")
    assert frame["label"].str[:5].tolist() == ["Franc", "Italy", "Peru", "South"]
    assert frame["weight"].tolist() == [0.5, 2.0, 0.5, 0.5]


def test_it_says_what_the_run_says_of_the_pair(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = ["city→country: W gives 59 %.", "city→city: W gives 1 %."]
    (run / "results.json").write_text(json.dumps({"verdict": sentences}))
    assert lines(capsys, run, PAIR, "Rome")[-1] == sentences[0]


def test_the_folder_of_a_study_is_no_run(run: Path, tmp_path_factory: Any) -> None:
    study = tmp_path_factory.mktemp("study")
    run.rename(study / "version_7")
    with pytest.raises(LinearMapError, match=r"Name one of them: .*version_7\."):
        main(["weights", str(study), PAIR, "Rome"])


def test_wrong_arguments_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"'city-' is no pair\. Put it in quotes"):
        main(["weights", str(run), "city-", "Rome"])
    with pytest.raises(LinearMapError, match="has no pair 'city->color', but city->country"):
        main(["weights", str(run), "city->color", "Rome"])
    with pytest.raises(LinearMapError, match=r"'Rom' is no label of city; labels are such as Rome"):
        main(["weights", str(run), PAIR, "Rom"])
    (run / "linear_map" / "linear_map.safetensors").write_bytes(b"damaged")
    with pytest.raises(LinearMapError, match="fit the map again"):
        main(["weights", str(run), PAIR, "Rome"])


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["pairs"][PAIR].update(reference=[0]),
        lambda config: config["knowledge"]["city"].update(answers=None),
        lambda config: [
            k.update(labels=k["labels"][1:], answers=[]) for k in config["knowledge"].values()
        ],
    ],
)
def test_a_changed_map_is_refused(run: Path, change: Callable[[Any], Any]) -> None:
    """The last one would show the weights of other labels."""
    path = run / "linear_map" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    with pytest.raises(LinearMapError, match=r"linear_map: .* is damaged or missing"):
        main(["weights", str(run), PAIR, "Rome"])


def test_the_command_imports_little(run: Path) -> None:
    """It answers at once, where torch takes seconds."""
    found = imported("-m", "lincorr_lightning", "weights", str(run), PAIR, "Rome", "Italy")
    assert "safetensors" in found
    assert not found & (HEAVY | {"pandas", "matplotlib", "jsonargparse", "rich"})
