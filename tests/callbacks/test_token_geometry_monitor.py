"""Token geometry while it happens: right numbers, and training left as it was."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from lincorr_lightning.callbacks import TokenGeometryMonitor
from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.results.run_folder import run_folder
from tests.callbacks import naive
from tests.toys import read_table

N_TOKENS = 12


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two texts of twelve words and more."""
    path = tmp_path_factory.mktemp("texts") / "watch.jsonl"
    rows = [" ".join(f"name{(7 * i + 3 * j) % 400}" for j in range(14)) for i in range(2)]
    path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
    return str(path), rows


def watch(texts, **options):
    return TokenGeometryMonitor(texts[0], **{"n_tokens": N_TOKENS, "every_n_steps": 1} | options)


def naive_numbers(model, tokenizer, rows):
    """Mean over texts of the 2NN dimension, overlap at k = 2, and cosine, by layer."""
    found = []
    for row in rows:
        ids = tokenizer(row, return_tensors="pt")["input_ids"][:, :N_TOKENS]
        with torch.no_grad():
            output = model.eval()(input_ids=ids, output_hidden_states=True)
        layers = [layer[0].double().numpy() for layer in output.hidden_states[1:]]
        dimension, near, cosine = [], [], []
        for cloud in layers:
            distances = cdist(cloud, cloud)
            mu = np.sort(distances, 1)[:, 2] / np.sort(distances, 1)[:, 1]
            middle, high = np.quantile(mu, [0.5, 0.95])
            mu = mu[mu <= middle + 20 * (high - middle)]
            dimension.append((len(mu) - 1) / np.log(mu).sum())
            near.append([set(line[1:3]) for line in distances.argsort(1)])
            off = ~np.eye(len(cloud), dtype=bool)
            cosine.append((1 - cdist(cloud, cloud, "cosine"))[off].mean())
        overlap = [
            np.mean([len(a & b) / 2 for a, b in zip(*pair, strict=True)]) for pair in pairwise(near)
        ]
        loss = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:])
        found.append([*dimension, *overlap, *cosine, float(loss)])
    return np.mean(found, 0)


def numbers_at(history, step):
    tags = "dimension_n2=2/layer_1 dimension_n2=2/layer_2 overlap_k=2/layer_1 cosine/layer_1 "
    tags += "cosine/layer_2 loss"
    return [dict(history[f"token_geometry/{tag}"])[step] for tag in tags.split()]


def test_every_step_of_training(small_lm, texts, fit):
    module = naive.Module(small_lm)
    states = naive.Loop(module, list(naive.sentences(small_lm))).states
    callback = watch(texts)
    folder = run_folder(fit(callback, module=module))
    assert [step for step, _ in callback.history["token_geometry/loss"]] == [0, 1, 2, 3, 4]
    for step, state in enumerate(states):
        expected = naive_numbers(state, module.tokenizer, texts[1])
        assert numbers_at(callback.history, step) == pytest.approx(expected, rel=2e-3, abs=1e-4)
    assert numbers_at(callback.history, 0) != numbers_at(callback.history, 4)
    table = read_table(folder / "tables" / "token_geometry.csv")
    rows = [row for row in table if (row["observable"], row["layer"]) == ("cosine", "2")]
    curve = [(int(row["step"]), float(row["mean"])) for row in rows]
    assert curve == callback.history["token_geometry/cosine/layer_2"]


def test_too_short_texts_are_refused(texts, fit):
    with pytest.raises(SubjectsError, match=r"shorter than TokenGeometryMonitor\.n_tokens, 40"):
        fit(watch(texts, n_tokens=40))
