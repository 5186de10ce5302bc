"""Clouds of tokens in the layers of a causal LM, and tables of what is observed of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from lincorr_lightning.errors import ConfigError, LanguageModelError, NonFiniteError, SubjectsError
from lincorr_lightning.geometry import observables
from lincorr_lightning.lm.head import call_model
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import reading

if TYPE_CHECKING:
    from pandas import DataFrame

_MAX_K, _PAPER_K = 31, 2  # largest neighborhood of the paper, and that of its figures
_MIN_CORPORA = 4  # for a correlation over them
_MIN_RANK = 2  # angles need two neighbors
_LARGEST = 1e150  # squares must be finite in float64


@dataclass(frozen=True)
class CloudSettings:
    """Settings of the observables of clouds of tokens."""

    range_scalings: tuple[int, ...]
    ks: tuple[int, ...]
    embedding_layer: bool = False

    @classmethod
    def of(
        cls, n_tokens: int, range_scalings: Sequence[int] | None, ks: Sequence[int] | None,
        embedding_layer: bool, owner: str,
    ) -> Self:  # fmt: skip
        """Check settings and fill in defaults for clouds of n tokens.

        Range scalings are 2, 4, 8, ... up to a quarter of the tokens, at most 256; k is 1 to 31, or
        less if there are fewer tokens. `owner` is the prefix of the settings in messages.
        """
        # The paper's largest range scaling is a quarter of the tokens: 256 of 1,024.
        scalings = range_scalings or [n for n in observables.RANGE_SCALINGS if 4 * n <= n_tokens]
        sizes = ks or range(1, min(_MAX_K, n_tokens - 1) + 1)
        wrong = [n for n in scalings if n < 2 or n % 2 or n + 1 > n_tokens]
        if wrong or not scalings:
            raise ConfigError(
                f"{owner}.range_scalings has {wrong or 'nothing'}, with {n_tokens} points in a "
                "cloud; each must be even, at least 2, and needs one point more. Take longer texts "
                "or smaller range scalings."
            )
        wrong = [k for k in sizes if not 1 <= k < n_tokens]
        if wrong or not sizes:
            raise ConfigError(
                f"{owner}.ks has {wrong or 'nothing'}; each must be within 1 and "
                f"{n_tokens - 1}, the other points of a cloud."
            )
        return cls(tuple(sorted(set(scalings))), tuple(sorted(set(sizes))), embedding_layer)

    def nearest(self, clouds: Tensor, name: str, way_out: str) -> observables.NearestTokens:
        """Find the nearest points that the observables need, ``(n_layers, n_points, d)``.

        A cloud with too few distinct points is refused, by its name and with the way out.
        """
        nearest = observables.nearest_tokens(clouds, max(*self.range_scalings, *self.ks, _MIN_RANK))
        needed = max(self.range_scalings) + 1
        n_distinct = nearest.distinct.sum(-1)
        for number, n in zip(self.layers(len(clouds)), n_distinct.tolist(), strict=True):
            if n < needed:
                raise SubjectsError(
                    f"{name} has {n} distinct points of {clouds.shape[1]} in layer {number}; range "
                    f"scaling {needed - 1} needs {needed}. {way_out}"
                )
        return nearest

    def dimension(self, clouds: Tensor) -> Tensor:
        """Return the intrinsic dimension of clouds by scaling; NaN if there are too few points."""
        nearest = observables.nearest_tokens(clouds, max(self.range_scalings))
        return observables.intrinsic_dimension(nearest, self.range_scalings)

    def layers(self, n_layers: int) -> list[int]:
        """Return the numbers of the observed layers; 0 is the token embedding."""
        first = 0 if self.embedding_layer else 1
        return list(range(first, first + n_layers))


class PromptGeometry(NamedTuple):
    """Observables of one prompt: floats, as small tensors fragment memory, and one CPU tensor."""

    layers: dict[str, list[float]]  #: Its `token_observables`, by layer.
    numbers: dict[str, float]
    """Mean ``loss`` of the tokens from the second on and mean ``entropy``, in nats; intrinsic
    dimension of the cloud of the tokens' next-token probabilities, ``logits_dimension n2=2``."""
    last: Tensor | None  #: Last token's hidden state after each layer, ``(n_layers, d)``.


def observe_prompts(
    lm: LanguageModel, tokens: Tensor, prompts: Sequence[str], settings: CloudSettings
) -> list[PromptGeometry]:
    """Observe the clouds of the tokens of some prompts, with one forward pass.

    Tokens are ``(n_prompts, n_tokens)``; the names of the prompts are for messages.
    """
    all_hidden, logits = read_layers(lm, tokens, prompts, settings.embedding_layer)
    losses, entropies = observables.next_tokens(logits, tokens)
    observed = []
    for i, (name, hidden) in enumerate(zip(prompts, all_hidden, strict=True)):
        way_out = "Leave the text out, take longer ones, or name smaller range_scalings."
        nearest = settings.nearest(hidden, f"prompt {name}", way_out)
        scalings, ks = settings.range_scalings, settings.ks
        layers = observables.token_observables(hidden, nearest, scalings, ks)
        dimension = settings.dimension(logits[i].float().softmax(-1)[None])[0].tolist()
        numbers = {"loss": float(losses[i].mean()), "entropy": float(entropies[i].mean())}
        for n2, value in zip(settings.range_scalings, dimension, strict=True):
            numbers[f"logits_dimension n2={n2}"] = value
        # A copy, because a view would keep all tokens in memory.
        last = hidden[:, -1].float().cpu().clone()
        observed.append(PromptGeometry({k: v.tolist() for k, v in layers.items()}, numbers, last))
    return observed


@torch.no_grad()
def read_layers(
    lm: LanguageModel, tokens: Tensor, prompts: Sequence[str], embedding_layer: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the hidden states of all tokens in all layers and the logits, of one forward pass.

    The LM runs in eval mode and in its own precision. Special tokens before a text, such as BOS,
    are added here and left out of the result. `tokens` are ``(n_prompts, n_tokens)``; `prompts`,
    for messages, are their names. With `embedding_layer`, the token embedding comes first, as
    layer 0.

    Hidden states are ``(n_prompts, n_layers, n_tokens, d)``, of the last layer after the final
    norm; logits, ``(n_prompts, n_tokens, n_vocabulary)``. In the LM's dtype, on its device.
    """
    device = lm.model.device
    prefix = torch.tensor(lm.prefix, dtype=torch.long, device=device)
    rows = torch.cat([prefix.expand(len(tokens), -1), tokens.to(device)], dim=1)
    options = {"output_hidden_states": True}
    with reading(lm.model, device.type, compiled=lm.config.compile):
        output = call_model(lm.model, rows, options, attention_mask=torch.ones_like(rows))
    states = getattr(output, "hidden_states", None)
    if not states or any(layer.shape[:2] != rows.shape for layer in states):
        raise LanguageModelError(
            f"{type(lm.model).__name__} does not return the hidden state of each token after "
            "each layer (`output_hidden_states`), so they cannot be observed."
        )
    first = 0 if embedding_layer else 1
    # The layers of a large LM may be on several devices.
    hidden = torch.stack([layer[:, len(prefix) :].to(device) for layer in states[first:]], dim=1)
    logits = output.logits[:, len(prefix) :].to(device)
    largest = torch.linalg.vector_norm(hidden, math.inf, dim=-1).double()
    # With a logit of minus infinity, a token only has no probability.
    has_logits = logits.amax(-1).float().isfinite().all(-1, keepdim=True)
    broken = ~torch.cat([(largest < _LARGEST).all(-1), has_logits], 1).T
    if bool(broken.any()):
        part, prompt = broken.nonzero()[0].tolist()
        layer = part + first
        where = f"layer {layer}" if layer else "the embedding layer"
        name = "logits" if part == hidden.shape[1] else f"hidden states of {where}"
        raise NonFiniteError(
            f"the {name} of the LM {lm.config.name_or_path} are NaN, infinite or too large for "
            f"prompt {prompts[prompt]} in {lm.model.dtype}. If they come from float16, set "
            "lm.dtype to bfloat16 or float32; otherwise its weights are broken."
        )
    return hidden, logits


ObservedPrompt = tuple[int, int, str, str, PromptGeometry]
"""A prompt's number, shuffling level, name, corpus and geometry."""


@dataclass(frozen=True)
class TokenProfiles:
    """Observables of all prompts at all shuffling levels.

    Columns of a range scaling or of a size of neighborhoods are named as ``dimension n2=2`` and
    ``overlap k=10``; what is not finite is NaN.
    """

    n_tokens: int
    n_skipped: int  #: Number of texts that were too short.
    settings: CloudSettings
    prompts: "DataFrame"
    """A row per prompt and level: ``prompt``, ``corpus``, ``shuffle``, mean ``loss`` and
    ``entropy`` in nats, and ``logits_dimension`` at each scaling."""
    layers: "DataFrame"
    """A row each, and layer: ``prompt``, ``shuffle``, ``layer``, and the `token_observables`."""
    corpora: "DataFrame"
    """A row per corpus and layer: ``corpus``, ``layer``, mean ``loss`` of its unshuffled prompts,
    and ``dimension`` of the cloud of their last tokens; empty if there are too few corpora."""

    @property
    def n_prompts(self) -> int:
        """Number of prompts."""
        return len(self.prompts) // self.prompts["shuffle"].nunique()

    @property
    def paper_k(self) -> int:
        """The paper's k, or the first one."""
        return _PAPER_K if _PAPER_K in self.settings.ks else self.settings.ks[0]

    @property
    def shown(self) -> list[str]:
        """The observables of the paper's figure."""
        n2 = self.settings.range_scalings[0]
        return [f"dimension n2={n2}", f"overlap k={self.paper_k}", "cosine_mean", "angle_mean"]


def tabulate_prompts(
    observed: Sequence[ObservedPrompt], settings: CloudSettings, n_tokens: int, n_skipped: int,
    device: torch.device,
) -> TokenProfiles:  # fmt: skip
    """Make tables of the observed prompts at each level, in the prompts' order."""
    from pandas import DataFrame

    prompts, layers, corpora = [], [], []
    last: dict[str, list[Tensor]] = {}
    losses: dict[str, list[float]] = {}
    for _, level, name, corpus, geometry in sorted(observed, key=lambda prompt: prompt[:2]):
        numbers, values = geometry.numbers, geometry.layers
        prompts.append({"prompt": name, "corpus": corpus, "shuffle": level, **numbers})
        for i, layer in enumerate(settings.layers(len(values["cosine_mean"]))):
            # The last layer has no next one to overlap with.
            cells = {key: row[i] if i < len(row) else math.nan for key, row in values.items()}
            layers.append({"prompt": name, "shuffle": level, "layer": layer, **cells})
        if geometry.last is not None and level == 0:
            last.setdefault(corpus, []).append(geometry.last)
            losses.setdefault(corpus, []).append(numbers["loss"])
    for corpus in sorted(last) if len(last) >= _MIN_CORPORA else ():
        dimension = settings.dimension(torch.stack(last[corpus], 1).to(device)).tolist()
        loss = sum(losses[corpus]) / len(losses[corpus])
        for layer, row in zip(settings.layers(len(dimension)), dimension, strict=True):
            named = zip(settings.range_scalings, row, strict=True)
            cells = {f"dimension n2={n2}": value for n2, value in named}
            corpora.append({"corpus": corpus, "layer": layer, "loss": loss, **cells})
    tables = (prompts, layers, corpora)
    frames = (DataFrame(rows).replace([math.inf, -math.inf], math.nan) for rows in tables)
    return TokenProfiles(n_tokens, n_skipped, settings, *frames)
