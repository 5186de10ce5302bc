"""Baselines of r and of Hit@N: on states whose right excess is known, and by other libraries."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import Ridge

from lincorr_lightning.functional import causal_whitening, moments_of
from lincorr_lightning.linear_map.baselines import random_words, vocabulary_baselines
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.linear_map.scores import score_maps, with_numbers
from lincorr_lightning.linear_map.solver import fit_layout
from tests.nearness import causal_nearness
from tests.probe.test_module import run_probe
from tests.toys import mean_r

WIDTH, N_SOURCE, N_TARGET, RIDGE = 48, 30, 6, 20.0
SOURCE, TARGET, WORDS = range(30), range(30, 36), range(36, 66)
ANSWERS = np.arange(N_SOURCE) % N_TARGET
ANSWERS[12:18] = 0  # the constant answer
PAIRING = (np.arange(N_TARGET)[:, None] == ANSWERS).astype(float)


class World:
    """States after three prompts, a head, and all scores of the map of the pair."""

    def __init__(self, kind: str) -> None:
        rng = np.random.default_rng(0)
        self.head = rng.normal(size=(66, WIDTH))
        change = np.eye(WIDTH)
        if kind == "vocabulary":  # states do not change, and rows of pairs are alike
            self.head[30:36] = PAIRING @ self.head[:30] / 2 + rng.normal(size=(6, WIDTH)) / 9
        elif kind == "composed":  # target logits are those of the source labels, paired
            change = np.linalg.pinv(self.head[30:36]) @ PAIRING @ self.head[:30]
        states = rng.normal(size=(600, WIDTH)) @ np.diag(np.linspace(0.3, 1.5, WIDTH))
        noise = rng.normal(size=(2, 600, WIDTH)) / 4
        self.states = {"a": states, "b": states @ change.T + noise[0], "": states[::-1] + noise[1]}
        domains: Any = {
            name: SimpleNamespace(labels=tokens, token_ids=list(tokens), completeness=[])
            for name, tokens in (("a", SOURCE), ("b", TARGET))
        }
        self.layout = JointLayout(
            domains,
            (("a", "b"),),
            "One day, {} saw a",
            {("a", "b"): PAIRING > 0},
            permuted=True,
            words={"a": list(WORDS), "b": list(WORDS)},
        )
        views = self.layout.views.items()
        prompts = ["" if view.kind == "control" else view.name for view, _ in views]
        read = zip(prompts, (tokens for _, tokens in views), strict=True)
        rows = np.hstack([self.logits(*one) for one in read])
        layout, kept = self.layout, rows[400:, : self.layout.n_kept]
        fit = moments_of(layout.with_permuted(torch.from_numpy(rows[:400])), layout.blocks)
        test = moments_of(layout.with_permuted(torch.from_numpy(kept)), layout.test_blocks)
        fitted = fit_layout(fit, self.layout, RIDGE)
        self.weight = fitted.maps["y"]["a"].weight.numpy()
        self.fitted, self.test, self.rows = fitted, test, torch.from_numpy(rows[400:])
        scores = score_maps(fitted, test)
        numbers = random_words(fitted, test, N_SOURCE, rows=self.rows)
        scores = with_numbers(scores, numbers)
        head_rows = torch.from_numpy(self.head[[*SOURCE, *TARGET]])
        whitening = causal_whitening(lambda: torch.from_numpy(self.head).split(7)).matrix
        (self.score,) = vocabulary_baselines(scores, fitted, head_rows, whitening)

    def logits(self, prompt: str, tokens: Any) -> np.ndarray:
        return self.states[prompt] @ self.head[list(tokens)].T

    def map_between(self, x: tuple[str, Any], y: tuple[str, Any], ridge: float = RIDGE) -> Ridge:
        return Ridge(alpha=ridge).fit(self.logits(*x)[:400], self.logits(*y)[:400])

    def best_r(self, x: tuple[str, Any], y: tuple[str, Any]) -> np.ndarray:
        """Label by label, with the pair's ridge or without one."""
        return np.maximum(self.r(x, y), self.r(x, y, 1e-12))

    def r(self, x: tuple[str, Any], y: tuple[str, Any], ridge: float = RIDGE) -> np.ndarray:
        predicted = self.map_between(x, y, ridge).predict(self.logits(*x)[400:])
        true = self.logits(*y)[400:]
        return np.array([stats.pearsonr(p, t)[0] for p, t in zip(predicted.T, true.T, strict=True)])


@pytest.fixture(scope="module", params=["random", "vocabulary", "composed"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def _hits(weight: np.ndarray) -> list[bool]:
    return [bool(weight[:, i].argmax() == ANSWERS[i]) for i in range(N_SOURCE)]


def _macro(hits: list[bool]) -> float:
    by_answer = defaultdict(list)
    for answer, hit in zip(ANSWERS, hits, strict=True):
        by_answer[answer].append(hit)
    return float(np.mean([np.mean(each) for each in by_answer.values()]))


def test_hits_of_the_baselines(world: World) -> None:
    """By scikit-learn's ridge, a neighbour search and the most common answer."""
    rows = world.head[:30] - world.head[:30].mean(0), world.head[30:36] - world.head[30:36].mean(0)
    near = np.array(
        [[s @ t / np.linalg.norm(s) / np.linalg.norm(t) for s in rows[0]] for t in rows[1]]
    )
    most = Counter(ANSWERS.tolist()).most_common(1)[0][0]
    hits = {
        "constant": [bool(answer == most) for answer in ANSWERS],
        "unembedding": _hits(near),
        "causal_inner_product": _hits(causal_nearness(world.head, SOURCE, TARGET)),
        "same_prompt": _hits(world.map_between(("", SOURCE), ("", TARGET)).coef_),
        "gaussian_states": _hits(world.map_between(("a", SOURCE), ("a", TARGET)).coef_),
    }
    entry = world.score.to_json()
    precision, above = entry["precision"], entry["above_best_baseline"]
    assert precision["baselines"] == {
        name: pytest.approx({"1": np.mean(each), "macro_1": _macro(each)})
        for name, each in hits.items()
    }
    of_w = _hits(world.weight)
    assert precision["influenced"]["1"] == pytest.approx(np.mean(of_w))
    assert precision["macro"]["1"] == pytest.approx(_macro(of_w))
    assert precision["macro"]["n_references"] == N_TARGET
    best = max(np.mean(each) for each in hits.values())
    assert above["difference"] == pytest.approx(np.mean(of_w) - best)
    assert np.mean(hits[above["baseline"]]) == best == entry["best_baseline_1"]
    assert entry["excess_over_unembedding"]["mean"] == above["difference"]
    difference = np.array(of_w, float) - np.array(hits[above["baseline"]], float)
    if difference.any():
        interval = stats.ttest_1samp(difference, 0).confidence_interval(0.95)
        assert (above["low"], above["high"]) == pytest.approx(tuple(interval))


def test_r_of_random_words(world: World) -> None:
    """There are as many words as source labels, so that nothing is left to chance."""
    words, best = (world.best_r(("a", each), ("b", TARGET)) for each in (WORDS, SOURCE))
    labels = world.r(("a", SOURCE), ("b", TARGET))
    entry = world.score.to_json()
    baselines, excess = entry["baselines"], entry["excess_over_random_labels"]
    assert baselines["random_source_labels"]["mean"] == pytest.approx(words.mean(), abs=1e-6)
    assert entry["label_mean"] == pytest.approx(labels.mean(), abs=1e-9)
    assert excess["n_source_labels"] == N_SOURCE
    assert excess["mean"] == pytest.approx(best.mean() - words.mean(), abs=1e-6)
    at_target = world.best_r(("a", SOURCE), ("b", WORDS))
    assert baselines["random_target_labels"]["mean"] == pytest.approx(at_target.mean(), abs=0.05)
    welch = stats.ttest_ind(labels, at_target, equal_var=False).confidence_interval(0.95)
    assert excess["target"]["mean"] == pytest.approx(labels.mean() - at_target.mean(), abs=1e-6)
    assert excess["target"]["low"] < welch.low < welch.high < excess["target"]["high"]
    alone = random_words(world.fitted, world.test, N_SOURCE)["a", "b"]
    ends = [alone[f"excess_over_random_target_{end}"] for end in ("low", "high")]
    assert ends == pytest.approx((welch.low, welch.high), abs=1e-6)


def _bootstrap(world: World, sides: Any, n_draws: int = 400) -> np.ndarray:
    """Differences of mean r between two sides on subjects drawn with replacement.

    A side is a list of source words and target words, whose maps stay as they are.
    """
    rng = np.random.default_rng(1)
    pairs = [
        [
            (world.map_between(x, y).predict(world.logits(*x)[400:]), world.logits(*y)[400:])
            for x, y in side
        ]
        for side in sides
    ]
    differences = []
    for _ in range(n_draws):
        chosen = rng.integers(0, 200, 200)
        means = []
        for side in pairs:
            r = [
                np.corrcoef(p[chosen, j], t[chosen, j])[0, 1]
                for p, t in side
                for j in range(t.shape[1])
            ]
            means.append(np.mean(r))
        differences.append(means[0] - means[1])
    return np.array(differences)


@pytest.mark.parametrize("kind", ["random", "composed"])
def test_the_interval_covers_subjects_as_a_bootstrap_does(kind: str) -> None:
    """All labels and all words are compared, so that subjects alone are left to chance."""
    world = World(kind)
    excess = world.score.to_json()["excess_over_random_labels"]
    target = "b", TARGET
    drawn = _bootstrap(world, ([(("a", SOURCE), target)], [(("a", WORDS), target)]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert excess["high"] - excess["low"] == pytest.approx(high - low, rel=0.12)
    assert (excess["low"], excess["high"]) == pytest.approx((low, high), abs=(high - low) / 8)


def test_spreads_over_labels_and_over_subjects_add_up() -> None:
    world, n, rng = World("random"), 10, np.random.default_rng(5)
    widths = {}
    for rows in (world.rows, None):
        numbers = random_words(world.fitted, world.test, n, (), rows)
        low, high = (numbers["a", "b"][f"excess_over_random_{end}"] for end in ("low", "high"))
        widths[rows is None] = high - low
    same = np.random.default_rng(0)
    drawn = [
        [world.best_r(("a", pool[same.permutation(len(pool))[:n]]), ("b", TARGET)).mean()]
        for pool in map(np.array, (SOURCE, WORDS))
        for _ in range(10)
    ]
    of_draws = np.reshape(drawn, (2, 10)).var(1, ddof=1).sum() / 10
    # Other draws than those of the interval, on which the spread over subjects hardly depends.
    sides = [
        [(("a", rng.permutation(pool)[:n]), ("b", TARGET)) for _ in range(10)]
        for pool in (SOURCE, WORDS)
    ]
    of_subjects = _bootstrap(world, sides, 150).var(ddof=1)
    expected = 2 * stats.t.ppf(0.975, 20) * (of_draws + of_subjects) ** 0.5
    assert widths[False] == pytest.approx(expected, rel=0.15)
    assert widths[True] < 0.9 * widths[False]


def test_the_map_of_the_vocabulary(world: World) -> None:
    other = world.map_between(("a", SOURCE), ("a", TARGET))
    predicted = other.predict(world.logits("a", SOURCE)[400:])
    r = mean_r(predicted, world.logits("b", TARGET)[400:])
    entry = world.score.to_json()
    assert entry["baselines"]["same_prompt_map"] == pytest.approx(r, abs=1e-9)
    w, rest = world.weight.ravel(), world.weight - other.coef_
    assert entry["decomposition"] == pytest.approx(
        {
            "cosine": w @ other.coef_.ravel() / np.linalg.norm(w) / np.linalg.norm(other.coef_),
            "norm_share": np.linalg.norm(rest) / np.linalg.norm(w),
            "hit_1": np.mean(_hits(rest)),
        }
    )


def test_excess_is_that_of_what_the_lm_computes(world: World, request: Any) -> None:
    """None where states do not change, whatever the head; large for what the head does not say."""
    score = world.score
    if request.node.callspec.params["world"] == "composed":
        assert score["above_best_baseline_low"] > 0.3 and score["rest_hit_1"] > 0.9
    else:
        assert score["above_best_baseline_low"] <= 0
    if request.node.callspec.params["world"] == "vocabulary":
        assert score["influenced_1"] > 0.9


@pytest.mark.slow
def test_random_words_of_a_run(small_lm: str, tmp_path: Path) -> None:
    """They are whole words and no labels; without them, other numbers are the same."""
    pairs = []
    for n in (20, 0):
        options: dict[str, Any] = {"pairs": ["city->country"], "ridge": "auto", "random_labels": n}
        folder, data = tmp_path / str(n), {"n_subjects": 120, "batch_size": 50}
        probe, _, run = run_probe(folder, small_lm, data=data, **options)
        pairs += json.loads((run / "results.json").read_text())["pairs"]
        if n:
            words, labels = probe.layout.words, set(probe.layout.domains["city"].token_ids)
            texts = probe.lm.tokenizer.batch_decode([[token] for token in words["city"]])
    assert set(words) == {"city", "country"} and not labels & set(words["city"])
    assert len(set(texts)) == len(texts) > 20 and all(text.strip().isalpha() for text in texts)
    whole, plain = pairs
    assert whole["baselines"]["random_source_labels"]["draws"] == 10
    assert plain["baselines"] is plain["decomposition"] is plain["excess_over_unembedding"] is None
    for key in ("label_mean", "control_label_mean", "permuted_label_mean", "label_error"):
        assert plain[key] == pytest.approx(whole[key], rel=1e-9)
