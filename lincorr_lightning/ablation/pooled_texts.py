"""The texts of all runs as tensors: pooled once, since nothing but the network is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lincorr_lightning.ablation.datamodule import PairedTexts
from lincorr_lightning.ablation.mappings import MappedLabels, PairedLabels, tokens_of_answers
from lincorr_lightning.ablation.stacked_networks import NetworkSettings

if TYPE_CHECKING:
    from lincorr_lightning.ablation.token_embedding import TokenEmbedding

Candidates = Literal["vocabulary", "texts"]


class PooledTexts(nn.Module):
    """Pooled texts and answers of several seeds, each under several mappings.

    Args:
        embedding: The frozen vocabulary.
        labels: The answers that take part.
        texts: Of each seed.
        mapped: Of each seed, the mappings in their order.
        candidates: Among which tokens an answer is told: all of the vocabulary, or those of the
            seed's texts and answers, which do not depend on the mappings that are run.
        settings: How pooled embeddings are put into a network.

    Attributes:
        pooled: ``(n_seeds, 2 · n_subjects, d)``: the source texts, then the target texts.
        answers: Index of each text's answer among the candidates, ``(n_seeds, n_mappings,
            2 · n_subjects)``.
        head: Embeddings of the candidates, ``(n_seeds, d, n_candidates)``, or one for all seeds.
        shut: 0, and minus infinity where a seed has fewer candidates than another; None where
            all have as many.
        domain: Candidates that the target is asked among, ``(n_seeds, n_mappings, n_domain)``;
            -1 where there are fewer.
        right: Whether they are right for each new subject, ``(n_seeds, n_mappings, n_new,
            n_domain)``.
        candidate_tokens: The token of each candidate, by seed.
    """

    pooled: Tensor
    answers: Tensor
    head: Tensor
    shut: Tensor | None
    domain: Tensor
    right: Tensor

    def __init__(
        self,
        embedding: TokenEmbedding,
        labels: PairedLabels,
        texts: Sequence[PairedTexts],
        mapped: Sequence[Sequence[MappedLabels]],
        candidates: Candidates,
        settings: NetworkSettings,
    ) -> None:
        super().__init__()
        self.n_paired, self.n_new = texts[0].n_paired, texts[0].n_new
        pooled = torch.stack([_pool(embedding, labels, told) for told in texts])
        self._keep("pooled", _standardized(pooled, settings))
        if candidates == "vocabulary":
            self.candidate_tokens = [list(range(len(embedding.weight)))] * len(texts)
            self._keep("head", embedding.weight.float().T[None])
        else:
            self.candidate_tokens = [_tokens_in_play(embedding, labels, told) for told in texts]
            self._keep("head", _side_by_side([embedding.rows(t).T for t in self.candidate_tokens]))
        self._keep("shut", self._shut())
        places = [{token: i for i, token in enumerate(tokens)} for tokens in self.candidate_tokens]
        self._keep(
            "answers",
            torch.stack(
                [
                    torch.stack([_answers(told, m, place) for m in maps])
                    for told, maps, place in zip(texts, mapped, places, strict=True)
                ]
            ),
        )
        most = max(len(m.domain_tokens) for maps in mapped for m in maps)
        shape = (len(texts), len(mapped[0]))
        domain = torch.full((*shape, most), -1)
        right = torch.zeros((*shape, self.n_new, most), dtype=torch.bool)
        for s, (told, maps, place) in enumerate(zip(texts, mapped, places, strict=True)):
            asked = np.array(told.answers[self.n_paired :])
            for m, mapping in enumerate(maps):
                n = len(mapping.domain_tokens)
                domain[s, m, :n] = torch.tensor([place[t] for t in mapping.domain_tokens])
                right[s, m, :, :n] = torch.from_numpy(mapping.right[asked])
        self._keep("domain", domain)
        self._keep("right", right)

    def _keep(self, name: str, tensor: Tensor | None) -> None:
        # Not in checkpoints: the vocabulary and the texts give them again.
        self.register_buffer(name, tensor, persistent=False)

    def _shut(self) -> Tensor | None:
        counts = [len(tokens) for tokens in self.candidate_tokens]
        if min(counts) == max(counts):
            return None
        shut = torch.zeros(len(counts), 1, max(counts))
        for row, count in zip(shut, counts, strict=True):
            row[:, count:] = -torch.inf
        return shut

    @property
    def n_seeds(self) -> int:
        """Seeds side by side."""
        return len(self.pooled)

    @property
    def n_mappings(self) -> int:
        """Mappings of each seed."""
        return self.answers.shape[1]

    def inputs(self, rows: Tensor) -> Tensor:
        """Pooled texts for each network.

        Args:
            rows: ``(n_seeds, n)``.

        Returns:
            ``(n_seeds · n_mappings, n, d)``, the mappings of a seed side by side.
        """
        chosen = self.pooled[torch.arange(self.n_seeds, device=rows.device)[:, None], rows]
        return chosen.repeat_interleave(self.n_mappings, dim=0)

    def answers_to(self, rows: Tensor) -> Tensor:
        """The answers to them, ``(n_seeds, n_mappings, n)``."""
        index = rows[:, None].expand(-1, self.n_mappings, -1)
        return self.answers.gather(2, index)

    def logits(self, outputs: Tensor) -> Tensor:
        """Tied logits of the candidates.

        Args:
            outputs: Of the networks, ``(n_seeds · n_mappings, n, d)``.

        Returns:
            ``(n_seeds, n_mappings · n, n_candidates)``.
        """
        outputs = outputs.reshape(self.n_seeds, -1, outputs.shape[-1])
        if self.shut is not None:
            return torch.baddbmm(self.shut, outputs, self.head)
        return torch.matmul(outputs, self.head if len(self.head) > 1 else self.head[0])

    @property
    def n_subjects(self) -> int:
        """Subjects of each seed, the new ones last."""
        return self.n_paired + self.n_new

    def rows_of(self, who: Literal["paired", "new"], side: Literal["source", "target"]) -> Tensor:
        """Texts of the paired or the new subjects, ``(n_seeds, n)``.

        Args:
            who: Of whom.
            side: Their source texts or their target texts.
        """
        first, n = (0, self.n_paired) if who == "paired" else (self.n_paired, self.n_new)
        first += self.n_subjects if side == "target" else 0
        rows = torch.arange(first, first + n, device=self.pooled.device)
        return rows.expand(self.n_seeds, -1)


def _pool(embedding: TokenEmbedding, labels: PairedLabels, told: PairedTexts) -> Tensor:
    subjects = list(told.subjects)
    prompts = [*labels.asked.source_prompts(subjects), *labels.asked.target_prompts(subjects)]
    return embedding.pooled(prompts)


def _standardized(pooled: Tensor, settings: NetworkSettings) -> Tensor:
    """Centre and scale each seed's texts; it knows of no answer."""
    if settings.center:
        pooled = pooled - pooled.mean(1, keepdim=True)
    if settings.input_rms is not None:
        pooled = pooled * (settings.input_rms / pooled.pow(2).mean((1, 2), keepdim=True).sqrt())
    return pooled.contiguous()


def _tokens_in_play(
    embedding: TokenEmbedding, labels: PairedLabels, told: PairedTexts
) -> list[int]:
    """All tokens of a seed's texts, and of the answers under any mapping."""
    subjects = list(told.subjects)
    prompts = [*labels.asked.source_prompts(subjects), *labels.asked.target_prompts(subjects)]
    tokens = tokens_of_answers(labels, embedding.tokenizer)
    for ids in embedding.tokenizer(prompts, add_special_tokens=False)["input_ids"]:
        tokens.update(ids)
    return sorted(tokens)


def _side_by_side(heads: Sequence[Tensor]) -> Tensor:
    """Stack heads of several widths, with zeros where there are fewer candidates."""
    most = max(head.shape[1] for head in heads)
    stacked = torch.zeros(len(heads), heads[0].shape[0], most)
    for row, head in zip(stacked, heads, strict=True):
        row[:, : head.shape[1]] = head
    return stacked


def _answers(told: PairedTexts, mapping: MappedLabels, place: dict[int, int]) -> Tensor:
    sides = (mapping.source_tokens, mapping.target_tokens)
    return torch.tensor([place[tokens[i]] for tokens in sides for i in told.answers])
