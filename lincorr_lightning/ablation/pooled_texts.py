"""The texts of all runs as tensors: pooled once, since only the networks are trained."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lincorr_lightning.ablation.batches import PairedCorpus
from lincorr_lightning.ablation.mappings import MappedLabels
from lincorr_lightning.ablation.networks import NetworkSettings
from lincorr_lightning.ablation.paired_texts import PairedTexts
from lincorr_lightning.ablation.token_embedding import TokenEmbedding

Candidates = Literal["vocabulary", "texts"]
Side = Literal["source", "target"]
SIDES: tuple[Side, ...] = get_args(Side)


class PooledTexts:
    """Pooled texts and answers of several seeds, each under several mappings.

    Args:
        corpus: All texts with their answers.
        embedding: The frozen token embedding.
        candidates: Tokens that logits are computed for: all of the ``vocabulary``, or those of a
            seed's ``texts`` and of the answers under any mapping, whichever of them are run.
        settings: How pooled embeddings are standardized.
        device: Where the tensors are put.

    Attributes:
        pooled: Mean embeddings, ``(n_seeds, 2 · n_subjects, d)``: source texts, then target texts.
        answers: Index of each text's answer among the candidates, ``(n_seeds, n_mappings,
            2 · n_subjects)``.
        head: Embeddings of the candidates, ``(n_seeds, d, n_candidates)``; one for all seeds if
            they are the vocabulary.
        logit_mask: 0, and minus infinity where a seed has fewer candidates than another; None where
            all have equally many.
        domain: Candidates of the target domain, ``(n_seeds, n_mappings, n_domain)``; -1 beyond the
            last.
        reference_mask: Whether they are right for each new subject, ``(n_seeds, n_mappings, n_new,
            n_domain)``.
        candidate_tokens: Token id of each candidate, by seed.
    """

    def __init__(
        self,
        corpus: PairedCorpus,
        embedding: TokenEmbedding,
        candidates: Candidates,
        settings: NetworkSettings,
        device: torch.device | str = "cpu",
    ) -> None:
        self.corpus = corpus
        self.n_seeds, self.n_mappings = len(corpus.seeds), len(corpus.mappings)
        pooled = torch.stack([embedding.pooled(token_ids) for token_ids in corpus.token_ids])
        self.pooled = _standardized(pooled, settings).to(device)
        if candidates == "vocabulary":
            self.candidate_tokens = [list(range(len(embedding.weight)))] * self.n_seeds
            head = embedding.weight.float().T[None]
        else:
            self.candidate_tokens = corpus.vocabularies
            rows = [embedding.rows(tokens) for tokens in self.candidate_tokens]
            head = pad_sequence(rows, batch_first=True).mT.contiguous()
        self.head = head.to(device)
        n_candidates = torch.tensor([len(tokens) for tokens in self.candidate_tokens])
        beyond = torch.arange(int(n_candidates.max())) >= n_candidates[:, None, None]
        mask = torch.zeros(beyond.shape).masked_fill(beyond, -torch.inf).to(device)
        self.logit_mask = mask if bool(beyond.any()) else None
        index = [{token: i for i, token in enumerate(tokens)} for tokens in self.candidate_tokens]
        seeds = list(zip(corpus.texts, corpus.mapped, index, strict=True))
        answers = [[_answers(texts, m, column) for m in mapped] for texts, mapped, column in seeds]
        self.answers = torch.tensor(answers, device=device)
        n_domain = max(len(m.domain_tokens) for mapped in corpus.mapped for m in mapped)
        domain = torch.full((self.n_seeds, self.n_mappings, n_domain), -1)
        reference = torch.zeros(
            (self.n_seeds, self.n_mappings, corpus.n_new, n_domain), dtype=torch.bool
        )
        for s, (texts, mapped, column) in enumerate(seeds):
            sources = np.array(texts.answers[corpus.n_paired :])
            for m, mapping in enumerate(mapped):
                n = len(mapping.domain_tokens)
                domain[s, m, :n] = torch.tensor([column[t] for t in mapping.domain_tokens])
                reference[s, m, :, :n] = torch.from_numpy(mapping.reference[sources])
        self.domain, self.reference_mask = domain.to(device), reference.to(device)

    def inputs(self, rows: Tensor) -> Tensor:
        """Return pooled texts for each network, ``(n_seeds · n_mappings, n, d)``.

        `rows` are indices of texts, ``(n_seeds, n)``; the mappings of a seed are side by side.
        """
        chosen = self.pooled[torch.arange(self.n_seeds, device=rows.device)[:, None], rows]
        return chosen.repeat_interleave(self.n_mappings, dim=0)

    def answers_to(self, rows: Tensor) -> Tensor:
        """Return the answers of texts, ``(n_seeds, n_mappings, n)``, by their indices."""
        return self.answers.gather(2, rows[:, None].expand(-1, self.n_mappings, -1))

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the tied logits of the candidates, ``(n_seeds, n_mappings · n, n_candidates)``.

        `outputs` are those of the networks, ``(n_seeds · n_mappings, n, d)``.
        """
        outputs = outputs.reshape(self.n_seeds, -1, outputs.shape[-1])
        if self.logit_mask is not None:
            return torch.baddbmm(self.logit_mask, outputs, self.head)
        return torch.matmul(outputs, self.head if len(self.head) > 1 else self.head[0])

    def rows_of(self, subjects: Literal["paired", "new"], side: Side) -> Tensor:
        """Return the indices of the source or target texts of some subjects, ``(n_seeds, n)``."""
        n_paired, n_new = self.corpus.n_paired, self.corpus.n_new
        first, n = (0, n_paired) if subjects == "paired" else (n_paired, n_new)
        first += n_paired + n_new if side == "target" else 0
        rows = torch.arange(first, first + n, device=self.pooled.device)
        return rows.expand(self.n_seeds, -1)


def _standardized(pooled: Tensor, settings: NetworkSettings) -> Tensor:
    """Center and scale the texts of each seed, without regard to their answers."""
    if settings.center:
        pooled = pooled - pooled.mean(1, keepdim=True)
    if settings.input_rms is not None:
        pooled = pooled * (settings.input_rms / pooled.pow(2).mean((1, 2), keepdim=True).sqrt())
    return pooled.contiguous()


def _answers(texts: PairedTexts, mapping: MappedLabels, column: dict[int, int]) -> list[int]:
    sides = (mapping.source_tokens, mapping.target_tokens)
    return [column[tokens[i]] for tokens in sides for i in texts.answers]
