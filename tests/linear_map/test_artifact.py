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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lincorr_lightning.errors import LinearMapError, OutputError
from lincorr_lightning.knowledge import Answer, Completeness, Knowledge, build_domain
from lincorr_lightning.linear_map.artifact import (
    LinearMap,
    read_fit_subjects,
    warn_of_fit_subjects,
)
from tests.toys import word_tokenizer

PAIRS = ("city->country", "country->city")
CITIES = ["Paris", "Rome", "Tokyo"]
COUNTRIES = ["France", "Italy"]


def words(*words: str) -> PreTrainedTokenizerFast:
    return word_tokenizer(words, special=["<unk>"])


@pytest.fixture
def parts() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "weights": {
            "city->country": torch.from_numpy(rng.normal(size=(2, 3))),
            "country->city": torch.from_numpy(rng.normal(size=(3, 2))),
        },
        "biases": {
            "city->country": torch.from_numpy(rng.normal(size=2)),
            "country->city": torch.from_numpy(rng.normal(size=3)),
        },
        "token_ids": {"city": [1, 2, 3], "country": [5, 4]},
        "labels": {"city": CITIES, "country": COUNTRIES},
        "templates": {
            "city": "{} lives in the city of",
            "country": "{} lives in the country of",
        },
        "ridge": {"city->country": 0.0, "country->city": 31.6},
        "lm": "tiny-world",
        "fingerprint": {"tokenizer": "t", "config": "c", "weights": "w"},
    }


@pytest.fixture
def folder(parts: dict[str, Any], tmp_path: Path) -> Path:
    LinearMap(**parts).save(tmp_path / "linear_map")
    return tmp_path / "linear_map"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# -- there and back --------------------------------------------------------------------------


def test_round_trip(parts: dict[str, Any], folder: Path) -> None:
    found = LinearMap.from_pretrained(folder)
    assert found.pairs == ["city->country", "country->city"]
    assert found.knowledge == ["city", "country"]
    for pair in found.pairs:
        assert torch.equal(found.weight(pair), parts["weights"][pair])
        assert torch.equal(found.bias(pair), parts["biases"][pair])
    assert found.labels("country") == COUNTRIES
    assert found.token_ids("country") == [5, 4]
    for name in ("templates", "ridge", "lm", "fingerprint"):
        assert getattr(found, name) == parts[name]


def test_files_are_those_of_the_contract(parts: dict[str, Any], folder: Path) -> None:
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
    assert np.array_equal(
        tensors["city->country/weight"], parts["weights"]["city->country"].numpy()
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["format_version"] == 1
    assert config["knowledge"]["country"] == {
        "template": "{} lives in the country of",
        "labels": COUNTRIES,
        "token_ids": [5, 4],
        "answers": [],
    }
    assert config["lm"] == {"name_or_path": "tiny-world", "fingerprint": parts["fingerprint"]}
    assert config["pairs"]["country->city"]["ridge"] == 31.6
    assert set(config["versions"]) == {"lincorr_lightning", "torch", "transformers"}


def test_predict_is_an_affine_map(parts: dict[str, Any], folder: Path) -> None:
    x = np.random.default_rng(1).normal(size=(7, 3))
    w, b = parts["weights"]["city->country"].numpy(), parts["biases"]["city->country"].numpy()
    by_hand = [
        [sum(w[j, k] * x[i, k] for k in range(3)) + b[j] for j in range(2)] for i in range(7)
    ]
    linear_map = LinearMap.from_pretrained(folder)
    for source, rtol in ((torch.from_numpy(x), 1e-12), (torch.from_numpy(x).float(), 1e-5)):
        predicted = linear_map.predict("city->country", source)
        assert predicted.dtype == torch.float64
        np.testing.assert_allclose(predicted.numpy(), by_hand, rtol=rtol)


def test_predict_refuses_logits_of_other_labels(parts: dict[str, Any]) -> None:
    linear_map = LinearMap(**parts)
    for shape in ((4, 2), (3,)):
        with pytest.raises(
            LinearMapError, match=r"city->country takes source logits \(n_subjects, 3"
        ):
            linear_map.predict("city->country", torch.zeros(shape))
    with pytest.raises(LinearMapError, match=r"no pair 'city->color'; it has city->country"):
        linear_map.predict("city->color", torch.zeros(1, 3))
    with pytest.raises(LinearMapError, match="no knowledge 'color'; it has city, country"):
        linear_map.labels("color")


def test_slices_of_one_tensor_are_copied_and_saved(parts: dict[str, Any], tmp_path: Path) -> None:
    both = torch.arange(15, dtype=torch.float64).reshape(5, 3)  # as a probe holds its maps
    parts["weights"] = {"city->country": both[:2], "city->city": both[2:]}
    parts["biases"] = {"city->country": both[:2, 0], "city->city": both[2:, 0]}
    parts["ridge"] = dict.fromkeys(parts["weights"], 0.0)
    linear_map, expected = LinearMap(**parts), both[2:].tolist()
    both += 1
    linear_map.save(tmp_path / "map")
    for found in (linear_map, LinearMap.from_pretrained(tmp_path / "map")):
        assert found.weight("city->city").tolist() == expected


def test_names_with_slashes(parts: dict[str, Any], tmp_path: Path) -> None:
    def rename(old: Any) -> Any:
        return json.loads(json.dumps(old).replace("city", "X/2").replace("country", "X*2"))

    for key in ("token_ids", "labels", "templates", "ridge"):
        parts[key] = rename(parts[key])
    for key in ("weights", "biases"):
        parts[key] = {rename(pair): tensor for pair, tensor in parts[key].items()}
    LinearMap(**parts).save(tmp_path / "map")
    assert LinearMap.from_pretrained(tmp_path / "map").token_ids("X/2") == [1, 2, 3]


def test_save_replaces_a_map_and_nothing_else(parts: dict[str, Any], folder: Path) -> None:
    LinearMap(**parts | {"ridge": dict.fromkeys(PAIRS, 5.0)}).save(folder)
    assert LinearMap.from_pretrained(folder).ridge == dict.fromkeys(PAIRS, 5.0)
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match=r"holds thesis\.tex"):
        LinearMap(**parts).save(folder)


# -- damaged folders -------------------------------------------------------------------------


def test_missing_folder_and_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LinearMapError, match=r"nowhere/config\.json: No such file.* Pass the"):
        LinearMap.from_pretrained(tmp_path / "nowhere")
    for name in ("linear_map.safetensors", "config.json"):
        (folder / name).unlink()
        with pytest.raises(LinearMapError, match=r"cannot read .*No such file"):
            LinearMap.from_pretrained(folder)
        os.mkfifo(folder / name)  # a FIFO is not read
        with pytest.raises(LinearMapError, match=r"cannot read .*FIFO"):
            LinearMap.from_pretrained(folder)


def flip_a_bit(content: bytes) -> bytes:
    """Change the mantissa of a number."""
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:60], r"linear_map\.safetensors or config\.json is damaged"),
        (lambda content: content[:-8], r"linear_map\.safetensors or config\.json is damaged"),
        (flip_a_bit, r"the SHA-256 of linear_map\.safetensors is not that of config\.json"),
    ],
)
def test_damaged_tensors(folder: Path, change: Callable[[bytes], bytes], message: str) -> None:
    path = folder / "linear_map.safetensors"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(LinearMapError, match=message):
        LinearMap.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format_version": 1, "lm', r"config\.json: it is not valid JSON"),
        ('{"model_type": "llama"}', "it is not the config of a linear map in format version 1"),
        ('{"format_version": 2}', "it is not the config of a linear map in format version 1"),
    ],
)
def test_config_that_cannot_be_read(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(LinearMapError, match=message):
        LinearMap.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm": {"name_or_path": "x"}}, "there is no 'fingerprint'"),
        ({"pairs": {"city->country": 3}}, "is damaged or missing"),
        ({"pairs": {"city->color": {"ridge": 0}}}, "there is no 'city->color/weight'"),
        ({"knowledge": {}}, "there is no 'city'"),
        (
            {"knowledge": {"city": {"labels": ["a", True], "template": "{}"}}},
            "damaged .*bool found",
        ),
        ({"sha256": None}, "the SHA-256 of"),
    ],
)
def test_config_that_disagrees_with_the_tensors(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(folder, **changes)
    with pytest.raises(LinearMapError, match=message):
        LinearMap.from_pretrained(folder)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("labels", {"city": CITIES[:2], "country": COUNTRIES}, r"city->country/weight has the .*3"),
        ("token_ids", {"city": [1, 2, 3], "country": [5]}, "country/token_ids has the shape"),
        ("biases", dict.fromkeys(PAIRS, torch.full((2,), torch.nan)), "bias holds NaN or infinite"),
    ],
)
def test_parts_that_do_not_fit_each_other(
    parts: dict[str, Any], part: str, value: Any, message: str
) -> None:
    with pytest.raises(LinearMapError, match=message):
        LinearMap(**parts | {part: value})


# -- other tokenizers, other LMs -------------------------------------------------------------


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


def of_cities(parts: dict[str, Any], labels: list[str], token_ids: list[int]) -> LinearMap:
    n = len(labels)
    parts |= {
        "weights": {"city->city": torch.zeros(n, n)},
        "biases": {"city->city": torch.zeros(n)},
        "ridge": {"city->city": 0.0},
        "labels": {"city": labels},
        "token_ids": {"city": token_ids},
    }
    return LinearMap(**parts)


def test_many_differing_labels_are_counted_not_listed(parts: dict[str, Any]) -> None:
    cities = [f"city{i}" for i in range(40)]
    with pytest.raises(LinearMapError, match="40 of 40 labels of city") as error:
        of_cities(parts, cities, list(range(1, 41))).check_labels(words(*cities[::-1]))
    assert str(error.value).count("there") == 5


def test_labels_of_a_domain_fit_its_own_tokenizer(parts: dict[str, Any]) -> None:
    """Also where two tokens read alike, so that the domain spells them out."""
    vocabulary = {"a": 0, "b": 1, "a</w>": 2, "b</w>": 3, ".": 4, ".</w>": 5}
    backend = Tokenizer(models.BPE(vocabulary, merges=[], end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    answers = tuple(Answer(text, text) for text in ("a", "ab", "b"))
    knowledge = Knowledge("city", "attribute", "en", "{} .", "city", answers)
    domain = build_domain(knowledge, tokenizer, keep=list(Completeness))
    assert any("[" in text for text in domain.texts)
    of_cities(parts, domain.texts, domain.token_ids).check_labels(tokenizer)
    with pytest.raises(LinearMapError):
        of_cities(parts, domain.texts, domain.token_ids[::-1]).check_labels(tokenizer)


def test_scores_on_subjects_of_the_fit_half_are_warned_about(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "subjects.csv").write_text("subject,half\nEmma,fit\nLeo,fit\nIda,test\n")
    folder = str(tmp_path / "linear_map")
    assert read_fit_subjects(tmp_path) == {"Emma", "Leo"}
    with pytest.warns(UserWarning, match=r"1 of 2 subjects, such as 'Leo', .* fitted on"):
        warn_of_fit_subjects(folder, ["Ida", "Leo"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_fit_subjects(folder, ["Ida"])
        warn_of_fit_subjects(str(tmp_path / "elsewhere" / "linear_map"), ["Emma"])
