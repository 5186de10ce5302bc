"""How long an old map holds, against numpy."""

import numpy as np
import pytest
import torch

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
    """Also at the end."""

    class Stacked(naive.Stacked):
        def on_train_end(self):
            found = {}
            for name, labels in (("city", naive.CITIES), ("country", naive.COUNTRIES)):
                prompts = [f"{x} lives in the {name} of" for x in SUBJECTS]
                rows = self.tokenizer(prompts, return_tensors="pt")["input_ids"]
                with self.adapters.rows([0] * len(rows)), torch.no_grad():
                    logits = self.backbone(input_ids=rows).logits[:, -1].double().numpy()
                found[name] = logits[:, self.tokenizer.convert_tokens_to_ids(labels)]
            self.r = naive.r(found["city"] @ own_map.weight.T + own_map.bias, found["country"])

    module = Stacked(small_lm)
    watch = Resilience(own_map.folder, subjects=SUBJECTS, every_n_steps=3)
    training = EditTraining(edits_per_step=3, n_steps=2)
    fit(watch, module=module, data=naive.edits_data(module, n_edits=6, training=training))
    assert watch.results["after"] == pytest.approx(module.r, abs=1e-4)
    assert watch.results["after"] != watch.results["before"]
