"""Token geometry of a set of texts while an LM is trained."""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from statistics import fmean
from typing import Any

from lincorr_lightning.callbacks.periodic_callback import PeriodicCallback
from lincorr_lightning.data.texts import TokenBatch, read_prompts
from lincorr_lightning.errors import require
from lincorr_lightning.geometry.token_clouds import CloudSettings, PromptGeometry, observe_prompts
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table


class TokenGeometryMonitor(PeriodicCallback):
    """Measures the geometry of the tokens of some texts in each layer, as the LM trains.

    Intrinsic dimension, overlap of neighborhoods with the next layer, cosine similarities and
    neighbor angles (Viswanathan et al., 2025, arXiv 2501.10573), as means over the texts. Logs
    ``token_geometry/<observable>/layer_<n>``, ``token_geometry/loss`` and
    ``token_geometry/entropy``; ``tables/token_geometry.csv`` has them by layer and step.

    Args:
        texts: A ``.txt``, ``.jsonl`` or ``.csv`` file, or a folder with such files; None takes
            texts about the embedded tiny world.
        key: Key or column of the text in ``.jsonl`` or ``.csv`` files.
        n_tokens: Tokens of each text; shorter texts are skipped.
        n_texts: Number of texts.
        **options: See `PeriodicCallback`.

    Attributes:
        results: Observable and layer, as ``dimension_n2=2/layer_1`` -> means ``before``, ``after``.
    """

    study = "token_geometry"

    def __init__(
        self,
        texts: str | None = None,
        key: str = "text",
        n_tokens: int = 64,
        n_texts: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require("TokenGeometryMonitor.n_tokens", n_tokens, at_least=4)
        require("TokenGeometryMonitor.n_texts", n_texts, at_least=1)
        self.texts = texts
        self.key = key
        self.n_texts = n_texts
        self.settings = CloudSettings(n_tokens, [2], [2], "TokenGeometryMonitor")

    def open(self) -> Iterable[str]:
        self._prompts = read_prompts(
            self.run.cache.lm,
            self.texts,
            self.key,
            self.settings.n_tokens,
            self.n_texts,
            owner="TokenGeometryMonitor",
        )
        return self._prompts.names

    def measure(self) -> None:
        context = self.run.cache.contexts([self.adapter_id])
        observed: list[PromptGeometry] = []
        # One text at a time: training may leave little memory.
        for tokens, name in zip(self._prompts.tokens, self._prompts.names, strict=True):
            batch = TokenBatch(tokens[None], [name], corpora=[""])
            with nullcontext() if context is None else context([0]):
                observed += observe_prompts(self.run.cache.lm, batch, self.settings)
        self.log_scalars({f"{self.name}/{key}": value for key, value in _means(observed).items()})

    def finish(self) -> Results:
        self.measure_once()
        values = {}
        rows = []
        for key, curve in self.history.items():
            name = key.removeprefix(f"{self.name}/")
            values[name] = {"before": curve[0][1], "after": curve[-1][1]}
            observable, _, layer = name.partition("/layer_")
            rows += [(observable, int(layer) if layer else None, *point) for point in curve]
        texts = f"{len(self._prompts.names)} texts of {self.settings.n_tokens} tokens"
        caption = f"Token geometry by layer and step, means over {texts}"
        columns = ["observable", "layer", "step", "mean"]
        table = Table.of(self.study, rows, columns, caption, formats={"mean": ".3g"})
        return Results(self.name, values, tables=[table])


def _means(observed: Sequence[PromptGeometry]) -> dict[str, float]:
    """Return the means over the texts by observable and layer; infinite ones are left out."""
    means = {key: fmean([prompt.row[key] for prompt in observed]) for key in ("loss", "entropy")}
    for key in observed[0].layers:
        name = key.replace(" ", "_").removesuffix("_mean")
        by_layer = zip(*(prompt.layers[key] for prompt in observed), strict=True)
        means |= {f"{name}/layer_{n}": fmean(x) for n, x in enumerate(by_layer, start=1)}
    return {name: value for name, value in means.items() if math.isfinite(value)}
