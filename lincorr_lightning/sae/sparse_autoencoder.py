"""A sparse autoencoder and its folder on disk."""

import importlib.metadata
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, NoReturn, get_args
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.io import atomic_folder, atomic_write, read_json, write_json
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.version import __version__

Activation = Literal["relu", "jumprelu", "topk", "batchtopk"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

FORMAT = "lincorr sparse autoencoder"
FORMAT_VERSION = 2
CONFIG_FILE = "config.json"
TENSORS_FILE = "sparse_autoencoder.safetensors"
_THRESHOLDED = ("jumprelu", "batchtopk")
_SETTINGS = ("activation", "k", "input_scale", "subtract_decoder_bias", "lm")
_ARGUMENTS = (
    "hook_point",
    "encoder",
    "decoder",
    "encoder_bias",
    "decoder_bias",
    "threshold",
    "score_scale",
    *_SETTINGS,
)
_WAY_OUT = "Copy or download the SAE again, or pass another folder."
_MAX_COMPRESSION = 1032  # of zip's deflate

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
        self.hook_point, self.activation, self.k, self.lm = hook_point, activation, k, lm
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
        def fail(reason: str) -> NoReturn:
            raise SparseAutoencoderError(f"the SAE at {self.hook_point}: {reason}.")

        if self.activation not in ACTIVATIONS:
            fail(f"unknown activation {self.activation!r}; there are {', '.join(ACTIVATIONS)}")
        n, width = self.decoder.shape
        shapes = {
            "decoder": (n, width),
            "encoder": (n, width),
            "encoder_bias": (n,),
            "decoder_bias": (width,),
            "threshold": (n,),
            "score_scale": (n,),
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is not None and (found := tuple(tensor.shape)) != shape:
                fail(f"{name} has the shape {found}; the decoder {(n, width)} requires {shape}")
            if tensor is not None and not tensor.isfinite().all():
                fail(f"{name} holds NaN or infinite numbers")
        if (self.threshold is not None) != (self.activation in _THRESHOLDED):
            given = "has" if self.threshold is not None else "needs"
            fail(f"{self.activation} {given} a threshold; only {' and '.join(_THRESHOLDED)} do")
        if self.score_scale is not None and self.activation != "topk":
            fail(f"{self.activation} chooses by a threshold, so that it takes no score_scale")
        if self.activation == "topk" and not (isinstance(self.k, int) and 1 <= self.k <= n):
            fail(f"topk needs a k from 1 to its {n} features, not {self.k}")
        if not (math.isfinite(self.input_scale) and self.input_scale > 0):
            fail(f"input_scale is {self.input_scale}; it must be a number above 0")

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
        if x.shape[-1] != self.width:
            raise SparseAutoencoderError(
                f"the SAE at {self.hook_point} reads activations of width {self.width}, not "
                f"{x.shape[-1]}. Pass those of {self.hook_point} of the LM it was trained on."
            )
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
        chosen = scores.topk(self.k or 1, dim=-1).indices
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
        norm = decoder.norm(dim=1)
        norm = torch.where(norm == 0, 1.0, norm)
        threshold, score_scale = self.threshold, self.score_scale
        if threshold is not None:
            threshold = (threshold.double() * norm).to(threshold)
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
        return SparseAutoencoder(**{name: getattr(self, name) for name in _ARGUMENTS} | changes)

    def save(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``sparse_autoencoder.safetensors``.

        The folder is new or holds only an SAE that this method wrote; it is replaced atomically.
        """
        tensors = {name: one.detach().cpu().contiguous() for name, one in self.state_dict().items()}
        torch_version = importlib.metadata.version("torch")
        config = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "hook_point": {"layer": self.hook_point.layer, "kind": self.hook_point.kind},
            **{name: getattr(self, name) for name in _SETTINGS},
            "versions": {"lincorr_lightning": __version__, "torch": torch_version},
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
        written = config.get("format"), config.get("format_version")
        if written != (FORMAT, FORMAT_VERSION):
            fail_to_read(
                folder / CONFIG_FILE,
                f"its format is {written[0]!r} of version {written[1]}, and this version of "
                f"lincorr-lightning ({__version__}) reads {FORMAT!r} of version {FORMAT_VERSION}",
            )
        tensors = read_tensors(folder / TENSORS_FILE)
        try:
            hook_point = HookPoint(**config["hook_point"])
            parts: dict[str, Any] = {**tensors, **{name: config[name] for name in _SETTINGS}}
            return cls(hook_point=hook_point, **parts).eval()
        except KeyError as error:
            fail_to_read(folder / CONFIG_FILE, f"it lacks the key {error}")
        except (TypeError, ValueError) as error:
            fail_to_read(folder, f"its files contradict each other ({error})")


SAEs = Mapping[HookPoint, SparseAutoencoder]  #: SAEs of an LM by their hook point.


def fail_to_read(path: Path, reason: str) -> NoReturn:
    """Raise the error of a file that cannot be read."""
    raise SparseAutoencoderError(f"cannot read {path}: {reason}. {_WAY_OUT}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a ``.safetensors``, ``.npz`` or ``.pt`` file; no code in it is run."""
    if not path.is_file():
        fail_to_read(path, "there is no such file")
    try:
        if path.suffix == ".pt":
            return dict(torch.load(path, map_location="cpu", weights_only=True))
        if path.suffix != ".npz":
            return load_file(path)
        with ZipFile(path) as archive:
            for entry in archive.infolist():
                _check_size(archive, entry, path.stat().st_size)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (
        SafetensorError,
        OSError,
        ValueError,
        EOFError,
        BadZipFile,
        TypeError,
        KeyError,
        MemoryError,
        RuntimeError,
        UnpicklingError,
    ) as error:
        reason = str(error).split("\n")[0]
        if isinstance(error, UnpicklingError):  # torch's message explains how to run them
            reason = "of other things than tensors"
        fail_to_read(path, f"it is damaged or holds pickled objects, which are not read ({reason})")


def _check_size(archive: ZipFile, entry: ZipInfo, file_size: int) -> None:
    """Refuse an array that is too large for its file, before numpy allocates memory."""
    form = np.lib.format
    headers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    with archive.open(entry) as file:
        shape, _, dtype = headers[form.read_magic(file)](file)
    if math.prod(shape) * dtype.itemsize > min(entry.file_size, _MAX_COMPRESSION * file_size):
        raise ValueError(f"{entry.filename} claims the shape {shape}, for which it is too short")
