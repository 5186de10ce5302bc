"""Load and save SAEs: folders of this package, SAELens, Gemma Scope and Llama Scope."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.files import fail_to_read
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.readers import (
    LoadOptions,
    read_gemma_scope,
    read_llama_scope,
    read_saelens,
)
from lincorr_lightning.sae.sparse_autoencoder import CONFIG_FILE, TENSORS_FILE, SparseAutoencoder

Reader = Callable[[Path, LoadOptions], SparseAutoencoder]

SAE_FOLDER = "sparse_autoencoders"
"""Folder of a run that holds a folder per SAE."""


@dataclass(frozen=True)
class SAEFormat:
    """A format of an SAE's folder.

    Attributes:
        name: Name of the format, as ``gemma_scope``.
        files: Relative paths; a folder that holds all of them has this format.
        read: Function that reads such a folder.
    """

    name: str
    files: tuple[str, ...]
    read: Reader

    def matches(self, folder: Path) -> bool:
        """Return whether a folder has this format."""
        return all((folder / name).is_file() for name in self.files)


FORMATS: dict[str, SAEFormat] = {}


def register_format(name: str, files: Iterable[str], read: Reader) -> None:
    """Add a format that `load_sae` reads.

    Args:
        name: New name.
        files: Relative paths that identify a folder of this format.
        read: Function from the folder and the caller's `LoadOptions` to an SAE.

    Raises:
        ValueError: The name is taken.
    """
    if name in FORMATS:
        raise ValueError(f"the SAE format {name!r} is registered already")
    FORMATS[name] = SAEFormat(name, tuple(files), read)


def load_sae(
    folder: str | Path,
    *,
    hook_point: HookPoint | None = None,
    input_scale: float | None = None,
    lm: LanguageModel | None = None,
) -> SparseAutoencoder:
    """Load an SAE from a local folder of any known format; nothing is unpickled.

    The norms of the decoder stay as they are in the file; `SparseAutoencoder.folded` folds them.

    Args:
        folder: Folder of this package, SAELens, Gemma Scope or Llama Scope.
        hook_point: Hook point of the SAE. Only needed where neither the files nor the path name it;
            where they do, it must be the same. A folder called ``residual.12``, ``mlp_out.12`` or
            ``attention_out.12`` names it as well.
        input_scale: Factor that multiplies activations before the SAE, for a SAELens checkpoint
            that leaves it open: ``sqrt(width) / mean norm`` of the activations. A file
            ``activation_scaler.json`` with ``{"scaling_factor": ...}`` in the folder holds it, too.
        lm: The LM; its weights are loaded if needed. Two kinds of SAEs need it. SAEs of the
            attention's concatenated heads (Gemma Scope's attention SAEs, SAELens at ``hook_z``)
            have the output projection merged into them, so that they read and write what the
            attention adds to the stream. SAEs of SAELens with ``center_writing_weights`` are
            changed to read the activations of the uncentered LM.

    Returns:
        The SAE in float32, in evaluation mode.

    Raises:
        SparseAutoencoderError: The format or the kind of SAE is unknown, a file is missing or
            damaged, the hook point is unknown or differs from `hook_point`, or the SAE reads the
            heads of an attention whose output projection a norm follows (Gemma 2 and 3).
    """
    folder = Path(folder)
    if not folder.is_dir():
        fail_to_read(folder, "there is no such folder")
    form = next((form for form in FORMATS.values() if form.matches(folder)), None)
    if form is None:
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        known = "; ".join(f"{form.name} ({', '.join(form.files)})" for form in FORMATS.values())
        raise SparseAutoencoderError(
            f"{folder} is in no known format of SAEs: it holds {inside}. Known are {known}. "
            "Pass the folder that holds one SAE's files itself."
        )
    named = HookPoint.named(folder.absolute().name)
    try:
        sae = form.read(folder, LoadOptions(hook_point or named, input_scale, lm))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        fail_to_read(folder, f"a value in its files is none that {form.name} has ({error!r})")
    if hook_point is not None and sae.hook_point != hook_point:
        raise SparseAutoencoderError(
            f"the SAE in {folder} belongs to {sae.hook_point}, not to {hook_point}. "
            "Pass the folder of that hook point's SAE."
        )
    return sae.float().eval()


def load_saes(
    saes: str | Path | Sequence[str | Path], lm: LanguageModel | None = None
) -> dict[HookPoint, SparseAutoencoder]:
    """Load one SAE per hook point.

    Args:
        saes: A folder that holds a folder per SAE, the folder of one SAE, or a list of such
            folders.
        lm: The LM, see `load_sae`.

    Returns:
        The SAEs in the order of the folders.

    Raises:
        SparseAutoencoderError: A folder is missing or cannot be read, or two SAEs belong to one
            hook point.
    """
    folders = _sae_folders(Path(saes)) if isinstance(saes, (str, Path)) else saes
    loaded: dict[HookPoint, SparseAutoencoder] = {}
    for folder in folders:
        sae = load_sae(folder, lm=lm)
        if sae.hook_point in loaded:
            raise SparseAutoencoderError(
                f"{folder} holds a second SAE for {sae.hook_point}. Pass one for each hook point."
            )
        loaded[sae.hook_point] = sae
    return loaded


def _sae_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        fail_to_read(folder, "there is no such folder")
    inside = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    # A folder without folders is left to `load_sae`, whose refusal lists the known formats.
    if not inside or any(form.matches(folder) for form in FORMATS.values()):
        return [folder]
    return inside


def save_saes(saes: Mapping[HookPoint, SparseAutoencoder], folder: str | Path) -> None:
    """Save SAEs in a run's folder, as ``sparse_autoencoders/residual.0`` and so on.

    Raises:
        OutputError: A file cannot be written.
    """
    for hook_point, sae in saes.items():
        sae.save(Path(folder) / SAE_FOLDER / hook_point.id)


def _read_own(folder: Path, options: LoadOptions) -> SparseAutoencoder:
    del options  # the folder holds everything
    return SparseAutoencoder.from_pretrained(folder)


register_format("lincorr", (CONFIG_FILE, TENSORS_FILE), _read_own)
register_format("saelens", ("cfg.json", "sae_weights.safetensors"), read_saelens)
register_format("gemma_scope", ("params.npz",), read_gemma_scope)
register_format(
    "llama_scope", ("hyperparams.json", "checkpoints/final.safetensors"), read_llama_scope
)
