"""Token geometry of a set of texts while an LM is trained."""

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lincorr_lightning.callbacks.periodic_callback import PeriodicCallback
from lincorr_lightning.data.texts import read_prompts
from lincorr_lightning.errors import require
from lincorr_lightning.geometry.token_clouds import CloudSettings, PromptGeometry, observe_prompts
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table


class TokenGeometryMonitor(PeriodicCallback):
    """Measures the geometry of the tokens of some texts in each layer, as the LM trains.

    Intrinsic dimension, overlap of neighborhoods with the next layer, cosine similarities and
    neighbor angles (Viswanathan et al., 2025, arXiv 2501.10573), as means over the texts. Logs
    ``token_geometry/<observable>/layer_<n>``, ``token_geometry/loss`` and
    ``token_geometry/entropy``; a heat map by layer and step is drawn at the end.

    If several edits are trained side by side, each in an adapter, the first adapter is evaluated.

    Args:
        texts: A ``.txt``, ``.jsonl`` or ``.csv`` file, or a folder with such files; None takes
            texts about the embedded tiny world.
        key: Key or column of the text in ``.jsonl`` or ``.csv`` files.
        n_tokens: Tokens of each text; shorter texts are skipped.
        n_texts: Number of texts.
        range_scalings: Range scalings n2 of the intrinsic dimension; 2 is the 2NN estimator.
        ks: Sizes of the neighborhoods whose overlap with the next layer is measured.
        embedding_layer: Whether the token embedding is measured too, as layer 0.
        seed: Seed of the tiny world's texts.
        **options: See `PeriodicCallback`.

    Attributes:
        results: Observable and layer, as ``dimension_n2=2/layer_1`` -> means ``before``, ``after``.
    """

    study = "token_geometry"

    def __init__(
        self, texts: str | None = None, key: str = "text", n_tokens: int = 64, n_texts: int = 4,
        range_scalings: list[int] | None = None, ks: list[int] | None = None,
        embedding_layer: bool = False, seed: int = 0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        require("TokenGeometryMonitor.n_tokens", n_tokens, at_least=4)
        require("TokenGeometryMonitor.n_texts", n_texts, at_least=1)
        self.texts, self.key, self.seed = texts, key, seed
        self.n_tokens, self.n_texts = n_tokens, n_texts
        self.settings = CloudSettings.of(
            n_tokens, range_scalings or [2], ks or [2], embedding_layer, "TokenGeometryMonitor"
        )

    def open(self, trainer: L.Trainer) -> None:
        self._prompts = read_prompts(
            self.cache.lm, self.texts, self.key, self.n_tokens, self.n_texts, self.seed,
            "TokenGeometryMonitor",
        )  # fmt: skip
        self.declare_measured(self._prompts.names)

    def measure(self, trainer: L.Trainer) -> None:
        context = self.cache.contexts([self.adapter_id])
        observed: list[PromptGeometry] = []
        # One text at a time: training may leave little memory.
        for row, name in zip(self._prompts.tokens[:, None], self._prompts.names, strict=True):
            with nullcontext() if context is None else context([0]):
                observed += observe_prompts(self.cache.lm, row, [name], self.settings)
        scalars = {f"{self.name}/{key}": value for key, value in self._means(observed).items()}
        self.log_scalars(trainer, scalars, self.step)

    def _means(self, observed: list[PromptGeometry]) -> dict[str, float]:
        """Return the means over the texts by observable and layer; infinite ones are left out."""
        layers = self.settings.layers(len(observed[0].layers["cosine_mean"]))
        if len(layers) == 1 and not self.history:
            rank_zero_warn(
                "TokenGeometryMonitor measures a single layer, which has no next one to overlap "
                "with. Set its embedding_layer to measure the token embedding as well."
            )
        scalars: dict[str, float] = {}
        for key in observed[0].layers:
            name = key.replace(" ", "_").removesuffix("_mean")
            means = np.mean([one.layers[key] for one in observed], axis=0).tolist()
            if not key.endswith("_std"):
                scalars |= {f"{name}/layer_{n}": x for n, x in zip(layers, means, strict=False)}
        for name in ("loss", "entropy"):
            scalars[name] = sum(one.numbers[name] for one in observed) / len(observed)
        return {name: value for name, value in scalars.items() if math.isfinite(value)}

    def finish(self, trainer: L.Trainer) -> Results:
        # Imported here: it takes pandas and matplotlib.
        from lincorr_lightning.geometry.figures import history_figure

        self._measure_once(trainer)
        curves = {key.removeprefix(f"{self.name}/"): points for key, points in self.history.items()}
        values = {
            name: {"before": points[0][1], "after": points[-1][1]}
            for name, points in curves.items()
        }
        keys = {name: name.partition("/layer_") for name in curves}
        rows = [
            [observable, int(layer) if layer else None, step, value]
            for name, (observable, _, layer) in keys.items()
            for step, value in curves[name]
        ]
        texts = f"{len(self._prompts.names)} texts of {self.n_tokens} tokens"
        caption = f"Token geometry by layer and step, means over {texts}"
        columns = ["observable", "layer", "step", "mean"]
        table = Table.of(self.name, rows, columns, caption, formats={"mean": ".3g"})
        draw = partial(history_figure, table.frame, f"{texts}; one column per measurement")
        figure = Figure(self.name, caption, draw)
        return Results(self.name, values, tables=[table], figures=[figure])
