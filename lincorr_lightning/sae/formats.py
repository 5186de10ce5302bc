"""SAEs from local folders, in the formats people have them in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.readers import (
    LoadOptions,
    read_gemma_scope,
    read_llama_scope,
    read_saelens,
)
from lincorr_lightning.sae.reading import fail_to_read
from lincorr_lightning.sae.sparse_autoencoder import CONFIG_FILE, TENSORS_FILE, SparseAutoencoder

Reader = Callable[[Path, LoadOptions], SparseAutoencoder]


@dataclass(frozen=True)
class SAEFormat:
    """A format of an SAE's folder.

    Attributes:
        name: As in ``gemma_scope``.
        files: A folder that holds all of these is of this format.
        read: From a folder and what the caller knows to an SAE.
    """

    name: str
    files: tuple[str, ...]
    read: Reader


FORMATS: dict[str, SAEFormat] = {}


def register_format(name: str, files: Iterable[str], read: Reader) -> None:
    """Add a format that `load_sae` reads.

    Args:
        name: A new name.
        files: Files by which a folder of this format is known.
        read: From a folder and what the caller knows to an SAE.

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
    """Read an SAE from a local folder of any known format; nothing is ever unpickled.

    Its norms stay as they are in the file: `SparseAutoencoder.folded` folds them.

    Args:
        folder: Ours, SAELens', Gemma Scope's or Llama Scope's.
        hook_point: Where it belongs. Only needed where neither the files nor the path say it; where
            they do, it must be the same. A folder called ``residual.12``, ``mlp_out.12`` or
            ``attention_out.12`` says it, too.
        input_scale: By how much activations are multiplied before the SAE, for a SAELens checkpoint
            that leaves it open: ``sqrt(width) / mean norm`` of the activations. A file
            ``activation_scaler.json`` with ``{"scaling_factor": ...}`` in the folder says it, too.
        lm: The LM; needed for an SAE that reads the attention's concatenated heads (Gemma Scope's
            attention SAEs, SAELens at ``hook_z``), which then reads and writes what the attention
            adds to the stream, its output projection and bias being taken into the SAE; and for one
            of SAELens whose LM was centred (``center_writing_weights``), which then reads the LM's
            own activations. Its weights are loaded if they are needed and are not yet.

    Returns:
        The SAE in float32, in evaluation mode.

    Raises:
        SparseAutoencoderError: The format is unknown, a file is missing or damaged, the SAE is of a
            kind this package does not have, its place is unknown or another than `hook_point`, or it
            reads the heads of an attention after whose projection a norm follows (Gemma 2 and 3).
    """
    folder = Path(folder)
    if not folder.is_dir():
        fail_to_read(folder, "there is no such folder")
    for form in FORMATS.values():
        if all((folder / name).is_file() for name in form.files):
            sae = _read(
                form,
                folder,
                LoadOptions(hook_point or _hook_point_in_name(folder), input_scale, lm),
            )
            break
    else:
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        known = "; ".join(f"{form.name} ({', '.join(form.files)})" for form in FORMATS.values())
        raise SparseAutoencoderError(
            f"{folder} is in no known format of SAEs: it holds {inside}. Known are {known}. "
            "Pass the folder that holds one SAE's files itself."
        )
    if hook_point is not None and sae.hook_point != hook_point:
        raise SparseAutoencoderError(
            f"the SAE in {folder} belongs to {sae.hook_point}, not to {hook_point}. "
            "Pass the folder of that place's SAE."
        )
    return sae.float().eval()


def _read(form: SAEFormat, folder: Path, options: LoadOptions) -> SparseAutoencoder:
    try:
        return form.read(folder, options)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        fail_to_read(folder, f"a value in its files is none that {form.name} has ({error!r})")


def _hook_point_in_name(folder: Path) -> HookPoint | None:
    return HookPoint.named(folder.absolute().name)


def load_saes(
    folders: Iterable[str | Path], lm: LanguageModel | None = None
) -> dict[HookPoint, SparseAutoencoder]:
    """Read one SAE per place.

    Args:
        folders: A folder for each SAE.
        lm: The LM, as for `load_sae`.

    Raises:
        SparseAutoencoderError: One cannot be read, or two belong to the same place.
    """
    saes: dict[HookPoint, SparseAutoencoder] = {}
    for folder in folders:
        sae = load_sae(folder, lm=lm)
        if sae.hook_point in saes:
            raise SparseAutoencoderError(
                f"{folder} holds a second SAE for {sae.hook_point}. Pass one for each place."
            )
        saes[sae.hook_point] = sae
    return saes


def _read_own(folder: Path, options: LoadOptions) -> SparseAutoencoder:
    del options  # it says all there is to say
    return SparseAutoencoder.from_pretrained(folder)


register_format("lincorr", (CONFIG_FILE, TENSORS_FILE), _read_own)
register_format("saelens", ("cfg.json", "sae_weights.safetensors"), read_saelens)
register_format("gemma_scope", ("params.npz",), read_gemma_scope)
register_format(
    "llama_scope", ("hyperparams.json", "checkpoints/final.safetensors"), read_llama_scope
)
