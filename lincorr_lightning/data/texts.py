"""Running text: from a file of one's own, or about the embedded tiny world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from torch.utils.data import DataLoader

from lincorr_lightning.data.world import World
from lincorr_lightning.errors import ConfigError, InputsError
from lincorr_lightning.knowledge import Catalogue


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class Texts:
    """Some texts.

    Attributes:
        texts: As they are written.
    """

    texts: list[str]


class TextsDataModule(L.LightningDataModule):
    """Texts in an order drawn by a seed, each once.

    Args:
        texts_file: A text file, one text a line; null takes true statements about the tiny world.
        knowledges: What is said of the tiny world: knowledges or families.
        n_texts: How many, at most; null takes all.
        batch_size: Texts of a step.
        seed: Of the order.

    Raises:
        ConfigError: A number that is below 1.
    """

    def __init__(
        self,
        texts_file: str | None = None,
        knowledges: list[str] = ["attribute"],  # noqa: B006 (never changed)
        n_texts: int | None = 4000,
        batch_size: int = 250,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("n_texts", n_texts), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise ConfigError(f"data.{name} is {value}; it must be at least 1.")
        self.save_hyperparameters()
        self.texts: list[str] = []

    def setup(self, stage: str | None = None) -> None:
        """Read the texts and draw their order.

        Raises:
            InputsError: The file cannot be read or holds no text.
        """
        del stage
        path = self.hparams["texts_file"]
        texts = _of_the_world(self.hparams["knowledges"]) if path is None else _of_file(Path(path))
        order = np.random.default_rng(self.hparams["seed"]).permutation(len(texts))
        self.texts = [texts[i] for i in order[: self.hparams["n_texts"]]]

    def test_dataloader(self) -> DataLoader[Any]:
        """All texts."""
        size = self.hparams["batch_size"]
        batches = [
            Texts(self.texts[start : start + size]) for start in range(0, len(self.texts), size)
        ]
        return DataLoader(batches, batch_size=None, collate_fn=_as_is)  # type: ignore[arg-type]


def _as_is(batch: Any) -> Any:
    return batch


def _of_the_world(knowledges: Sequence[str]) -> list[str]:
    with as_file(files("lincorr_lightning.lm") / "tiny_world" / "world.json") as path:
        world = World.load(path)
    chosen = Catalogue.load().select(list(knowledges))
    return [f"{statement.text}." for statement in world.statements(chosen)]


def _of_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputsError(f"data.texts_file {path} cannot be read: {error}.") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise InputsError(f"data.texts_file {path} holds no text. Write one a line.")
    return texts
