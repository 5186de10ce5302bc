"""The grid of the vocabulary ablation: a small one is trained, the committed one is summed up."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks import common
from benchmarks.real_lms import ablation_grid
from lincorr_lightning.ablation.token_embedding import read_token_embedding
from lincorr_lightning.lm import tiny_world
from lincorr_lightning.lm.config import LMConfig

TINY_WORLD = Path(*tiny_world.__path__)
CELL = ablation_grid.Cell("tiny_world", width=5)


@pytest.fixture(scope="module")
def cells() -> pd.DataFrame:
    """The committed grid, a row for each cell and way to learn."""
    rows = ablation_grid.with_network(common.read_csv(ablation_grid.FILE))
    return ablation_grid.summary(rows)


@pytest.mark.slow
def test_cells_that_the_file_lacks_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation_grid, "grid", lambda lms: [CELL])
    file = tmp_path / "grid.csv"
    for _ in range(2):  # the second time, nothing is lacking
        ablation_grid.main((TINY_WORLD,), file, n_seeds=1, epochs=(1, 1))
    rows = pd.read_csv(file)
    assert len(rows) == len(ablation_grid.TRAINED) * len(ablation_grid.MAPPINGS)
    assert set(rows["dimensions"]) == {5}
    shares = rows[["generalized", "nearest", "source_learned"]]
    assert shares.ge(0).all(axis=None) and shares.le(1).all(axis=None)


def test_an_embedding_is_cut_as_by_an_svd(tmp_path: Path) -> None:
    ablation_grid.cut(TINY_WORLD, 5, tmp_path)
    table = read_token_embedding(LMConfig(str(TINY_WORLD))).weight.double().numpy()
    less = read_token_embedding(LMConfig(str(tmp_path))).weight.double().numpy()
    *_, axes = np.linalg.svd(table - table.mean(0), full_matrices=False)
    differences = table[:20, None] - table[None, :20]
    distances = np.linalg.norm(differences @ axes[:5].T, axis=-1)
    found = np.linalg.norm(less[:20, None] - less[None, :20], axis=-1)
    assert found == pytest.approx(distances, abs=1e-4)


def test_means_and_leads_are_those_of_the_file(cells: pd.DataFrame) -> None:
    rows = pd.read_csv(ablation_grid.FILE)
    rows = rows[(rows["lm"] == "gemma-3-270m") & (rows["train"] == "network")]
    rows = rows[(rows["width"] == 0) & (rows["per_target"] == 1) & ~rows["center"]]
    by_seed = {
        (kind, mapping): group.sort_values("seed")["generalized"].to_numpy()
        for (kind, mapping), group in rows.groupby(["kind", "mapping"])
    }
    leads = {k: by_seed[k, "reference"] - by_seed[k, "permuted"] for k in ("plain", "gated")}
    is_cell = (cells["lm"] == "gemma-3-270m") & (cells["labels"] == "101 / 101")
    is_cell &= (cells["dimensions"] == 640) & (cells["train"] == "network")
    (cell,) = cells[is_cell & (cells["network"] == "gated")].to_dict("records")
    for key, numbers in {
        "reference": by_seed["gated", "reference"],
        "lead": leads["gated"],
        "lead_over_plain": leads["gated"] - leads["plain"],
    }.items():
        low, high = stats.t.interval(0.95, 4, numbers.mean(), stats.sem(numbers))
        assert cell[key] == pytest.approx(numbers.mean())
        assert cell[f"{key}_half"] == pytest.approx((high - low) / 2)


@pytest.mark.nightly
def test_the_document_has_the_committed_cells(cells: pd.DataFrame) -> None:
    grid = ablation_grid.with_network(common.read_csv(ablation_grid.FILE))
    text = common.all_text()
    assert common.placed(text, {"ablation_readings": ablation_grid.readings_table(grid)}) == text
    assert len(ablation_grid.figure(grid).axes) == 4
    committed = common.read_csv(ablation_grid.FILE.with_name("ablation_cells.csv"))
    pd.testing.assert_frame_equal(committed, cells, rtol=1e-3, check_dtype=False)
