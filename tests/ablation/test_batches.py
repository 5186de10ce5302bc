"""Batches, their data module, and networks side by side."""

import pytest
import torch

from lincorr_lightning.ablation.batches import PhaseDataset, PhaseSettings
from lincorr_lightning.ablation.datamodule import PairedTextsDataModule
from lincorr_lightning.ablation.module import VocabularyAblation
from lincorr_lightning.ablation.networks import NetworkSettings, StackedNetworks
from lincorr_lightning.errors import ConfigError, SubjectsError
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


def test_a_file_brings_its_own_source_labels(small_lm, tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text(
        "phase,subject,source\ncompose,name1,Paris\ncompose,name2,Rome\nlearn,name3,Rome\n"
    )
    plan = VocabularyAblation(LMConfig(small_lm), seeds=[0, 5]).plan
    data = PairedTextsDataModule(plan, texts_file=str(file))
    data.setup()
    corpus = data.corpus
    assert {corpus.labels.source_text(i) for i in range(len(corpus.labels))} == {"Paris", "Rome"}
    assert corpus.texts[0] == corpus.texts[1]
    assert corpus.texts[0].subjects == ("name1", "name2", "name3")
    file.write_text("phase,subject,source\ncompose,name1,Paris\nlearn,name2,Gotham\n")
    with pytest.raises(SubjectsError, match=r"no single token.*'Gotham'"):
        PairedTextsDataModule(plan, texts_file=str(file)).setup()


def test_it_needs_a_study():
    with pytest.raises(ConfigError, match=r"plan=module\.plan"):
        PairedTextsDataModule().setup()
    with pytest.raises(ConfigError, match=r"call its setup\(\) first"):
        _ = PairedTextsDataModule().corpus


@pytest.mark.parametrize(
    "bad", [{"n_paired": 0}, {"n_new": 0}, {"max_source_labels": 1}, {"seed": -1}]
)
def test_unusable_settings_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        PairedTextsDataModule(**bad)


def test_each_network_is_clipped_by_its_own_norm():
    networks = StackedNetworks(3, 5, NetworkSettings())
    networks.reset([0, 1, 2])
    x = torch.randn(3, 7, 5)
    (networks(x) * torch.tensor([1.0, 1e-4, 100.0])[:, None, None]).sum().backward()
    before = [p.grad.clone() for p in networks.parameters()]
    norms = [torch.cat([g[i].flatten() for g in before]).norm() for i in range(3)]
    networks.clip_gradients(0.5)
    for i, norm in enumerate(norms):
        scale = min(1.0, 0.5 / float(norm))
        for parameter, gradient in zip(networks.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.grad[i], gradient[i] * scale, rtol=1e-4, atol=0)
