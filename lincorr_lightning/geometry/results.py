"""Tables, numbers and pictures of token geometry (Viswanathan et al., 2025, arXiv 2501.10573)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lincorr_lightning.geometry.mantel import NO_TIE, Tie, tie
from lincorr_lightning.io import write_csv
from lincorr_lightning.results.base import Drawings, Pictured
from lincorr_lightning.results.loggers import tensorboard_writers
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.tables import markdown_table

if TYPE_CHECKING:
    import lightning as L

Floats = npt.NDArray[np.float64]
PAPER_K = 2
"""Size of the neighborhood in the paper's figures."""


@dataclass(frozen=True)
class GeometryReport(Pictured):
    """What is observed of all prompts at all shuffling levels.

    Arrays have the prompts first, then the levels.

    Attributes:
        lm: Name of the LM.
        n_tokens: Tokens of a prompt.
        n_skipped: Texts that were too short.
        prompts: Names.
        corpora: To which each belongs.
        shuffles: Levels S.
        layers: Numbers of the layers; 0 is the token embedding.
        range_scalings: The n2's.
        ks: Sizes of neighborhoods.
        dimension: Intrinsic dimension, ``(n_prompts, n_levels, n_layers, n_scalings)``.
        overlap: With the next layer, ``(n_prompts, n_levels, n_layers - 1, n_ks)``.
        profiles: Cosine and angle, mean and spread, by name, each
            ``(n_prompts, n_levels, n_layers)``.
        logits_dimension: Of the cloud of next-token probabilities,
            ``(n_prompts, n_levels, n_scalings)``.
        loss: Mean cross-entropy, ``(n_prompts, n_levels)``.
        entropy: Mean contextual entropy, likewise.
        corpus_dimension: Of the cloud of a corpus' prompts, each by its last token, as written,
            ``(n_corpora, n_layers, n_scalings)``; NaN where there are too few prompts.
        corpus_loss: Mean loss of each of these corpora, ``(n_corpora,)``.
    """

    lm: str
    n_tokens: int
    n_skipped: int
    prompts: Sequence[str]
    corpora: Sequence[str]
    shuffles: Sequence[int]
    layers: Sequence[int]
    range_scalings: Sequence[int]
    ks: Sequence[int]
    dimension: Floats
    overlap: Floats
    profiles: dict[str, Floats]
    logits_dimension: Floats
    loss: Floats
    entropy: Floats
    corpus_dimension: Floats
    corpus_loss: Floats

    # -- numbers -----------------------------------------------------------------------------

    def curves(self) -> Iterator[tuple[str, str, Sequence[int], Floats]]:
        """Each observable: name, setting, layers, and values ``(n_prompts, n_levels, n_layers)``.

        An overlap stands at the first of its two layers.
        """
        for i, n2 in enumerate(self.range_scalings):
            yield "dimension", f"n2={n2}", self.layers, self.dimension[..., i]
        for i, k in enumerate(self.ks):
            yield "overlap", f"k={k}", self.layers[:-1], self.overlap[..., i]
        for name, values in self.profiles.items():
            yield name, "", self.layers, values

    def dimension_loss(self, level: int, layer: int, scaling: int) -> Tie | None:
        """Log ID against log loss, over prompts.

        Args:
            level: Position of the shuffling level; so are the others.
            layer: Of the layer.
            scaling: Of the range scaling.
        """
        return tie(_log(self.dimension[:, level, layer, scaling]), _log(self.loss[:, level]))

    def dimension_loss_rows(self) -> list[list[Any]]:
        """Log ID against log loss, at each level, layer and scaling."""
        return [
            [level, layer, n2, *_cells(self.dimension_loss(i, j, k))]
            for i, level in enumerate(self.shuffles)
            for j, layer in enumerate(self.layers)
            for k, n2 in enumerate(self.range_scalings)
        ]

    def said_rows(self) -> list[list[Any]]:
        """What the LM says: entropy against the ID of its probabilities, and against its loss."""
        rows = []
        for i, level in enumerate(self.shuffles):
            for k, n2 in enumerate(self.range_scalings):
                found = tie(self.logits_dimension[:, i, k], self.entropy[:, i])
                rows.append(["logits_dimension", "entropy", level, n2, *_cells(found)])
            found = tie(self.entropy[:, i], self.loss[:, i])
            rows.append(["entropy", "loss", level, None, *_cells(found)])
        return rows

    def spearman_rows(self) -> list[list[Any]]:
        """Spearman's rho of ID and loss of texts as written (paper, table 1).

        *tokens*: a cloud is a prompt's tokens, and a point of the correlation a prompt. *prompts*:
        a cloud is a corpus' prompts, each by its last token, and a point is a corpus. The paper's
        prompt level by ESS, another estimator of dimension, is left out.
        """
        first = list(self.shuffles).index(0) if 0 in self.shuffles else None
        rows = []
        for j, layer in enumerate(self.layers):
            for k, n2 in enumerate(self.range_scalings):
                if first is not None:
                    found = tie(self.dimension[:, first, j, k], self.loss[:, first])
                    rows.append(["tokens", layer, n2, *_ranked(found)])
                if len(self.corpus_loss):
                    found = tie(self.corpus_dimension[:, j, k], self.corpus_loss)
                    rows.append(["prompts", layer, n2, *_ranked(found)])
        return sorted(rows, key=lambda row: row[0] == "prompts")

    def results(self) -> dict[str, Any]:
        """For ``results.json``."""
        return {
            "study": "token_geometry",
            "lm": self.lm,
            "n_prompts": len(self.prompts),
            "n_skipped": self.n_skipped,
            "n_tokens": self.n_tokens,
            "n_corpora": len(set(self.corpora)),
            "layers": list(self.layers),
            "range_scalings": list(self.range_scalings),
            "ks": list(self.ks),
            "shuffles": [self._level(i, level) for i, level in enumerate(self.shuffles)],
            "dimension_loss": _entries(("shuffle", "layer", "n2", *NO_TIE),
                                       self.dimension_loss_rows()),
            "said": _entries(("x", "y", "shuffle", "n2", *NO_TIE), self.said_rows()),
            "spearman": _entries(("cloud", "layer", "n2", "spearman", "p", "n"),
                                 self.spearman_rows()),
        }  # fmt: skip

    def _level(self, i: int, level: int) -> dict[str, Any]:
        observed: dict[str, Any] = {}
        for name, setting, _, values in self.curves():
            means = [number(mean(column)) for column in values[:, i].T]
            if setting:
                observed.setdefault(name, {})[setting.split("=")[1]] = means
            else:
                observed[name] = means
        logits = [number(mean(column)) for column in self.logits_dimension[:, i].T]
        return {
            "shuffle": level,
            "loss": number(mean(self.loss[:, i])),
            "entropy": number(mean(self.entropy[:, i])),
            "logits_dimension": dict(zip(map(str, self.range_scalings), logits, strict=True)),
            **observed,
        }

    # -- files -------------------------------------------------------------------------------

    def write(self, folder: Path) -> None:
        """Write tables and figures.

        Args:
            folder: The run's.

        Raises:
            OutputError: It cannot be written.
        """
        tables = folder / "tables"
        write_csv(
            tables / "layers.csv",
            ("observable", "setting", "shuffle", "layer", "mean", "std", "n_prompts"),
            self._layer_rows(),
        )
        logits = [f"logits_dimension n2={n}" for n in self.range_scalings]
        write_csv(
            tables / "prompts.csv",
            ("prompt", "corpus", "shuffle", "loss", "entropy", *logits),
            self._prompt_rows(),
        )
        write_csv(
            tables / "profiles.csv",
            ("prompt", "shuffle", "layer", *self._columns()),
            self._profile_rows(),
        )
        write_csv(
            tables / "dimension_loss.csv",
            ("shuffle", "layer", "n2", *NO_TIE),
            self.dimension_loss_rows(),
        )
        write_csv(tables / "said.csv", ("x", "y", "shuffle", "n2", *NO_TIE), self.said_rows())
        write_csv(
            tables / "spearman.csv",
            ("cloud", "layer", "n2", "spearman", "p", "n"),
            self.spearman_rows(),
        )
        self.write_pictures(folder)

    def _layer_rows(self) -> Iterator[list[Any]]:
        for name, setting, layers, values in self.curves():
            for i, level in enumerate(self.shuffles):
                for layer, column in zip(layers, values[:, i].T, strict=True):
                    numbers = mean(column), spread(column)
                    n = int(np.isfinite(column).sum())
                    yield [name, setting, level, layer, *map(number, numbers), n]

    def _prompt_rows(self) -> Iterator[list[Any]]:
        for p, (prompt, corpus) in enumerate(zip(self.prompts, self.corpora, strict=True)):
            for i, level in enumerate(self.shuffles):
                numbers = self.loss[p, i], self.entropy[p, i], *self.logits_dimension[p, i]
                yield [prompt, corpus, level, *map(number, numbers)]

    def _columns(self) -> list[str]:
        return [f"{name} {setting}".strip() for name, setting, _, _ in self.curves()]

    def _profile_rows(self) -> Iterator[list[Any]]:
        curves = [values for _, _, _, values in self.curves()]
        for p, prompt in enumerate(self.prompts):
            for i, level in enumerate(self.shuffles):
                for j, layer in enumerate(self.layers):
                    # The last layer has none after it to overlap with.
                    row = [v[p, i, j] if j < v.shape[2] else math.nan for v in curves]
                    yield [prompt, level, layer, *map(number, row)]

    def show(self, trainer: L.Trainer) -> None:
        """Add curves over layers, the table and the figures to TensorBoard.

        Args:
            trainer: The run's trainer.
        """
        for writer in tensorboard_writers(trainer):
            for name, setting, layers, values in self.curves():
                for i, level in enumerate(self.shuffles):
                    tag = "/".join(filter(None, (name, setting, f"S{level}")))
                    for layer, column in zip(layers, values[:, i].T, strict=True):
                        if math.isfinite(mean(column)):
                            # What TensorBoard calls a step is the layer here.
                            writer.add_scalar(tag, mean(column), layer)  # type: ignore[no-untyped-call]
            writer.add_text("levels", self.markdown(), 0)  # type: ignore[no-untyped-call]
        self.show_pictures(trainer)

    def markdown(self) -> str:
        """Loss, entropy, highest ID and its layer, and lowest overlap, by shuffling level."""
        rows = []
        for i, level in enumerate(self.shuffles):
            dimension = np.array([mean(column) for column in self.dimension[:, i, :, 0].T])
            known = np.where(np.isfinite(dimension), dimension, -math.inf)
            peak = int(known.argmax())
            overlap = [mean(column) for column in self.overlap[:, i, :, self.paper_k].T]
            lowest = min((v for v in overlap if math.isfinite(v)), default=None)
            loss, entropy = mean(self.loss[:, i]), mean(self.entropy[:, i])
            row = [level, loss, entropy, float(dimension[peak]), self.layers[peak], lowest]
            rows.append([number(v) if isinstance(v, float) else v for v in row])
        n2, k = self.range_scalings[0], self.ks[self.paper_k]
        columns = ("S", "loss", "entropy", f"highest ID (n2={n2})", "at layer",
                   f"lowest overlap (k={k})")  # fmt: skip
        return markdown_table(columns, rows)

    @property
    def paper_k(self) -> int:
        """Position of the paper's k, or of the first one."""
        return list(self.ks).index(PAPER_K) if PAPER_K in self.ks else 0

    def drawings(self) -> Drawings:
        """The figures, in kind those of the paper."""
        from lincorr_lightning.geometry import figures as draw

        figures = {
            "profiles": draw.profiles_figure,
            "range_scalings": draw.scalings_figure,
            "overlap_sizes": draw.overlap_figure,
            "dimension_loss": draw.dimension_loss_figure,
            "said": draw.said_figure,
        }
        if not self.overlap.shape[2]:
            del figures["overlap_sizes"]
        return {name: partial(figure, self) for name, figure in figures.items()}


def mean(values: Floats) -> float:
    """Of the finite ones; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def spread(values: Floats) -> float:
    """Standard deviation of the finite ones; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(known.std()) if len(known) else math.nan


def _log(values: Floats) -> Floats:
    """Logarithm; NaN where there is none."""
    return np.log(np.where(values > 0, values, np.nan))


def _cells(found: Tie | None) -> list[Any]:
    return list((NO_TIE if found is None else found.results()).values())


def _ranked(found: Tie | None) -> list[Any]:
    return [None] * 3 if found is None else [found.spearman, found.spearman_p, found.n]


def _entries(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(names, row, strict=True)) for row in rows]
