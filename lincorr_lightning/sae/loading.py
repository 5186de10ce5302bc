"""SAEs of an LM as a study names them: one folder of folders, and features by their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.formats import FORMATS, load_saes
from lincorr_lightning.sae.hook_points import KINDS, Feature, HookPoint
from lincorr_lightning.sae.reading import fail_to_read
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder


def load_folder(
    saes: str | Path | Sequence[str | Path], lm: LanguageModel | None = None
) -> dict[HookPoint, SparseAutoencoder]:
    """Read the SAEs of an LM.

    Args:
        saes: A folder that holds a folder for each SAE, one SAE's folder, or several of them.
        lm: The LM, as for `load_sae`.

    Raises:
        SparseAutoencoderError: There is no such folder, one is of no known format, or two SAEs
            belong to one place.
    """
    if not isinstance(saes, (str, Path)):
        return load_saes(saes, lm)
    folder = Path(saes)
    if not folder.is_dir():
        fail_to_read(folder, "there is no such folder")
    is_one = any(all((folder / n).is_file() for n in form.files) for form in FORMATS.values())
    inside = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    # With nothing inside, the folder itself is refused, with what formats there are.
    return load_saes([folder] if is_one or not inside else inside, lm)


def parse_feature(text: str, saes: Mapping[HookPoint, SparseAutoencoder]) -> Feature:
    """Find a feature by its id.

    Args:
        text: As ``residual.1.37``: kind of place, layer, index.
        saes: Those there are.

    Raises:
        SparseAutoencoderError: It is no id, its place has no SAE, or the SAE no such feature.
    """
    name, _, index = text.strip().rpartition(".")
    hook_point = HookPoint.named(name)
    if hook_point is None or not index.isdecimal():
        raise SparseAutoencoderError(
            f"{text!r} names no feature: write its kind of place ({', '.join(KINDS)}), layer and "
            "index, such as residual.1.37."
        )
    if hook_point not in saes:
        raise SparseAutoencoderError(
            f"{text!r}: there is no SAE for the {hook_point}; there are for "
            f"{', '.join(map(str, saes))}. Load one, or take one of these places."
        )
    return Feature(hook_point, saes[hook_point].check_feature(int(index)))
