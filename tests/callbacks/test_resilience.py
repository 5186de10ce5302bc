"""How long an old map holds, against numpy."""

import numpy as np
import pytest

from lincorr_lightning.callbacks import Resilience
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.linear_map.fitting import sample_fitted_subjects
from tests.callbacks import naive

SUBJECTS = [f"name{i}" for i in range(20, 40)]


def test_random_words_of_before_training_are_scored_on_each_lm(small_lm, fit):
    """By numpy, as means over other draws of words."""
    module = naive.Module(small_lm, lr=0.02)
    states = naive.Loop(module, list(naive.sentences(small_lm))).states
    watch = Resilience(subjects=SUBJECTS, every_n_steps=4, n_subjects=150, ridge=0.0)
    fit(watch, module=module)
    words = {
        name: module.tokenizer.convert_ids_to_tokens(tokens)
        for name, tokens in watch._layout.words.items()
    }
    views = {
        "city": ("city", None),
        "country": ("country", None),
        "city words": ("city", words["city"]),
        "country words": ("country", words["country"]),
        "at city": ("city", naive.COUNTRIES),
    }

    def logits(state, subjects):
        return {
            key: naive.logits(state, module.tokenizer, name, subjects, labels)
            for key, (name, labels) in views.items()
        }

    fitted_on = sample_fitted_subjects(module.tokenizer, 150, SUBJECTS)
    base, rng = logits(states[0], fitted_on), np.random.default_rng(2)

    def r(now, x, fitted_y, y, chosen=slice(None)):
        weight, bias = naive.fit_map(base[x][:, chosen], base[fitted_y])
        return naive.r(now[x][:, chosen] @ weight.T + bias, now[y])

    for at, state in enumerate((states[0], states[4])):
        now = logits(state, SUBJECTS)
        draws = [rng.permutation(len(words["city"]))[:12] for _ in range(40)]
        expected = {
            "": (r(now, "city", "country", "country"), 1e-3),
            "_random_label_mean": (
                np.mean([r(now, "city words", "country", "country", draw) for draw in draws]),
                0.05,
            ),
            "_random_target_label_mean": (r(now, "city", "country words", "country words"), 0.1),
            "_same_prompt_label_mean": (r(now, "city", "at city", "country"), 1e-3),
        }
        logged = {key: watch.history[f"resilience{key}/city->country"][at][1] for key in expected}
        for key, (value, error) in expected.items():
            assert logged[key] == pytest.approx(value, abs=error), key
        assert watch.results["baselines"]["random_label_mean"][at] == logged["_random_label_mean"]
    assert watch.results["without_random_words"] is None


def test_of_edits_side_by_side_the_first_is_evaluated(small_lm, own_map, fit):
    """Also at the end, where that is the edit of number 3."""
    module = naive.RecordedEdits(small_lm)
    module.others = lambda: SUBJECTS
    watch = Resilience(own_map.folder, subjects=SUBJECTS, every_n_steps=3)
    training = EditTraining(edits_per_step=3, n_steps=2)
    fit(watch, module=module, data=naive.edits_data(module, n_edits=6, training=training))
    city, country = (module.read[3, 2][kind][1:] for kind in ("city", "country"))
    r = naive.r(city @ own_map.weight.T + own_map.bias, country)
    assert watch.results["after"] == pytest.approx(r, abs=1e-4)
    assert watch.results["after"] != watch.results["before"]
