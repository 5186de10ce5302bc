"""A sparse autoencoder and its folder on disk."""

import math
from collections.abc import Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.io import atomic_folder, atomic_write, packed_by, read_json, write_json
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.version import __version__

Activation = Literal["relu", "jumprelu", "topk", "batchtopk"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

FORMAT = "lincorr sparse autoencoder"
FORMAT_VERSION = 2
CONFIG_FILE = "config.json"
TENSORS_FILE = "sparse_autoencoder.safetensors"
_THRESHOLDED = ("jumprelu", "batchtopk")
_ABOUT = ("format", "format_version", "hook_point", "versions")
_SETTINGS = ("activation", "k", "input_scale", "subtract_decoder_bias", "lm")
_WAY_OUT = "Copy or download the SAE again, or pass another folder."

read_config = partial(read_json, error=SparseAutoencoderError, way_out=_WAY_OUT)
"""Read a JSON object."""


class SparseAutoencoder(nn.Module):
    """``x̂ = (f D + b_D) / s`` with sparse features ``f = activation(x' Eᵀ + b_E)`` of ``x' = s x``.

    A feature is a row of `encoder` and `decoder` (a column of the decoder in the papers' notation).
    The activations, on the pre-activations p:

    - ``relu``: ``max(p, 0)``;
    - ``jumprelu``: ``max(p, 0)`` where ``p > threshold``, else 0 (Rajamanoharan et al., 2024,
      arXiv 2407.14435); a gated SAE is one of these;
    - ``topk``: ``max(p, 0)`` of the `k` with the largest ``p * score_scale``, else 0 (Gao et al.,
      2024, arXiv 2406.04093);
    - ``batchtopk``: as jumprelu, by a threshold of training (Bussmann et al., arXiv 2412.06410).

    Args:
        hook_point: Hook point that it reads and writes.
        encoder: E, ``(n_features, width)``.
        decoder: D, ``(n_features, width)``.
        encoder_bias: b_E, ``(n_features,)``.
        decoder_bias: b_D, ``(width,)``.
        activation: Name of the activation.
        threshold: Threshold of jumprelu and batchtopk for p, ``(n_features,)``, or one for all.
        k: Number of features that topk keeps; for information, batchtopk's mean number.
        score_scale: Factors of p by which topk chooses, ``(n_features,)``; None for 1.
        input_scale: s, the factor of the LM's activations.
        subtract_decoder_bias: Whether the encoder reads ``x' - b_D`` instead of x'.
        lm: Name of the LM that it was trained on, if known.

    Example:
        >>> eye = torch.eye(2)
        >>> sae = SparseAutoencoder(hook_point=HookPoint(0, "residual"), encoder=eye, decoder=eye,
        ...     encoder_bias=torch.zeros(2), decoder_bias=torch.zeros(2), activation="jumprelu",
        ...     threshold=torch.tensor([0.5, 0.5]))
        >>> sae(torch.tensor([[0.4, 2.0]])).tolist()
        [[0.0, 2.0]]
    """

    threshold: Tensor | None
    score_scale: Tensor | None

    def __init__(
        self,
        *,
        hook_point: HookPoint,
        encoder: Tensor,
        decoder: Tensor,
        encoder_bias: Tensor,
        decoder_bias: Tensor,
        activation: Activation = "relu",
        threshold: Tensor | None = None,
        k: int | None = None,
        score_scale: Tensor | None = None,
        input_scale: float = 1.0,
        subtract_decoder_bias: bool = False,
        lm: str | None = None,
    ) -> None:
        super().__init__()
        self.hook_point = hook_point
        self.activation = activation
        self.k = k
        self.lm = lm
        self.input_scale = float(input_scale)
        self.subtract_decoder_bias = bool(subtract_decoder_bias)
        self.encoder = nn.Parameter(encoder)
        self.decoder = nn.Parameter(decoder)
        self.encoder_bias = nn.Parameter(encoder_bias)
        self.decoder_bias = nn.Parameter(decoder_bias)
        if threshold is not None and threshold.numel() == 1:
            threshold = threshold.repeat(len(decoder))
        self.register_buffer("threshold", threshold)
        self.register_buffer("score_scale", score_scale)
        self._check()

    def _check(self) -> None:
        """Refuse parts that do not belong together, or would give wrong numbers."""

        def require(holds: bool, reason: str) -> None:
            if not holds:
                way_out = "Pass another SAE, or train it in float32."
                raise SparseAutoencoderError(f"the SAE at {self.hook_point}: {reason}. {way_out}")

        reason = f"decoder has the shape {tuple(self.decoder.shape)}, not (n_features, width)"
        require(self.decoder.dim() == 2 and self.decoder.numel() > 0, reason)
        n, width = self.decoder.shape
        for name, tensor in self.state_dict().items():
            shape = {"encoder": (n, width), "decoder": (n, width), "decoder_bias": (width,)}
            expected = shape.get(name, (n,))
            reason = f"{name} has the shape {tuple(tensor.shape)}, and the decoder {(n, width)}"
            require(tensor.shape == expected, reason)
            require(bool(tensor.isfinite().all()), f"{name} holds NaN or infinite numbers")
        require(
            self.activation in ACTIVATIONS
            and (self.threshold is not None) == (self.activation in _THRESHOLDED)
            and (self.score_scale is None or self.activation == "topk"),
            f"its activation is {self.activation!r}; there are {', '.join(ACTIVATIONS)}, of which "
            f"{' and '.join(_THRESHOLDED)} have a threshold, and topk may have a score_scale",
        )
        is_number = self.activation != "topk" or (isinstance(self.k, int) and 1 <= self.k <= n)
        require(is_number, f"topk needs a k from 1 to its {n} features, not {self.k}")
        is_scale = math.isfinite(self.input_scale) and self.input_scale > 0
        require(is_scale, f"input_scale is {self.input_scale}; it must be a number above 0")

    @property
    def n_features(self) -> int:
        """Number of features."""
        return self.decoder.shape[0]

    @property
    def width(self) -> int:
        """Width of the activations."""
        return self.decoder.shape[1]

    def encode(self, x: Tensor) -> Tensor:
        """Return the features, ``(..., n_features)`` and at least 0, of ``(..., width)``.

        They are in the SAE's precision and on its device.
        """
        x = x.to(self.encoder) * self.input_scale
        if self.subtract_decoder_bias:
            x = x - self.decoder_bias
        pre_activations = nn.functional.linear(x, self.encoder, self.encoder_bias)
        features = pre_activations.relu()
        if self.threshold is not None:
            return features * (pre_activations > self.threshold)
        if self.activation != "topk":
            return features
        scores = pre_activations if self.score_scale is None else pre_activations * self.score_scale
        assert self.k is not None  # as `_check` has seen
        chosen = scores.topk(self.k, dim=-1).indices
        return torch.zeros_like(features).scatter(-1, chosen, features.gather(-1, chosen))

    def decode(self, features: Tensor) -> Tensor:
        """Return activations on the LM's scale, ``(..., width)``, from features."""
        return (features @ self.decoder + self.decoder_bias) / self.input_scale

    def forward(self, x: Tensor) -> Tensor:
        """Reconstruct activations of the LM, ``(..., width)``."""
        return self.decode(self.encode(x))

    @torch.no_grad()
    def folded(self) -> "SparseAutoencoder":
        """Return an equivalent SAE whose scales and norms are folded into E, D and the biases.

        Its `input_scale` is 1, its encoder reads the LM's activations without subtraction, and
        every decoder row has norm 1 (zero rows stay zero): a feature's value is the length of what
        it adds to the LM's activations. `score_scale` keeps the order in which topk chooses.
        """
        encoder = self.encoder.double() * self.input_scale
        decoder = self.decoder.double() / self.input_scale
        decoder_bias = self.decoder_bias.double() / self.input_scale
        encoder_bias = self.encoder_bias.double()
        if self.subtract_decoder_bias:
            encoder_bias = encoder_bias - encoder @ decoder_bias
        norm = norms_of(decoder)
        threshold = self.threshold
        if threshold is not None:
            threshold = (threshold.double() * norm).to(threshold)
        score_scale = self.score_scale
        if self.activation == "topk":  # the norms must not change which features it chooses
            before = 1.0 if score_scale is None else score_scale.double()
            score_scale = (before / norm).to(self.encoder)
        return self.replaced(
            encoder=(encoder * norm[:, None]).to(self.encoder),
            decoder=(decoder / norm[:, None]).to(self.decoder),
            encoder_bias=(encoder_bias * norm).to(self.encoder_bias),
            decoder_bias=decoder_bias.to(self.decoder_bias),
            threshold=threshold,
            score_scale=score_scale,
            input_scale=1.0,
            subtract_decoder_bias=False,
        ).eval()

    def replaced(self, **changes: Any) -> "SparseAutoencoder":
        """Return a new SAE with some arguments of the constructor changed."""
        names = signature(SparseAutoencoder).parameters
        return SparseAutoencoder(**{name: getattr(self, name) for name in names} | changes)

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``sparse_autoencoder.safetensors``.

        The folder is new or holds only an SAE that this method wrote; it is replaced atomically.
        """
        state = self.state_dict()
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        config = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "hook_point": {"layer": self.hook_point.layer, "kind": self.hook_point.kind},
            **{name: getattr(self, name) for name in _SETTINGS},
            "versions": {"lincorr_lightning": __version__, "torch": torch.__version__},
        }
        with atomic_folder(folder, {CONFIG_FILE, TENSORS_FILE}) as new:
            with atomic_write(new / TENSORS_FILE) as part:
                save_file(tensors, part)
            write_json(new / CONFIG_FILE, config)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "SparseAutoencoder":
        """Load an SAE that `save` wrote; `load_sae` also loads other formats."""
        folder = Path(folder)
        config = read_config(folder / CONFIG_FILE)
        written = f"{config.get('format')!r} of version {config.get('format_version')}"
        readable = f"{FORMAT!r} of version {FORMAT_VERSION}"
        if written != readable:
            fail_to_read(folder / CONFIG_FILE, f"it is {written}; this version reads {readable}")
        tensors: dict[str, Any] = read_tensors(folder / TENSORS_FILE)
        try:
            hook_point = HookPoint(**config["hook_point"])
            settings = {name: config[name] for name in (*_SETTINGS, *config) if name not in _ABOUT}
            return cls(hook_point=hook_point, **tensors, **settings).eval()
        except (KeyError, TypeError, ValueError) as error:
            fail_to_read(folder, f"its files lack what an SAE has, or have more ({error!r})")


SAEs = Mapping[HookPoint, SparseAutoencoder]  #: SAEs of an LM by their hook point.


def sae_of(feature: Feature, saes: SAEs) -> SparseAutoencoder:
    """Return the SAE of a feature; refuse a hook point without SAE, and an index that it lacks."""
    sae = saes.get(feature.hook_point)
    if sae is None:
        raise SparseAutoencoderError(
            f"there is no SAE for the {feature.hook_point}; there are for "
            f"{', '.join(map(str, saes))}. Load one, or take a feature of these hook points."
        )
    if not 0 <= feature.index < sae.n_features:  # a negative one would count from the end
        raise SparseAutoencoderError(
            f"the SAE at {feature.hook_point} has no feature {feature.index}; it has "
            f"{sae.n_features}, counted from 0 to {sae.n_features - 1}."
        )
    return sae


def norms_of(rows: Tensor) -> Tensor:
    """Return the norms of rows as divisors: 1 where a norm is 0."""
    norm = rows.norm(dim=1)
    return torch.where(norm == 0, 1.0, norm)


def fail_to_read(path: Path, reason: str) -> NoReturn:
    """Raise the error of a file that cannot be read."""
    raise SparseAutoencoderError(f"cannot read {path}: {reason}. {_WAY_OUT}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a ``.safetensors``, ``.npz`` or ``.pt`` file; no code in it is run."""
    try:
        if path.suffix == ".pt":
            return dict(torch.load(path, map_location="cpu", weights_only=True))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        # Copies: who writes to a file changes what is mapped from it.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except Exception as error:  # each reader has other errors for a file that is damaged
        start = np.fromfile(path, np.uint8, 30).tobytes() if path.is_file() else b""
        packed = "LFS" if start.startswith(b"version https://git") else packed_by(start)
        if packed and (path.suffix == ".safetensors" or packed != "zip"):  # the others are zips
            fail_to_read(path, f"it is {packed}, not the file; unpack or fetch it first")
        if isinstance(error, UnpicklingError):  # whose message explains how to run code in a file
            fail_to_read(path, "it is damaged or holds pickled objects, which are not read")
        fail_to_read(path, f"it is damaged ({error!r})")
