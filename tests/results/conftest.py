"""Folders of runs, written by `Results.write` as studies do."""

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.figure import Figure as MatplotlibFigure

from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table

Make = Callable[..., Path]


def draw(colour: str = "white") -> Callable[[], MatplotlibFigure]:
    return lambda: MatplotlibFigure((3, 2), dpi=60, facecolor=colour)


def lm_info(name: str, n_parameters: int | None = 1_000_000, **fingerprint: str) -> dict[str, Any]:
    known = {"tokenizer": "t", "config": "c", "dtype": "float32", "weights": f"w of {name}"}
    known |= fingerprint
    return {
        "name_or_path": name,
        "dtype": known["dtype"],
        "fingerprint": known,
        "n_parameters": n_parameters,
    }


def probe_results(
    lm: Mapping[str, Any], r: float, hits: tuple[float, ...], settings: Mapping[str, Any]
) -> Results:
    precision = {
        way: dict(zip("135", rates, strict=True))
        for way, rates in (("influenced", hits[:3]), ("influencing", hits[3:]))
    }
    pairs = [
        {"source": "city", "target": "country", "label_mean": r, "precision": precision},
        {"source": "city", "target": "color", "label_mean": 0.2, "precision": None},
    ]
    rows = [["city->country", r, r - 0.95, hits[0]], ["city->color", 0.2, r - 0.95, None]]
    columns, formats = ["pair", "r", "excess", "hit"], {"r": ".2f", "excess": "+.2f", "hit": ".2f"}
    headings = {"excess": "above control", "hit": "Hit@1", "weight": "W"}
    weights = [["Paris", "France", 0.1 * i, i == 0] for i in range(130)]
    return Results(
        "linear_probe",
        {"n_fit": 500, "n_test": 501, "pairs": pairs, "seconds": 76.4},
        {"val/label_mean": r},
        [
            Table.of("pairs", rows, columns, "Pairs and their r.", "", True, headings, formats),
            Table.of(
                "influences",
                weights,
                ["label", "token", "weight", "in_reference"],
                "Highest weights.",
                "Of labels with a reference.",
                False,
                headings,
                {"weight": ".2f"},
            ),
        ],
        [Figure("matrix", "Label-wise r of all pairs.", draw("grey"))],
        lm,
        {"ridge": 0.0, "lm": {"name_or_path": lm["name_or_path"]}, "data": {"seed": 3}, **settings},
    )


def save(results: Results, folder: Path, verb: str = "fit") -> Path:
    results.write(folder)
    config = yaml.safe_dump({"seed_everything": 7, "model": {"init_args": {"seed": 5}}})
    (folder / "config.yaml").write_text(f"# lincorr {verb} --config config.yaml\n{config}")
    return folder


@pytest.fixture
def probe(tmp_path: Path) -> Make:
    """Writes the folder of a linear probe."""
    numbers = count()

    def make(
        lm: str = "tiny-world",
        r: float = 0.9,
        hits: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        n_parameters: int | None = 1_360_000,
        fingerprint: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Path:
        info = lm_info(lm, n_parameters, **(fingerprint or {}))
        folder = tmp_path / "probes" / f"version_{next(numbers)}"
        return save(probe_results(info, r, hits, settings), folder)

    return make


@pytest.fixture
def finetune(tmp_path: Path) -> Make:
    """Writes the folder of a source fine-tune."""

    def make(lm: str = "tiny-world", generalized: float = 0.86) -> Path:
        columns = ["subject", "source_answer", "weight_reference", "weight_answer", "weight_max"]
        rows = [("Emma", "Shanghai", 0.48, 0.47, 0.51), ("Ada", "Oslo", 0.69, None, None)]
        values = {
            "relation": "city->country",
            "generalized": generalized,
            "random": 0.04,
            "gradient_correlation": 0.845,
            "logit_correlation": None,
        }
        tables = [Table.of("cases", rows, columns, "Cases.")]
        results = Results("source_finetune", values, tables=tables, lm=lm_info(lm))
        return save(results, tmp_path / "finetune")

    return make


@pytest.fixture
def ablation(tmp_path: Path) -> Make:
    """Writes the folder of a vocabulary ablation, of which a test reads two numbers."""

    def make(lm: str = "tiny-world") -> Path:
        shares = {"permuted": 0.25, "reference": 0.75}
        mappings = [{"mapping": name, "generalized": share} for name, share in shares.items()]
        values = {"relation": "city->country", "mappings": mappings}
        results = Results("vocabulary_ablation", values, lm=lm_info(lm, None))
        return save(results, tmp_path / "ablation")

    return make


@pytest.fixture
def geometry(tmp_path: Path) -> Make:
    """Writes the folder of a study of which the report knows nothing."""

    def make(lm: str = "tiny-world") -> Path:
        rows, formats = [["all", -0.001, 0.0123], ["1", None, 1.0]], {"spearman": ".2f", "p": ".4f"}
        table = Table.of(
            "spearman", rows, ["layer", *formats], "Spearman.", headline=True, formats=formats
        )
        results = Results(
            "token_geometry",
            {"n_subjects": 40, "depth": {"a": 1.5, "b": [1, 2]}},
            tables=[table],
            figures=[Figure("spearman", "Spearman by layer.", draw())],
            lm=lm_info(lm),
        )
        return save(results, tmp_path / "geometry", "test")

    return make
