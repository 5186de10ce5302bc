"""The pictures of docs/gallery.md: every study on the embedded LM.

    python -m benchmarks.docs_tables.gallery

runs the commands below in a temporary folder and writes what they draw, at most 1,000 pixels wide,
to benchmarks/figures/gallery/. `--only TEXT` runs those whose command holds the text.
"""

import contextlib
import shlex
import tempfile
from pathlib import Path

from jsonargparse import auto_cli
from PIL import Image

from benchmarks.common import FIGURES, QUIET
from lincorr_lightning.cli import main as lincorr

FOLDER = FIGURES / "gallery"
_WIDEST = 1000


# Figures by their commands: name in the run, and name in the gallery. Of two commands, the model of
# the first stands where the second says TAUGHT.
PICTURES = {
    "fit --config configs/linear_probe.yaml": {
        "random_words": "random_words",
        "weights_city-country": "weights",
        "ridge_path": "ridge_path",
    },
    "fit --config configs/source_finetune.yaml --model.protocol joint "
    '--data.relation "ceo->company" --trainer.max_epochs 10 --model.learning_rate 2e-4 '
    "--model.save_model true && test --config configs/resilience.yaml "
    "--model.lm.name_or_path TAUGHT --model.lm.dtype float32": {"kept_matrix": "resilience"},
    "fit --config configs/source_finetune.yaml": {
        name: name for name in ("outcomes", "reference_weights", "training")
    },
    "fit --config configs/vocabulary_ablation.yaml": {"generalization": "ablation"},
}


def keep(source: Path, name: str) -> Path:
    """Copy a figure into the gallery, small enough for a page."""
    path = FOLDER / f"{name}.png"
    with Image.open(source) as image:
        picture = image.convert("RGB")
        picture.thumbnail((_WIDEST, 10 * _WIDEST), Image.Resampling.LANCZOS)
        # The scales of heat maps need their colours at both ends, however few cells have them.
        few = picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    return path


def main(only: str = "") -> None:
    """Draw the gallery.

    Args:
        only: A part of the commands to run; empty runs all.
    """
    for commands, figures in PICTURES.items():
        if only not in commands:
            continue
        # Relative paths, so that no figure shows the path of a temporary folder.
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            run = Path()
            for command in commands.split(" && "):
                options = shlex.split(command.replace("TAUGHT", str(run / "model")))
                cli = lincorr([*options, "--trainer.default_root_dir=runs", QUIET])
                run = Path(cli.trainer.log_dir)
            for figure, name in figures.items():
                path = keep(run / "figures" / f"{figure}.png", name)
                print(f"{path} ({path.stat().st_size // 1024} KiB)")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
