"""Texts of the small LM's words, and the numbers of their clouds by numpy and scipy."""

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.spatial.distance import cdist
from transformers import AutoModelForCausalLM, AutoTokenizer

N_TOKENS, N_TEXTS = 16, 10
CORPORA = ("one", "two", "three", "four", "five")


def naive_distances(cloud: Any) -> np.ndarray:
    distances = cdist(*[torch.as_tensor(cloud).double().numpy()] * 2)
    np.fill_diagonal(distances, np.inf)
    return distances


def naive_neighborhoods(cloud: Any, k: int) -> np.ndarray:
    return np.argsort(naive_distances(cloud), axis=1, kind="stable")[:, :k]


def naive_overlap(a: Any, b: Any, k: int) -> float:
    pairs = zip(naive_neighborhoods(a, k), naive_neighborhoods(b, k), strict=True)
    return float(np.mean([len({*one} & {*other}) / k for one, other in pairs]))


def ratios(cloud: np.ndarray, n2: int) -> np.ndarray:
    distances = np.sort(cdist(*[np.unique(cloud, axis=0)] * 2), axis=1)
    return distances[:, n2] / distances[:, n2 // 2]


def naive_dimension(cloud: np.ndarray, n2: int) -> float:
    """The recipe of DADApy, see test_intrinsic_dimension.py."""
    mu = ratios(cloud.astype(np.float64), n2)
    high, middle = np.percentile(mu, [95, 50])
    mu = mu[mu < 20 * (high - middle) + middle]
    n1 = n2 // 2

    def score(d: float) -> float:
        log_mu = np.log(mu)
        rising = (n2 - n1 - 1) * np.sum(log_mu / (1 - mu**-d)) if n1 > 1 else 0.0
        return (len(mu) - 1) / d + rising - (n2 - 1) * np.sum(log_mu)

    return brentq(score, 1e-3, 1e3, xtol=1e-10)


@cache
def load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def naive_states(folder: str, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states of the layers, ``(n_layers, n_tokens, d)``, and logits."""
    with torch.no_grad():
        output = load(folder)(input_ids=torch.tensor([ids]), output_hidden_states=True)
    hidden = torch.stack(output.hidden_states[1:])[:, 0].double().numpy()
    return hidden, output.logits[0].double().numpy()


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory, small_lm: str) -> SimpleNamespace:
    """A file with texts, one of them too short, and the tokens of the others."""
    tokenizer = AutoTokenizer.from_pretrained(small_lm)
    rng = np.random.default_rng(0)
    rows, tokens = [], []
    for i in range(N_TEXTS):
        # The later ones have fewer different words.
        words = [f"name{n}" for n in rng.choice(400 // (i + 1), N_TOKENS, replace=False)]
        rows.append({"text": " ".join(words), "corpus": CORPORA[i % len(CORPORA)]})
        tokens.append(tokenizer.convert_tokens_to_ids(words))
    rows.insert(4, {"text": "name1 lives", "corpus": "one"})
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return SimpleNamespace(
        path=str(path), tokens=tokens, corpora=[r["corpus"] for r in rows if len(r["text"]) > 20]
    )
