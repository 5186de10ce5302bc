"""Tables of token geometry and feature flow on pretrained LMs, from made-up numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

Script = Callable[[str], ModuleType]
Rows = Callable[[str], list[list[str]]]


def _write(folder: Path, run: str, results: dict[str, object]) -> None:
    (folder / "lm").mkdir(exist_ok=True)
    (folder / "lm" / f"{run}.json").write_text(json.dumps({"results": results}))


def test_the_peak_of_the_dimension_is_shown_with_that_of_shuffled_texts(
    tmp_path: Path, script: Script, rows: Rows
) -> None:
    each = {"overlap": {"2": [0.5, 0.75]}, "cosine_mean": [0.1, 0.2, 0.3], "loss": 4.0}
    levels = [
        each | {"shuffle": 0, "dimension": {"2": [5.0, 9.0, 7.0]}},
        each | {"shuffle": 1, "dimension": {"2": [6.0, 11.5, 8.0]}},
    ]
    test = {"shuffle": 0, "n2": 2, "pearson": 0.5, "pearson_p": 0.01}
    numbers = {
        "n_prompts": 3, "layers": [1, 2, 3], "shuffles": levels,
        "dimension_loss": [test | {"layer": 2}, test | {"layer": 3, "pearson": 0.9}],
    }  # fmt: skip
    _write(tmp_path, "token_geometry", numbers)
    tables = script("real_lm_tables")
    assert rows(tables.shuffling_table(["lm", "absent"], tmp_path)) == [
        ["lm", "0", "4.00", "2", "9.00", "0.75", "0.20", "0.30", "0.50 (p 0.0100)"],
        ["lm", "1", "4.00", "2", "11.50", "0.75", "0.20", "0.30", ""],
    ]
    table = tables.geometry_table(["lm", "absent"], tmp_path)
    assert rows(table) == [["lm", "3", "2", "1", "5.00", "2", "9.00 / 11.50", "3", "7.00"]]


def test_tables_of_the_feature_flow(tmp_path: Path, script: Script, rows: Rows) -> None:
    tables = script("real_lm_tables")
    cut = {"cut": "flow", "control": True, "n_features": 4, "fixed": 0.5, "target_only": None,
           "refitted": 0.25, "recall": 1.0}  # fmt: skip
    off = {"layer": 3, "method": "top-1", "n": 9, "matched_success": 0.25, "times_random": 5.0}
    best = {"n_answers": 2, "strength": 1.0, "behaviour": 0.5, "coherence": 0.5, "score": 0.25}
    numbers = {
        "deactivation_layers": [
            off | {"random_success": 0.05},
            off | {"layer": 4, "random_success": 0.0, "times_random": None},
        ],
        "relation": {
            "relation": "city->country",
            "cuts": [cut],
            "n_reference_pairs": 4,
            "n_other_pairs": 12,
            "shared_flow": 0.5,
            "shared_flow_permuted": 0.25,
        },
        "steering": {"single": best},
    }
    for run in ("feature_flow", "feature_flow_relation"):
        _write(tmp_path, run, numbers)
    table = tables.deactivation_table(["lm", "absent"], tmp_path)
    assert rows(table) == [
        ["lm", "3", "9", "25%, 5% (5.0 times)", "", ""],
        ["lm", "4", "9", "25%, 0%", "", ""],
    ]
    table = tables.flow_cut_table(["lm"], tmp_path)
    assert rows(table) == [
        ["lm", "city→country", "flow, control", "4", "0.50", "", "0.25", "1.00"]
    ]  # fmt: skip
    table = tables.flow_pair_table(["lm"], tmp_path)
    assert rows(table) == [["lm", "city→country", "4", "50%", "12", "25%"]]
    table = tables.steering_table(["lm"], tmp_path)
    assert rows(table) == [["lm", "single", "2", "1.000", "0.5000", "0.5000", "0.2500"]]


def test_quality_of_saes_is_averaged_over_layers(
    tmp_path: Path, script: Script, rows: Rows
) -> None:
    each = {"kind": "mlp_out", "n_features": 64, "l0": 2.0, "dead": 0.5, "loss_recovered": 0.5}
    points = [
        each | {"layer": 3, "explained_variance": 0.5},
        each | {"layer": 4, "explained_variance": 0.7},
        each | {"kind": "residual", "layer": 3, "explained_variance": 0.9},
        each | {"kind": "attention_out", "layer": 3, "explained_variance": 0.9},
    ]
    _write(tmp_path, "sparse_autoencoders", {"hook_points": points})
    table = rows(script("real_lm_tables").sae_table(["lm"], tmp_path))
    assert [row[1] for row in table] == ["residual", "mlp out", "attention out"]
    assert table[1][2:5] == ["3–4", "64", "0.60 (0.50–0.70)"]
