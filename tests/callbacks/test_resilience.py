"""How long an old map holds, against numpy."""

import pytest
import torch

from lincorr_lightning.callbacks import Resilience
from lincorr_lightning.finetune.batches import EditTraining
from tests.callbacks import naive

SUBJECTS = [f"name{i}" for i in range(20, 40)]


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
