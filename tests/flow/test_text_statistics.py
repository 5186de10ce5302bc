"""Groups and activity of features on data, against loops over tokens and features."""

from collections import Counter
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from lincorr_lightning.flow import text_statistics
from lincorr_lightning.flow.graph import GROUPS, DecoderMatcher, match_features
from lincorr_lightning.flow.text_statistics import (
    MIN_FEATURES,
    FeatureActivity,
    FeatureGroups,
    TextStatistics,
    compare_cosines,
)
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import HookPoint
from tests.toys import toy_sae

HERE = HookPoint(3, "residual")
SOURCES = {
    "residual": HookPoint(2, "residual"),
    "mlp_out": HookPoint(3, "mlp_out"),
    "attention_out": HookPoint(3, "attention_out"),
}
SHORT = {"residual": "RES", "mlp_out": "MLP", "attention_out": "ATT"}
N, WIDTH = 12, 8


def _draw(n: int, seed: int) -> dict[HookPoint, torch.Tensor]:
    """Normal numbers, ``(n, N)``, for each hook point."""
    random = np.random.default_rng(seed)
    return {
        p: torch.from_numpy(random.normal(size=(n, N))).float() for p in (HERE, *SOURCES.values())
    }


def _decoders() -> dict[HookPoint, torch.Tensor]:
    decoders = {at: numbers.T for at, numbers in _draw(WIDTH, seed=0).items()}
    decoders[HERE][4] = 0  # nothing can be matched with it
    return decoders


def _features(n_tokens: int, seed: int) -> dict[HookPoint, torch.Tensor]:
    return {at: numbers.relu() for at, numbers in _draw(n_tokens, seed).items()}


def _naive(kinds: list[str], batches: list[dict[HookPoint, torch.Tensor]]) -> list[tuple]:
    """Every activation: its feature, the kinds of active predecessors, and all cosines."""
    decoders = {hook_point: d.numpy().astype(float) for hook_point, d in _decoders().items()}
    seen = []
    for features in batches:
        for token in range(len(features[HERE])):
            for f in range(N):
                if features[HERE][token, f] <= 0:
                    continue
                active, cosines = [], {}
                for kind in kinds:
                    a, b = decoders[HERE][f], decoders[SOURCES[kind]]
                    if not a.any():
                        cosines[kind] = np.nan
                        continue
                    cosine = b @ a / np.linalg.norm(b, axis=1) / np.linalg.norm(a)
                    best = int(cosine.argmax())
                    cosines[kind] = cosine[best]
                    if features[SOURCES[kind]][token, best] > 0:
                        active.append(kind)
                seen.append((f, active, cosines))
    return seen


@pytest.mark.parametrize(
    "kinds", [list(SOURCES), ["mlp_out", "attention_out"], ["residual", "mlp_out"]], ids=str
)
def test_counts_are_those_of_loops(kinds: list[str]) -> None:
    decoders = _decoders()
    matches = {
        SOURCES[kind]: match_features(decoders[HERE], decoders[SOURCES[kind]], k=2)
        for kind in kinds
    }
    groups = FeatureGroups(HERE, matches)
    assert groups.shares() == {} and np.isnan(groups.auroc(SOURCES[kinds[0]]))
    batches = [_features(20, seed=1), _features(7, seed=2)]
    for features in batches:
        groups.update(features)
    seen = _naive(kinds, batches)
    names = ["From " + (" & ".join(SHORT[k] for k in a) or "nowhere") for _, a, _ in seen]
    expected = {group: names.count(group) / len(names) for group in GROUPS}
    assert groups.shares() == pytest.approx(expected)
    by_feature = Counter((f, GROUPS.index(name)) for (f, *_), name in zip(seen, names, strict=True))
    assert {
        tuple(at): int(groups.counts[tuple(at)]) for at in groups.counts.nonzero().tolist()
    } == (by_feature)
    for kind in kinds:
        known = [(c[kind], kind in a) for _, a, c in seen if not np.isnan(c[kind])]
        cosines, together = zip(*known, strict=True)
        assert groups.auroc(SOURCES[kind]) == pytest.approx(roc_auc_score(together, cosines))


def test_texts_that_are_read_again_after_too_little_memory_count_once(small_lm: str) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    rows = lm.rows(["name1 lives in the city of", "red blue", "Rome"])
    points = HookPoint(0, "residual"), HookPoint(1, "residual")
    saes = {at: toy_sae(at, torch.eye(16)) for at in points}
    expected, again = (TextStatistics(lm, DecoderMatcher(saes)) for _ in range(2))
    expected.update(rows)
    fails, encode = [True], saes[points[1]].encode

    def fail_once(x: torch.Tensor) -> torch.Tensor:
        if fails:
            fails.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(x)

    saes[points[1]].encode = fail_once  # type: ignore[method-assign]
    again.update(rows)
    assert again.n_tokens == expected.n_tokens == sum(map(len, rows)) and not fails
    for at in points:
        assert torch.equal(again.activity[at].n_active, expected.activity[at].n_active)


def test_groups_share_features_as_sets_do_and_as_often_as_by_chance() -> None:
    random = np.random.default_rng(0)
    n, shares = random.integers(0, 12, 60), np.array([0.5, 0, 0.3, 0, 0.15, 0, 0, 0.05])
    groups = FeatureGroups(
        HERE, {SOURCES["residual"]: match_features(torch.eye(60), torch.eye(60))}
    )
    # Each feature keeps to one group as far as it can, or to none.
    counts = np.array(
        [
            random.multinomial(k, shares if f % 2 else np.eye(8)[2 * (f % 4)])
            for f, k in enumerate(n)
        ]
    )
    groups.counts = torch.from_numpy(counts)
    sets = [{f for f in range(60) if counts[f, code]} for code in range(8)]
    drawn = random.multinomial(n, counts.sum(0) / counts.sum(), (20_000, 60)) > 0
    found = list(groups.pairs())
    known = [i for i in range(8) if sets[i]]
    assert len(found) == len(known) * (len(known) - 1) > 5
    for pair in found:
        a, b = GROUPS.index(pair.group), GROUPS.index(pair.other)
        assert pair.n == len(sets[a])
        assert pair.share == pytest.approx(len(sets[a] & sets[b]) / len(sets[a]))
        both = (drawn[..., a] & drawn[..., b]).sum() / drawn[..., a].sum()
        assert pair.expected == pytest.approx(both, abs=0.01)


def test_cosines_of_groups_are_compared_by_all_orders_of_the_features() -> None:
    """Exact p of the rank sum by enumeration; q of Benjamini and Yekutieli by their formula."""
    random = np.random.default_rng(1)
    n, own = 5 + 6 + 3, [0] * 5 + [2] * 6 + [5] * 3  # the last group is too small
    matches, cosines = {}, {}
    for source, shift in ((SOURCES["residual"], 0.5), (SOURCES["mlp_out"], 0.0)):
        cosines[source.kind] = random.uniform(-0.3, 0.3, n) + shift * np.array(own) / 2
        values = torch.from_numpy(np.append(cosines[source.kind], [0.9, np.nan]))[:, None]
        matches[source] = SimpleNamespace(cosines=values, indices=torch.zeros(n + 2, 1).long())
    groups = FeatureGroups(HERE, matches)  # type: ignore[arg-type]
    groups.counts[torch.arange(n), own] = 3
    groups.counts[:n, 1] = 2  # each is less often in another group
    groups.counts[n + 1, 0] = 9  # its cosine is unknown, and the one before is never active
    found = compare_cosines([groups])
    assert MIN_FEATURES == 5 and len(found) == 2
    for test in found:
        values = cosines[test.source][:11]
        assert (test.group, test.other) == (GROUPS[0], GROUPS[2])
        assert (test.layer, test.n, test.n_other) == (3, 5, 6)
        assert test.auroc == pytest.approx(roc_auc_score([0] * 5 + [1] * 6, values))
        ranks = values.argsort().argsort()
        far = [abs(sum(ranks[list(few)]) - 25) for few in combinations(range(11), 5)]
        assert test.p == pytest.approx(np.mean(np.array(far) >= abs(ranks[:5].sum() - 25)))
    low, high = sorted(test.p for test in found)
    q = {low: min(1, 1.5 * low * 2, 1.5 * high), high: min(1, 1.5 * high)}
    assert [test.q for test in found] == pytest.approx([q[test.p] for test in found])
    assert low < 0.05 < high


def test_activity_is_counted_as_by_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    monkeypatch.setattr(text_statistics, "N_CONTEXT", 3)
    activity = FeatureActivity(6)
    values, peaks = [], {}
    for _ in range(3):
        lengths = [4, 2, 5]
        mask = np.arange(5) < np.array(lengths)[:, None]
        ids = np.where(mask, random.integers(1, 50, (3, 5)), 0)
        predicted = random.integers(1, 50, (3, 5))
        features = np.maximum(random.normal(size=(3, 5, 6)) - 0.3, 0)
        features[..., 5] = 0
        flat = torch.from_numpy(features)[torch.from_numpy(mask)].float()
        activity.update(flat, *(torch.from_numpy(part) for part in (ids, mask, predicted)))
        for text in range(3):
            for position in range(lengths[text]):
                values.append(features[text, position])
                for f in range(5):
                    value = features[text, position, f]
                    if value > peaks.get(f, (0,))[0]:
                        context = ids[text, max(0, position - 2) : position + 1].tolist()
                        peaks[f] = (value, context, predicted[text, position])
    table = np.array(values)
    assert activity.n_tokens == len(table) == 33
    assert activity.n_active.tolist() == (table > 0).sum(0).tolist()
    np.testing.assert_allclose(
        activity.mean[:5], [table[table[:, f] > 0, f].mean() for f in range(5)], rtol=1e-5
    )
    tokenizer = SimpleNamespace(batch_decode=lambda rows: [str(row) for row in rows])
    lm: Any = SimpleNamespace(tokenizer=tokenizer)
    assert activity.mean[5] == 0 and activity.name(5, lm) is None
    for f, (_, context, predicted) in peaks.items():
        assert activity.name(f, lm) == f"{context} → {[int(predicted)]}"
