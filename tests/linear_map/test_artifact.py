"""The linear map on the disk: the same numbers back, or an error that names what is wrong."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import decoders, models, pre_tokenizers

from lincorr_lightning.errors import LinearMapError, OutputError
from lincorr_lightning.knowledge import Answer, Completeness, Knowledge, build_domain
from lincorr_lightning.linear_map.artifact import LinearMap, PairMap
from lincorr_lightning.linear_map.fitting import read_fit_subjects, warn_of_fit_subjects
from lincorr_lightning.linear_map.weights import LabelSet
from tests.toys import fast_tokenizer, word_tokenizer

CITIES = ["Paris", "Rome", "Tokyo"]
COUNTRIES = ["France", "Italy"]
LABELS = [
    LabelSet("city", "{} lives in the city of", CITIES, [1, 2, 3]),
    LabelSet("country", "{} lives in the country of", COUNTRIES, [5, 4]),
]
RNG = np.random.default_rng(0)
SHAPES = {"city->country": (2, 3), "country->city": (3, 2)}
MAPS = {
    pair: PairMap(*(torch.from_numpy(RNG.normal(size=part)) for part in (shape, shape[0])), ridge)
    for (pair, shape), ridge in zip(SHAPES.items(), (0.0, 31.6), strict=True)
}


def make(maps: dict[str, PairMap] = MAPS, labels: list[LabelSet] = LABELS) -> LinearMap:
    return LinearMap(maps, labels, "tiny-world", {"tokenizer": "t", "weights": "w"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make().save(tmp_path / "linear_map")
    return tmp_path / "linear_map"


def test_files_are_those_of_the_contract_and_are_read_back(folder: Path) -> None:
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "linear_map.safetensors"]
    tensors = load_file(folder / "linear_map.safetensors")
    assert {key: (value.dtype.name, value.shape) for key, value in tensors.items()} == {
        "city->country/weight": ("float64", (2, 3)),
        "city->country/bias": ("float64", (2,)),
        "country->city/weight": ("float64", (3, 2)),
        "country->city/bias": ("float64", (3,)),
        "city/token_ids": ("int64", (3,)),
        "country/token_ids": ("int64", (2,)),
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["format_version"] == 1
    assert config["knowledge"]["country"] == {
        "template": "{} lives in the country of",
        "labels": COUNTRIES,
        "token_ids": [5, 4],
        "answers": [],
    }
    assert config["lm"]["name_or_path"] == "tiny-world"
    assert config["pairs"]["country->city"]["ridge"] == 31.6
    assert set(config["versions"]) == {"lincorr_lightning", "torch", "transformers"}
    found = LinearMap.from_pretrained(folder)
    assert (found.pairs, found.knowledge) == (list(MAPS), ["city", "country"])
    for pair, one in MAPS.items():
        assert np.array_equal(tensors[f"{pair}/weight"], one.weight)
        assert torch.equal(found.weight(pair), one.weight)
        assert torch.equal(found.bias(pair), one.bias)
        assert found.ridge[pair] == one.ridge
    assert (found.labels("country"), found.token_ids("country")) == (COUNTRIES, [5, 4])
    assert (found.lm, found.fingerprint) == ("tiny-world", {"tokenizer": "t", "weights": "w"})


def test_predict_is_an_affine_map(folder: Path) -> None:
    x = np.random.default_rng(1).normal(size=(7, 3))
    w, b = MAPS["city->country"].weight.numpy(), MAPS["city->country"].bias.numpy()
    by_hand = [
        [sum(w[j, k] * x[i, k] for k in range(3)) + b[j] for j in range(2)] for i in range(7)
    ]
    linear_map = LinearMap.from_pretrained(folder)
    for source, rtol in ((torch.from_numpy(x), 1e-12), (torch.from_numpy(x).float(), 1e-5)):
        predicted = linear_map.predict("city->country", source)
        assert predicted.dtype == torch.float64
        np.testing.assert_allclose(predicted.numpy(), by_hand, rtol=rtol)
    for shape in ((4, 2), (3,)):
        with pytest.raises(LinearMapError, match=r"city->country takes .*token_ids\('city'\)"):
            linear_map.predict("city->country", torch.zeros(shape))
    with pytest.raises(LinearMapError, match=r"no pair 'city->color'; it has city->country"):
        linear_map.predict("city->color", torch.zeros(1, 3))


def test_slices_of_one_tensor_are_copied_and_saved(tmp_path: Path) -> None:
    both = torch.arange(15, dtype=torch.float64).reshape(5, 3)  # as a probe holds its maps
    maps = {
        "X/2->X*2": PairMap(both[:2], both[:2, 0], 0.0),
        "X/2->X/2": PairMap(both[2:], both[2:, 0], 0.0),
    }
    labels = [LabelSet("X/2", "{}", CITIES, [1, 2, 3]), LabelSet("X*2", "{}", COUNTRIES, [5, 4])]
    linear_map, expected = make(maps, labels), both[2:].tolist()
    both += 1
    linear_map.save(tmp_path / "map")
    for found in (linear_map, LinearMap.from_pretrained(tmp_path / "map")):
        assert found.weight("X/2->X/2").tolist() == expected


def test_save_replaces_a_map_and_nothing_else(folder: Path) -> None:
    one = MAPS["city->country"]
    make({"city->country": PairMap(one.weight, one.bias, 5.0)}).save(folder)
    assert LinearMap.from_pretrained(folder).ridge == {"city->country": 5.0}
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match=r"holds thesis\.tex"):
        make().save(folder)


def test_missing_folder_and_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LinearMapError, match=r"nowhere/config\.json.* Pass the"):
        LinearMap.from_pretrained(tmp_path / "nowhere")
    for name in ("linear_map.safetensors", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)  # a FIFO is not read
        with pytest.raises(LinearMapError, match=r"cannot read .*FIFO"):
            LinearMap.from_pretrained(folder)


def flip_a_bit(content: bytes) -> bytes:
    """Change the mantissa of a number."""
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize("change", [lambda content: content[:60], flip_a_bit])
def test_damaged_tensors(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / "linear_map.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(LinearMapError, match=r"linear_map\.safetensors"):
        LinearMap.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format version 1"),
        ({"lm": {"name_or_path": "x"}}, "fingerprint"),
        ({"pairs": {"city->country": 3}}, "damaged or missing"),
        ({"pairs": {"city->color": {"ridge": 0}}}, "city->color/weight"),
        ({"knowledge": {"city": {"labels": ["a", True], "template": "{}"}}}, "damaged or missing"),
        ({"sha256": None}, "SHA-256"),
    ],
)
def test_config_that_disagrees_with_the_tensors(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(LinearMapError, match=message):
        LinearMap.from_pretrained(folder)


NAN = {"city->country": PairMap(torch.ones(2, 3), torch.full((2,), torch.nan), 0)}


@pytest.mark.parametrize(
    ("maps", "labels", "key"),
    [
        (MAPS, [LabelSet("city", "{}", CITIES[:2], [1, 2]), LABELS[1]], "city->country/weight"),
        (MAPS, [LABELS[0], LabelSet("country", "{}", COUNTRIES, [5])], "country/token_ids"),
        (NAN, LABELS, "NaN"),
    ],
)
def test_parts_that_do_not_fit_each_other(
    maps: dict[str, PairMap], labels: list[LabelSet], key: str
) -> None:
    with pytest.raises(LinearMapError, match=key):
        make(maps, labels)


# -- other tokenizers, other LMs -------------------------------------------------------------


def words(*words: str) -> Any:
    return word_tokenizer(words, special=["<unk>"])


def test_labels_that_are_other_tokens_of_an_lm_are_refused_by_name(folder: Path) -> None:
    fits: Any = SimpleNamespace(tokenizer=words(*CITIES, "Italy", "France"))
    linear_map = LinearMap.from_pretrained(folder, fits)
    other: Any = SimpleNamespace(tokenizer=words("Paris", "Tokyo", "Rome", "Italy", "France"))
    with pytest.raises(LinearMapError) as error:
        LinearMap.from_pretrained(folder, other)
    message = str(error.value)
    assert "tiny-world" in message and "2 of 3 labels of city" in message
    assert "'Rome' is 'Tokyo' there, 'Tokyo' is 'Rome' there" in message
    assert "country" not in message
    with pytest.raises(LinearMapError, match=r"2 of 2 labels of country .*'France' is 'no token'"):
        linear_map.check_labels(words(*CITIES))


def test_labels_of_a_domain_fit_its_own_tokenizer() -> None:
    """Also where two tokens read alike, so that the domain spells them out."""
    vocabulary = {"a": 0, "b": 1, "a</w>": 2, "b</w>": 3, ".": 4, ".</w>": 5}
    model = models.BPE(vocabulary, merges=[], end_of_word_suffix="</w>")
    split, join = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder(suffix="</w>")
    tokenizer = fast_tokenizer(model, split, join)
    answers = tuple(Answer(text, text) for text in ("a", "ab", "b"))
    knowledge = Knowledge("city", "attribute", "en", "{} .", "city", answers)
    domain = build_domain(knowledge, tokenizer, keep=list(Completeness))
    assert any("[" in text for text in domain.texts)
    make({}, [LabelSet("city", "{}", domain.texts, domain.token_ids)]).check_labels(tokenizer)
    turned = LabelSet("city", "{}", domain.texts, domain.token_ids[::-1])
    with pytest.raises(LinearMapError):
        make({}, [turned]).check_labels(tokenizer)


def test_scores_on_subjects_of_the_fit_half_are_warned_about(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "subjects.csv").write_text("subject,half\nEmma,fit\nLeo,fit\nIda,test\n")
    folder = str(tmp_path / "linear_map")
    assert read_fit_subjects(tmp_path) == {"Emma", "Leo"}
    with pytest.warns(UserWarning, match=r"1 of 2 subjects, such as 'Leo'"):
        warn_of_fit_subjects(folder, ["Ida", "Leo"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_fit_subjects(folder, ["Ida"])
        warn_of_fit_subjects(str(tmp_path / "elsewhere" / "linear_map"), ["Emma"])
