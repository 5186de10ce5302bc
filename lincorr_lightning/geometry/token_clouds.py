"""Clouds of tokens in the layers of a causal LM, and tables of what is observed of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from lincorr_lightning import errors
from lincorr_lightning.data.texts import TokenBatch
from lincorr_lightning.geometry import observables
from lincorr_lightning.lm.head import call_model
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import reading

if TYPE_CHECKING:
    from pandas import DataFrame

_MAX_K = 31  # of the paper's neighborhoods
_PAPER_K = 2  # of its figures
_MIN_RANK = 2  # angles need two neighbors
_LARGEST = torch.finfo(torch.float32).max  # squares must be finite in float64


class CloudSettings:
    """Settings of the observables of clouds of `n_tokens`, with defaults as in `TokenGeometry`.

    A `ConfigError` if a setting needs more tokens, or a range scaling is odd; `owner` is the prefix
    of the settings in messages.
    """

    def __init__(
        self,
        n_tokens: int,
        range_scalings: Sequence[int] | None,
        ks: Sequence[int] | None,
        owner: str = "model",
    ) -> None:
        default = [n2 for n2 in observables.RANGE_SCALINGS if 4 * n2 <= n_tokens] or [2]
        self.n_tokens = n_tokens
        self.range_scalings = sorted(set(range_scalings or default))
        self.ks = sorted(set(ks or range(1, min(_MAX_K, n_tokens - 1) + 1)))
        for n2 in self.range_scalings:
            errors.require(f"{owner}.range_scalings", n2, at_least=2, at_most=n_tokens - 1)
            if n2 % 2:
                raise errors.ConfigError(f"{owner}.range_scalings has {n2}; name even numbers.")
        for k in self.ks:
            errors.require(f"{owner}.ks", k, at_least=1, at_most=n_tokens - 1)

    @property
    def shown_k(self) -> int:
        """The k of the paper's figures, or the first one."""
        return _PAPER_K if _PAPER_K in self.ks else self.ks[0]


class PromptGeometry(NamedTuple):
    """Observables of one prompt as floats: small tensors fragment memory."""

    number: int  #: The prompt's position in the data.
    row: dict[str, Any]
    """Name of the ``prompt``, ``corpus``, level of the ``shuffle``, mean ``loss`` of the tokens
    from the second on and mean ``entropy``, in nats."""
    layers: dict[str, list[float]]  #: Its `token_observables`, by layer.


def observe_prompts(
    lm: LanguageModel, batch: TokenBatch, settings: CloudSettings, level: int = 0, seed: int = 0
) -> list[PromptGeometry]:
    """Observe the clouds of the tokens of some prompts, shuffled at a level, by one forward pass.

    Raises:
        SubjectsError: If a prompt has too few distinct tokens for the largest range scaling.
    """
    n2 = max(settings.range_scalings)
    positions = [
        observables.shuffle_blocks(settings.n_tokens, level, [seed, batch.first + i, level])
        for i in range(len(batch.tokens))
    ]
    tokens = batch.tokens.gather(1, torch.stack(positions).to(batch.tokens.device))
    names = [f"{name}, shuffled at level {level}" if level else name for name in batch.names]
    all_hidden, logits = read_layers(lm, tokens, names)
    losses, entropies = observables.next_tokens(logits, tokens)
    observed = []
    for i, hidden in enumerate(all_hidden):
        nearest = observables.nearest_tokens(hidden, max(n2, *settings.ks, _MIN_RANK))
        n_distinct, layer = nearest.distinct.sum(-1).min(0)
        if n_distinct <= n2:
            raise errors.SubjectsError(
                f"prompt {names[i]} has {n_distinct} distinct points in layer {layer + 1}; range "
                f"scaling {n2} needs {n2 + 1}. Leave the text out, take longer ones, or name "
                "smaller range_scalings."
            )
        row = {
            "prompt": batch.names[i],
            "corpus": batch.corpora[i],
            "shuffle": level,
            "loss": float(losses[i].mean()),
            "entropy": float(entropies[i].mean()),
        }
        layers = observables.token_observables(
            hidden, nearest, settings.range_scalings, settings.ks
        )
        by_layer = {key: values.tolist() for key, values in layers.items()}
        observed.append(PromptGeometry(batch.first + i, row, by_layer))
    return observed


@torch.no_grad()
def read_layers(lm: LanguageModel, tokens: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the hidden states of all tokens in all layers and the logits, of one forward pass.

    The LM runs in eval mode and in its own precision. Special tokens before a text, such as BOS,
    are added here and left out of the result. Tokens are ``(n_prompts, n_tokens)``; the names of
    the prompts are for messages.

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
        raise errors.LanguageModelError(
            f"{type(lm.model).__name__} does not return the hidden state of each token after "
            "each layer (`output_hidden_states`), so they cannot be observed."
        )
    # The layers of a large LM may be on several devices.
    hidden = torch.stack([layer[:, len(prefix) :].to(device) for layer in states[1:]], dim=1)
    logits = output.logits[:, len(prefix) :].to(device)
    parts = {f"hidden states of layer {i}": x for i, x in enumerate(hidden.unbind(1), start=1)}
    # With a logit of minus infinity, a token only has no probability.
    parts["logits"] = logits.amax(-1, keepdim=True)
    for name, values in parts.items():
        largest = torch.linalg.vector_norm(values, math.inf, dim=(1, 2)).tolist()
        for prompt, size in zip(prompts, largest, strict=True):
            if not size <= _LARGEST:
                raise errors.NonFiniteError(
                    f"the {name} of the LM {lm.config.name_or_path} are NaN, infinite or too large "
                    f"for prompt {prompt} in {lm.model.dtype}. If they come from float16, set "
                    "lm.dtype to bfloat16 or float32; otherwise its weights are broken."
                )
    return hidden, logits


@dataclass(frozen=True)
class TokenProfiles:
    """Observables of all prompts at all shuffling levels.

    Columns of a range scaling or of a size of neighborhoods are named as ``dimension n2=2`` and
    ``overlap k=10``; what is not finite is NaN.
    """

    settings: CloudSettings
    n_skipped: int  #: Number of texts that were too short.
    prompts: "DataFrame"  #: A `PromptGeometry.row` per prompt and level.
    layers: "DataFrame"
    """A row each, and layer: ``prompt``, ``shuffle``, ``layer``, and the `token_observables`."""

    @classmethod
    def of(
        cls, observed: Sequence[PromptGeometry], settings: CloudSettings, n_skipped: int
    ) -> Self:
        """Make tables of the observed prompts at each level, in the prompts' order."""
        from pandas import DataFrame, Series, concat  # takes a second

        observed = sorted(observed, key=lambda prompt: (prompt.number, prompt.row["shuffle"]))
        prompts = DataFrame([prompt.row for prompt in observed])
        layers = []
        for prompt in observed:
            # The last layer has no next one to overlap with: a shorter series ends with NaN.
            cells = DataFrame(
                {key: Series(values, dtype=float) for key, values in prompt.layers.items()}
            )
            about = {key: prompt.row[key] for key in ("prompt", "shuffle")}
            layers.append(DataFrame({**about, "layer": cells.index + 1, **cells}))
        frames = (prompts, concat(layers))
        finite = (frame.replace([math.inf, -math.inf], math.nan) for frame in frames)
        return cls(settings, n_skipped, *(frame.reset_index(drop=True) for frame in finite))

    @property
    def n_prompts(self) -> int:
        """Number of prompts."""
        return len(self.prompts) // self.prompts["shuffle"].nunique()

    @property
    def shown(self) -> list[str]:
        """The observables of the paper's figure."""
        n2 = self.settings.range_scalings[0]
        k = self.settings.shown_k
        return [f"dimension n2={n2}", f"overlap k={k}", "cosine_mean", "angle_mean"]
