"""Every text is read once an epoch, whatever the number of ranks."""

import pytest
import torch

from lincorr_lightning.ablation.batches import PhaseDataset, PhaseSettings
from lincorr_lightning.ablation.datamodule import PairedTextsDataModule
from lincorr_lightning.ablation.module import VocabularyAblation
from lincorr_lightning.lm.config import LMConfig

PHASES = {"compose": PhaseSettings(2, 5), "learn": PhaseSettings(3, 4)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("n_paired", [7, 16])
def test_every_text_is_read_once_an_epoch(world_size, n_paired, small_lm):
    plan = VocabularyAblation(LMConfig(small_lm), seeds=[0, 1]).plan
    data = PairedTextsDataModule(plan, n_paired=n_paired, n_new=3)
    data.setup()
    parts = [PhaseDataset(data.corpus, PHASES, rank, world_size) for rank in range(world_size)]
    read = {}
    for i in range(len(parts[0])):
        shards = [part[i] for part in parts]
        assert sum(shard.rows.shape[1] for shard in shards) == shards[0].n_rows
        rows = torch.cat([shard.rows for shard in shards], 1)
        read.setdefault((shards[0].phase, shards[0].epoch), []).append(rows)
    n = n_paired + 3
    paired = [*range(n_paired), *range(n, n + n_paired)]
    for (phase, _), rows in read.items():
        for seed in range(2):
            found = sorted(torch.cat(rows, 1)[seed].tolist())
            assert found == (paired if phase == "compose" else list(range(n_paired, n)))
    assert len(read) == 5
    with pytest.raises(IndexError):
        parts[0][len(parts[0])]
