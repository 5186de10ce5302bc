"""Batches, their data module, and networks side by side."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from lincorr_lightning.ablation.datamodule import PairedTextsDataModule, PhaseDataset, PhaseSettings
from lincorr_lightning.ablation.module import VocabularyAblation
from lincorr_lightning.ablation.networks import NetworkSettings, PooledTexts, baselines
from lincorr_lightning.ablation.token_embedding import read_token_embedding
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.lm.config import LMConfig


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("n_paired", [7, 16])
def test_every_text_is_read_once_an_epoch(world_size, n_paired, small_lm):
    phases = {"compose": PhaseSettings(2, 5), "learn": PhaseSettings(3, 4)}
    options = {"seeds": [0, 1], "skip_compose_baseline": False, **phases}
    plan = VocabularyAblation(LMConfig(small_lm), **options).plan
    data = PairedTextsDataModule(plan, n_paired=n_paired, n_new=3)
    data.setup()
    parts = [PhaseDataset(data.corpus, rank, world_size) for rank in range(world_size)]
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
    with pytest.raises(SubjectsError, match=r"'Gotham' cannot be taught"):
        PairedTextsDataModule(plan, texts_file=str(file)).setup()


def test_unusable_settings_are_refused():
    with pytest.raises(ConfigError, match=r"plan=module\.plan"):
        PairedTextsDataModule().setup()
    with pytest.raises(ConfigError, match="max_source_labels"):
        PairedTextsDataModule(max_source_labels=1)
    with pytest.raises(ConfigError, match="max_sources_per_target is 0"):
        PairedTextsDataModule(max_sources_per_target=0)


def two_seeds(*mapping):
    """Return the texts of two seeds, 90 new subjects each, their embedding and its baselines."""
    plan = VocabularyAblation(LMConfig(), mapping=list(mapping), seeds=[0, 4]).plan
    data = PairedTextsDataModule(plan, n_paired=7, n_new=90)
    data.setup()
    embedding = read_token_embedding(LMConfig())
    pooled = PooledTexts(data.corpus, embedding, "texts", NetworkSettings())
    return data.corpus, embedding, baselines(pooled, embedding)


def test_no_more_is_right_than_follows_from_the_source():
    corpus, _, found = two_seeds("letters", "reference")
    labels, shares = corpus.labels, []
    for texts in corpus.texts:
        letters = {}
        for i in texts.answers[7:]:
            letters.setdefault(labels.source_text(i)[0], []).append(labels.target_text(i)[0])
        shares.append(sum(max(map(one.count, one)) for one in letters.values()) / 90)
    assert found["upper_bound"] == [pytest.approx(sum(shares) / 2), 1]
    assert 0.2 < found["upper_bound"][0] < 0.95


def test_the_nearest_label_is_a_baseline():
    """As scikit-learn finds it, among the rows of each side about their mean."""
    corpus, embedding, found = two_seeds("reference", "permuted")
    weight, shares, macro = embedding.weight.float().numpy(), [], []
    for texts, row in zip(corpus.texts, corpus.mapped, strict=True):
        for labels in row:
            source, target = (
                weight[list(one)] - weight[list(one)].mean(0)
                for one in (labels.source_tokens, labels.domain_tokens)
            )
            search = NearestNeighbors(n_neighbors=1, metric="cosine").fit(target)
            best = search.kneighbors(source, return_distance=False)[:, 0]
            said = [labels.domain_tokens[best[i]] for i in texts.answers[7:]]
            taught = [labels.target_tokens[i] for i in texts.answers[7:]]
            cases = pd.DataFrame({"taught": taught, "hit": np.equal(said, taught)})
            shares.append(cases["hit"].mean())
            macro.append(cases.groupby("taught")["hit"].mean().mean())
    expected = np.reshape(shares, (2, 2)).mean(0)
    assert found["nearest"] == pytest.approx(expected.tolist()) and expected[0] > expected[1]
    assert found["macro_nearest"] == pytest.approx(np.reshape(macro, (2, 2)).mean(0).tolist())
    assert shares != pytest.approx(macro)
