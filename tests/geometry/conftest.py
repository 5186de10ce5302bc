"""Texts of the small LM's words, and the numbers of their clouds by numpy and scikit-learn."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from sklearn.neighbors import NearestNeighbors
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.toys import quiet_trainer

N_TOKENS, N_TEXTS = 16, 10
CORPORA = ("one", "two", "three", "four", "five")


def naive_dimension(cloud: np.ndarray, n2: int) -> float:
    """Maximum likelihood on a fine grid around it; 2NN in closed form."""
    distances, _ = NearestNeighbors(n_neighbors=n2 + 1).fit(cloud).kneighbors(cloud)
    mu = distances[:, n2] / distances[:, n2 // 2]
    middle, high = np.quantile(mu, [0.5, 0.95])
    mu = mu[mu <= middle + 20 * (high - middle)]
    if n2 == 2:
        return (len(mu) - 1) / np.log(mu).sum()
    d = np.linspace(0.01, 60, 200_000)
    a = n2 - n2 // 2 - 1
    score = (len(mu) - 1) / d - (n2 - 1) * np.log(mu).sum()
    for one in mu:
        score += a * np.log(one) / (1 - one**-d)
    return float(d[np.abs(score).argmin()])


def naive_neighbors(cloud: np.ndarray, k: int) -> list[set[int]]:
    distances = np.linalg.norm(cloud[:, None] - cloud[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    return [set(row[:k]) for row in distances.argsort(1)]


def naive_states(folder: str, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states of the layers, and probabilities."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    hidden = torch.stack(output.hidden_states[1:])[:, 0].double().numpy()
    return hidden, output.logits[0].double().softmax(-1).numpy()


@pytest.fixture(scope="session")
def naive() -> SimpleNamespace:
    """The helpers of this file, which test files cannot import."""
    return SimpleNamespace(
        dimension=naive_dimension, neighbors=naive_neighbors, states=naive_states, entropy=entropy
    )


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


@pytest.fixture
def make_trainer(tmp_path: Path) -> Any:
    return partial(quiet_trainer, tmp_path)
