"""Feed-forward networks side by side, the texts that they read as tensors, and their scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.ablation.datamodule import PairedCorpus
from lincorr_lightning.ablation.token_embedding import TokenEmbedding
from lincorr_lightning.errors import require_one_of
from lincorr_lightning.functional import macro_mean
from lincorr_lightning.functional.precision import neighbor_weights
from lincorr_lightning.lm.nearest_words import NearestWords

Candidates = Literal["vocabulary", "texts"]
NetworkKind = Literal["plain", "gated"]

_INPUT_RMS = 0.3  # embeddings of LMs differ by a factor of ten


@dataclass(frozen=True)
class NetworkSettings:
    """The feed-forward network, and how its inputs are standardized."""

    residual: bool = True
    """Whether the pooled embedding is added to the network's output."""
    center: bool = True
    """Whether the mean over all texts is subtracted from the pooled embeddings."""
    kind: NetworkKind = "plain"
    """``plain``, two linear layers and GELU, or ``gated``, the feed-forward network of LLaMA: SiLU,
    no biases, and the activations multiplied by a third linear layer of the inputs."""

    def __post_init__(self) -> None:
        require_one_of("model.network.kind", self.kind, get_args(NetworkKind))


class StackedNetworks(nn.Module):
    """Independent networks of one shape, with a leading dimension of networks.

    Each is ``x + W₂ σ(W₁ x + b₁) + b₂``, gated ``x + W₂ (σ(W₁ x) ⊙ W₃ x)`` (without ``x +`` if not
    residual). A forward pass of all of them is batched matrix products; every network computes what
    it would alone. Inputs and outputs have the width `d`, and there are four times as many hidden
    units. With `n_tokens`, each network also trains that many `embeddings`, which `PooledTexts`
    reads.
    """

    def __init__(self, n_networks: int, d: int, settings: NetworkSettings, n_tokens: int = 0):
        super().__init__()
        width = 4 * d
        gated = settings.kind == "gated"
        self.residual = settings.residual
        self.activation = nn.functional.silu if gated else nn.functional.gelu

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(n_networks, *shape))

        self.weight_in = parameter(d, width)
        self.bias_in = None if gated else parameter(1, width)
        self.weight_up = parameter(d, width) if gated else None
        self.weight_out = parameter(width, d)
        self.bias_out = None if gated else parameter(1, d)
        self.embeddings = parameter(n_tokens, d) if n_tokens else None

    @torch.no_grad()
    def reset(self, seeds: Sequence[int]) -> None:
        """Initialize each network like `torch.nn.Linear`, the same on any device."""
        first = self.weight_in, self.bias_in, self.weight_up
        for index, seed in enumerate(seeds):
            rng = torch.Generator().manual_seed(seed)
            for layer in (first, (self.weight_out, self.bias_out)):
                bound = layer[0].shape[1] ** -0.5
                for parameter in (part for part in layer if part is not None):
                    drawn = torch.rand(parameter.shape[1:], generator=rng) * (2 * bound) - bound
                    parameter[index].copy_(drawn)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of each network, of the inputs' shape ``(n_networks, n, d)``."""
        hidden = self.activation(_affine(self.bias_in, inputs, self.weight_in))
        if self.weight_up is not None:
            hidden = hidden * torch.bmm(inputs, self.weight_up)
        outputs = _affine(self.bias_out, hidden, self.weight_out)
        return inputs + outputs if self.residual else outputs


def _affine(bias: Tensor | None, inputs: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(inputs, weight) if bias is None else torch.baddbmm(bias, inputs, weight)


class PooledTexts:
    """Pooled texts and answers of several seeds, each under several mappings.

    They are pooled once; what trained embeddings change is added. `candidates` are the tokens that
    logits are computed for: all of the ``vocabulary``, or those of a seed's ``texts`` and of the
    answers under any mapping, whichever of them are run.

    Attributes:
        pooled: Mean embeddings, ``(n_seeds, 2 · n_subjects, d)``: source texts, then target texts.
        embeddings: Pretrained ones of new subjects' tokens, then 0, ``(n_seeds, n_tokens, d)``.
        parts: What each of them contributes to a text's mean, as scaled, ``(n_seeds,
            2 · n_subjects, n_tokens)``.
        answers: Index of each text's answer, ``(n_seeds, n_mappings, 2 · n_subjects)``.
        head: Embeddings of the candidates, ``(n_seeds or 1, d, n_candidates)``.
        logit_mask: 0, and minus infinity beyond a seed's last candidate; None if none ends early.
        domain: Candidates of the target domain, ``(n_seeds, n_mappings, n_domain)``; -1: no more.
        reference_mask: Whether they are right, ``(n_seeds, n_mappings, n_new, n_domain)``.
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
        self.n_seeds = len(corpus.plan.seeds)
        self.n_mappings = len(corpus.plan.mappings)
        pooled = torch.stack([embedding.pooled(token_ids) for token_ids in corpus.token_ids])
        # Texts are centered and scaled by seed, without regard to their answers.
        if settings.center:
            pooled = pooled - pooled.mean(1, keepdim=True)
        scale = _INPUT_RMS / pooled.pow(2).mean((1, 2), keepdim=True).sqrt()
        self.pooled = (pooled * scale).contiguous().to(device)
        rows = [embedding.rows(tokens) for tokens in corpus.new_tokens]
        self.embeddings = pad_sequence(rows, batch_first=True).to(device)
        parts = torch.zeros(*pooled.shape[:2], self.embeddings.shape[1])
        for s, all_tokens in enumerate(corpus.token_ids):
            column = {token: i for i, token in enumerate(corpus.new_tokens[s])}
            for i, tokens in enumerate(all_tokens):
                for token in column.keys() & set(tokens):
                    parts[s, i, column[token]] = tokens.count(token) / len(tokens)
        self.parts = (parts * scale).to(device)
        if candidates == "vocabulary":
            self.candidate_tokens = [list(range(len(embedding.weight)))] * self.n_seeds
            head = embedding.weight.float().T[None]
        else:
            self.candidate_tokens = corpus.vocabularies
            rows = [embedding.rows(tokens) for tokens in self.candidate_tokens]
            head = pad_sequence(rows, batch_first=True).mT.contiguous()
        self.head = head.to(device)
        zeros = [torch.zeros(len(tokens)) for tokens in self.candidate_tokens]
        mask = pad_sequence(zeros, True, -torch.inf)[:, None].to(device)
        self.logit_mask = mask if bool(mask.any()) else None
        index = [{token: i for i, token in enumerate(tokens)} for tokens in self.candidate_tokens]
        answers, domain, reference = [], [], []
        for index_of, texts, mappings in zip(index, corpus.texts, corpus.mapped, strict=True):
            new = list(texts.answers[corpus.n_paired :])
            for labels in mappings:
                sides = (labels.source_tokens, labels.target_tokens)
                answers.append([index_of[side[i]] for side in sides for i in texts.answers])
                domain.append(torch.tensor([index_of[token] for token in labels.domain_tokens]))
                reference.append(torch.from_numpy(labels.reference[new].T))
        shape = (self.n_seeds, self.n_mappings)
        self.answers = torch.tensor(answers, device=device).view(*shape, -1)
        self.domain = pad_sequence(domain, True, -1).view(*shape, -1).to(device)
        is_right = pad_sequence(reference, True, False).mT
        self.reference_mask = is_right.reshape(*shape, corpus.n_new, -1).to(device)

    def per_network(self, by_seed: Tensor) -> Tensor:
        """Repeat what a seed has for its networks; the mappings of a seed are side by side."""
        return by_seed.repeat_interleave(self.n_mappings, dim=0)

    def answers_to(self, rows: Tensor) -> Tensor:
        """Return the answers of texts, ``(n_seeds, n_mappings, n)``, by their indices."""
        return self.answers.gather(2, rows[:, None].expand(-1, self.n_mappings, -1))

    def logits(self, networks: StackedNetworks, rows: Tensor) -> Tensor:
        """Return the tied logits of the candidates, ``(n_seeds, n_mappings · n, n_candidates)``.

        `rows` are indices of texts, ``(n_seeds, n)``. Trained embeddings are those of the inputs
        only; the head keeps the pretrained ones.
        """
        seeds = torch.arange(self.n_seeds, device=rows.device)[:, None]
        inputs = self.per_network(self.pooled[seeds, rows])
        if networks.embeddings is not None:
            change = networks.embeddings - self.per_network(self.embeddings)
            inputs = torch.baddbmm(inputs, self.per_network(self.parts[seeds, rows]), change)
        outputs = networks(inputs).reshape(self.n_seeds, -1, inputs.shape[-1])
        if self.logit_mask is not None:
            return torch.baddbmm(self.logit_mask, outputs, self.head)
        return torch.matmul(outputs, self.head if len(self.head) > 1 else self.head[0])

    def rows_of(self, subjects: Literal["paired", "new"]) -> tuple[Tensor, Tensor]:
        """Return the indices of the source and of the target texts, ``(n_seeds, n)`` each."""
        n_paired, n = self.corpus.n_paired, self.pooled.shape[1] // 2
        bounds = (0, n_paired) if subjects == "paired" else (n_paired, n)
        rows = torch.arange(*bounds, device=self.pooled.device).expand(self.n_seeds, -1)
        return rows, rows + n


@torch.no_grad()
def _answer_new_subjects(texts: PooledTexts, networks: StackedNetworks) -> dict[str, Tensor]:
    """Let every network complete the texts of its new subjects.

    Returns candidates by name, ``(n_seeds, n_mappings, n_new)`` each, and whether that of the
    target domain is right.
    """
    rows = texts.rows_of("new")
    taught, mapped = (texts.answers_to(side) for side in rows)
    source, target = (texts.logits(networks, side).view(*taught.shape, -1) for side in rows)
    domain = texts.domain[:, :, None].expand(-1, -1, texts.corpus.n_new, -1)
    in_domain = target.gather(-1, domain.clamp(min=0)).masked_fill(domain < 0, -torch.inf)
    best = in_domain.argmax(-1, keepdim=True)
    return {
        "source_answer": taught,
        "source_said": source.argmax(-1),
        "reference": mapped,
        "target_in_domain": domain.gather(-1, best)[..., 0],
        "target_said": target.argmax(-1),
        "generalized": texts.reference_mask.gather(-1, best)[..., 0],
    }


Shares = dict[str, list[list[float]]]  #: Shares of the subjects by name, ``(n_seeds, n_mappings)``.


def score(texts: PooledTexts, networks: StackedNetworks) -> Shares:
    """Return each network's shares of its new subjects.

    ``source_learned``: source text completed as taught, among all candidates; ``generalized``:
    target text completed with a right answer, among the target domain; ``unrestricted``: the same
    among all candidates; ``says_source``: target text completed with the source answer;
    ``macro_generalized``: mean over the answers that are taught of the share that is generalized.
    """
    answers = _answer_new_subjects(texts, networks)
    is_best = answers["target_said"] == answers["target_in_domain"]
    hits = {
        "source_learned": answers["source_said"] == answers["source_answer"],
        "generalized": answers["generalized"],
        # The best of all candidates must be right, not only the best of the domain.
        "unrestricted": answers["generalized"] & is_best,
        "says_source": answers["target_said"] == answers["source_answer"],
    }
    shares: Shares = {name: hit.double().mean(-1).tolist() for name, hit in hits.items()}
    shares["macro_generalized"] = _macro(answers["generalized"], answers["reference"])
    return shares


def _macro(hits: Tensor, answers: Tensor) -> list[list[float]]:
    rows = zip(hits.double().flatten(0, 1).tolist(), answers.flatten(0, 1).tolist(), strict=True)
    return np.reshape([macro_mean(*row) for row in rows], hits.shape[:2]).tolist()


@torch.no_grad()
def score_paired(texts: PooledTexts, networks: StackedNetworks) -> Shares:
    """Return each network's shares of paired texts completed as taught, by side."""
    shares = {}
    for side, rows in zip(("source", "target"), texts.rows_of("paired"), strict=True):
        logits = texts.logits(networks, rows)
        answers = texts.answers_to(rows)
        hits = logits.argmax(-1).view_as(answers) == answers
        shares[f"{side}_learned"] = hits.double().mean(-1).tolist()
    return shares


def baselines(texts: PooledTexts, embedding: TokenEmbedding) -> dict[str, list[float]]:
    """Return the shares of the new subjects that are right without any network, by mapping.

    Means over seeds: ``random``, an answer drawn from the target domain; ``majority``, the most
    frequent right answer; ``nearest``, the target label nearest to the source answer in the
    embedding (`neighbor_weights`), and ``macro_nearest``, its mean over answers;
    ``causal_inner_product`` and ``macro_...``, the same in that product; ``upper_bound``,
    the most frequent right answer of each source answer, the most that can follow from it: less
    than all if sources have several targets.
    """
    source, target = map(texts.answers_to, texts.rows_of("new"))
    is_right = texts.reference_mask.double()
    per_answer = is_right.mean(2)
    alike = (source[..., :, None] == source[..., None, :]).double()
    words = NearestWords(embedding.stored, embedding.stored.checkpoint.request.name_or_path)

    def is_nearest_right(whitening: Tensor | None) -> Tensor:
        nearest = []
        for one, mapped in zip(texts.corpus.texts, texts.corpus.mapped, strict=True):
            new = list(one.answers[texts.corpus.n_paired :])
            for labels in mapped:
                rows = embedding.rows(labels.source_tokens), embedding.rows(labels.domain_tokens)
                nearest.append(neighbor_weights(*rows, whitening).argmax(0)[new])
        chosen = torch.stack(nearest).view(*source.shape, 1).to(source.device)
        return is_right.gather(-1, chosen)[..., 0]

    by_cosine, by_product = map(is_nearest_right, (None, words.whitening.matrix))
    shares = {
        "random": per_answer.sum(-1) / (texts.domain >= 0).sum(-1),
        "majority": per_answer.amax(-1),
        "upper_bound": ((alike @ is_right).amax(-1) / alike.sum(-1)).mean(-1),
        "nearest": by_cosine.mean(-1),
        "macro_nearest": by_cosine.new_tensor(_macro(by_cosine, target)),
        "causal_inner_product": by_product.mean(-1),
        "macro_causal_inner_product": by_product.new_tensor(_macro(by_product, target)),
    }
    return {name: share.mean(0).tolist() for name, share in shares.items()}


def cases(
    texts: PooledTexts, networks: StackedNetworks, tokenizer: PreTrainedTokenizerBase
) -> Iterator[dict[str, str | bool]]:
    """Yield what the networks of the first seed answer for each mapping and new subject."""
    answers = _answer_new_subjects(texts, networks)
    is_right = answers.pop("generalized")
    candidates = texts.candidate_tokens[0]
    for m, mapping in enumerate(texts.corpus.plan.mappings):
        for i, subject in enumerate(texts.corpus.texts[0].subjects[texts.corpus.n_paired :]):
            tokens = [[candidates[int(chosen[0, m, i])]] for chosen in answers.values()]
            words = tokenizer.batch_decode(tokens, clean_up_tokenization_spaces=False)
            row = dict(zip(answers, (word.strip() for word in words), strict=True))
            generalized = bool(is_right[0, m, i])
            yield {"mapping": mapping, "subject": subject, **row, "generalized": generalized}
