"""The linear map on the disk: the same numbers back, or an error that names what is wrong."""

import errno
import json
import os
import re
import stat
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
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


def change_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    path = folder / "linear_map.safetensors"
    tensors = load_file(path) | changes
    save_file({key: value for key, value in tensors.items() if value is not None}, path)


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
        "template": "{} lives in the country of", "labels": COUNTRIES, "token_ids": [5, 4],
    }  # fmt: skip
    assert config["lm"] == {"name_or_path": "tiny-world", "fingerprint": parts["fingerprint"]}
    assert config["pairs"]["country->city"]["ridge"] == 31.6
    assert set(config["versions"]) == {"lincorr_lightning", "torch", "transformers"}
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_weights_that_changed_after_saving_are_refused(folder: Path) -> None:
    path = folder / "linear_map.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1  # a bit of a number's mantissa
    path.write_bytes(content)
    with pytest.raises(
        LinearMapError, match=r"linear_map is damaged: the SHA-256 of linear_map\.sa"
    ):
        LinearMap.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["sha256"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LinearMapError, match="lacks the key 'sha256'"):
        LinearMap.from_pretrained(folder)


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


# -- saving ----------------------------------------------------------------------------------


def test_failed_save_keeps_the_old_map(
    parts: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    parts["ridge"]["city->country"] = 5.0
    with (
        monkeypatch.context() as patch,
        pytest.raises(OutputError, match="No space left"),
    ):
        patch.setattr(os, "fsync", refuse)
        LinearMap(**parts).save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["linear_map"]
    LinearMap(**parts).save(folder)
    assert LinearMap.from_pretrained(folder).ridge["city->country"] == 5.0


def test_save_does_not_replace_other_files(parts: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match=r"holds thesis\.tex"):
        LinearMap(**parts).save(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


# -- damaged folders -------------------------------------------------------------------------


def test_missing_folder_and_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LinearMapError, match=r"nowhere: there is no such folder\. Pass the linear"):
        LinearMap.from_pretrained(tmp_path / "nowhere")
    for name, message in (
        ("linear_map.safetensors", "there is no such file"),
        ("config.json", "no such file"),
    ):
        (folder / name).unlink()
        with pytest.raises(LinearMapError, match=rf"{re.escape(name)}: {message}"):
            LinearMap.from_pretrained(folder)
        os.mkfifo(folder / name)  # a FIFO is not read
        with pytest.raises(LinearMapError, match=rf"cannot read .*{re.escape(name)}: "):
            LinearMap.from_pretrained(folder)


@pytest.mark.parametrize("keep", [0, 4, 60, -8])
def test_truncated_tensors(folder: Path, keep: int) -> None:
    path = folder / "linear_map.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(
        LinearMapError, match=r"linear_map\.safetensors: it is damaged or cut short"
    ):
        LinearMap.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format_version": 1, "lm', r"config\.json: it is not valid JSON"),
        ('{"model_type": "llama"}', "it is not the config of a linear map"),
        ('{"format_version": 2}', r"config\.json: it has format version 2; .* reads 1\."),
    ],
)
def test_config_that_cannot_be_read(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(LinearMapError, match=message):
        LinearMap.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"city->country/bias": None}, "lacks the key 'city->country/bias'"),
        ({"city/token_ids": None}, "lacks the key 'city/token_ids'"),
        ({"a->b/bias": np.zeros(2)}, "the SHA-256 of linear_map.safetensors is not that"),
        ({"city/token_ids": np.array([1, 2, 4])}, "token ids of config.json and .* differ"),
        (
            {"city->country/weight": np.zeros((3, 2))},
            r"city->country/weight has the shape \(3, 2\); the labels need \(2, 3\)",
        ),
        (
            {"city->country/bias": np.array([1.0, np.nan])},
            "city->country/bias holds NaN or infinite",
        ),
    ],
)
def test_tensors_that_disagree_with_the_config(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_tensors(folder, **changes)
    with pytest.raises(LinearMapError, match=f"linear_map is damaged: .*{message}"):
        LinearMap.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm": {"name_or_path": "x"}}, "lacks the key 'fingerprint'"),
        ({"pairs": {"city->country": 3}}, "config.json has a value of the wrong kind"),
        ({"knowledge": {}}, "the pair city->country has no labels of city"),
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
        ("labels", {"city": CITIES[:2], "country": COUNTRIES}, "city has 2 labels, 3 token ids"),
        ("templates", {"city": "{}"}, "country has 2 labels, 2 token ids and no template"),
        ("ridge", {"city->country": 0.0}, "country->city lacks its bias or its ridge"),
    ],
)
def test_parts_that_do_not_fit_each_other(
    parts: dict[str, Any], part: str, value: Any, message: str
) -> None:
    with pytest.raises(LinearMapError, match=message):
        LinearMap(**parts | {part: value})
    with pytest.raises(LinearMapError, match="'city' is not a pair"):
        LinearMap(**parts | {"weights": {"city": torch.zeros(2, 3)}})


# -- other tokenizers, other LMs -------------------------------------------------------------


def test_the_labels_of_an_lm_are_checked(folder: Path) -> None:
    fits: Any = SimpleNamespace(tokenizer=words(*CITIES, "Italy", "France"))
    LinearMap.from_pretrained(folder, fits)
    other: Any = SimpleNamespace(tokenizer=words("x"))
    with pytest.raises(LinearMapError):
        LinearMap.from_pretrained(folder, other)


def test_differing_labels_are_refused_by_name(parts: dict[str, Any]) -> None:
    with pytest.raises(LinearMapError) as error:
        LinearMap(**parts).check_labels(words("Paris", "Tokyo", "Rome", "Italy", "France"))
    message = str(error.value)
    assert "2 of 3 labels of city" in message
    assert "'Rome' is 'Tokyo' there, 'Tokyo' is 'Rome' there" in message
    assert "tiny-world" in message
    assert "country" not in message
    with pytest.raises(LinearMapError, match=r"2 of 2 labels of country .*'France' is 'no token'"):
        LinearMap(**parts).check_labels(words(*CITIES))


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
