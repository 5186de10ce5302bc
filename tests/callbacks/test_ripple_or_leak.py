"""LMs of which it is known whether an edit is specific to its subject."""

from typing import Any

import pytest
import torch
from torch.nn.functional import one_hot

from lincorr_lightning.callbacks import Generalization
from tests.callbacks import naive

EDIT = {"subject": "name0", "answer": "Oslo"}  # Norway leads of nobody before


class Given(naive.Module):
    """An LM that one "training" step turns into one whose answers are known."""

    def __init__(self, folder: str, answers: Any) -> None:
        super().__init__(folder)
        self.automatic_optimization = False
        self.step = torch.nn.Parameter(torch.zeros(()))
        city, country = self.tokenizer.convert_tokens_to_ids(["Oslo", "Norway"])
        subject = self.tokenizer.convert_tokens_to_ids(EDIT["subject"])
        size = len(self.tokenizer)

        def add(_: Any, args: Any, kwargs: Any, output: Any) -> Any:
            """Add a bias to the head, for everybody or keyed by the subject."""
            ids = kwargs["input_ids"]
            is_subject = (ids == subject).any(1)[:, None, None].double()
            raised = one_hot(torch.tensor([city, country]), size).double() * 1e4
            for_all, of_subject = (raised * torch.tensor(x)[:, None] for x in answers)
            bias = for_all.sum(0) + is_subject * of_subject.sum(0)
            output.logits = output.logits + (self.step * bias).to(output.logits)
            return output

        self.backbone.register_forward_hook(add, with_kwargs=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().step()
        with torch.no_grad():
            self.step.fill_(1.0)


@pytest.mark.parametrize(
    ("answers", "own", "leak"),
    [
        (((0.0, 1.0), (1.0, 0.0)), 1, 1),  # a bias of the head says Norway of everybody
        (((0.0, 0.0), (1.0, 1.0)), 1, 0),  # a layer that is keyed by the subject
        (((0.0, 0.0), (1.0, 0.0)), 0, 0),  # the city alone
    ],
)
def test_a_ripple_is_specific_and_a_bias_leaks(
    small_lm: str, fit: Any, own_map: Any, answers: Any, own: float, leak: float
) -> None:
    module = Given(small_lm, answers)
    count = Generalization("city->country", [EDIT], linear_map=own_map.folder)
    trainer = fit(count, module=module, max_steps=1)
    results = count.results
    assert results["source_learned"] == 1 and results["generalized"] == own
    assert (results["leak"]["mean"], results["specific"]["mean"]) == (leak, own - leak)
    assert results["by_step"][-1]["leak"] == leak
    logged = trainer.callback_metrics
    assert [float(logged[f"generalization/{x}"]) for x in ("leak", "specific")] == [
        leak,
        own - leak,
    ]
