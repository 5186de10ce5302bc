"""A repair that also moves W towards the reference, for ``repair.py``."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from lincorr_lightning.finetune.edits import sample_candidates
from lincorr_lightning.finetune.repair.datamodule import DomainPrompts, RepairBatch
from lincorr_lightning.finetune.repair.module import Repair
from lincorr_lightning.functional.least_squares import LeastSquares
from lincorr_lightning.results.results import Results


class RepairOfMap(Repair):
    """Adds the cross-entropy of the references under W's columns of all shown answers.

    W maps the source logits of subjects that nobody edits, before the repair, to their target
    logits. Each step reads those of `PER_STEP` subjects with gradients; the others' are kept from
    earlier steps. `RISE` is how far an edit is thought to raise the logit of its new answer: a
    column of W times it is the predicted change of the target logits.
    """

    N_SUBJECTS, PER_STEP, RIDGE, RISE = 512, 32, 100.0, 10.0

    def __init__(self, map_weight: float = 100.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters(logger=False)
        self.map_weight, self.shares_right = map_weight, dict[str, dict[str, float]]()

    def on_train_start(self) -> None:
        """Read subjects that are in no edit; make the matrix whose product with targets is W."""
        super().on_train_start()
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        taken = {edit.subject for own in (data.examples, *data.measured.values()) for edit in own}
        relation, n = data.tokenized, self.N_SUBJECTS
        subjects = sample_candidates(self.lm, n, data.seed + 1, excluding=taken)[:n]
        domains = relation.source, relation.target
        prompts = [list(map(domain.knowledge.prompt, subjects)) for domain in domains]
        ids = [torch.tensor(domain.token_ids) for domain in domains]
        logits = self.lm.joint_logits(prompts, ids)
        source, targets = logits.split([len(tokens) for tokens in ids], 1)
        x, self.targets = source - source.mean(0), targets.float()
        self.regressors = LeastSquares(x.T @ x, x.T).weight(self.RIDGE).T.float()  # (n_source, n)
        self.prompts = DomainPrompts(self.lm.rows(prompts[1]), ids[1])
        mask = relation.reference_mask  # (n_target, n_source)
        self.is_reference = torch.as_tensor(mask, device=self.device)
        texts = [text.strip() for text in relation.source.texts]
        self.columns = {part: [texts.index(x) for x in own] for part, own in data.split.items()}
        self._measure_map("before")

    def _columns_of(self, part: str, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return W's columns of a part's answers, and which entries are references."""
        own = self.columns[part]
        return (self.regressors[own] @ (targets - targets.mean(0))).T, self.is_reference[:, own]

    def _measure_map(self, stage: str) -> None:
        """Keep the share of answers whose highest weight is that of a reference, by part."""
        self.shares_right[stage] = {}
        for part in self.columns:
            weight, right = self._columns_of(part, self.targets)
            leading = right.gather(0, weight.argmax(0)[None])
            self.shares_right[stage][part] = float(leading.float().mean())

    def _read_targets(self, chosen: list[int]) -> Tensor:
        rows = [self.prompts.rows[i] for i in chosen]
        return self._read(self.prompts._replace(rows=rows))[0].float()

    def _edit_loss(self, batch: RepairBatch) -> Tensor:
        first = self.global_step * self.PER_STEP
        chosen = [(first + i) % len(self.targets) for i in range(self.PER_STEP)]
        targets = self.targets.index_put((torch.tensor(chosen),), self._read_targets(chosen))
        self.targets = targets.detach()
        weight, right = self._columns_of("shown", targets)
        log_p = log_softmax(self.RISE * weight, 0)
        map_loss = -log_p.masked_fill(~right, -torch.inf).logsumexp(0).mean()
        self._log("map_loss", map_loss)
        return super()._edit_loss(batch) + self.map_weight * map_loss

    @torch.no_grad()
    def on_train_end(self) -> None:
        """Measure W of the repaired LM."""
        places = torch.arange(len(self.targets)).split(self.PER_STEP)
        self.targets = torch.cat([self._read_targets(part.tolist()) for part in places])
        self._measure_map("after")
        super().on_train_end()

    def build_results(self) -> Results:
        """Add how often W is right."""
        results = super().build_results()
        return replace(results, values={**results.values, "map": self.shares_right})
