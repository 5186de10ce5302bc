"""Subjects and their answers, the batches of them, and what is right without a network."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from lincorr_lightning.ablation.datamodule import (
    PairedTextsDataModule,
    PhaseDataset,
    PhaseSettings,
    sample_texts,
)
from lincorr_lightning.ablation.mappings import map_labels, pair_labels
from lincorr_lightning.ablation.module import VocabularyAblation
from lincorr_lightning.ablation.networks import NetworkSettings, PooledTexts, baselines
from lincorr_lightning.ablation.token_embedding import read_token_embedding
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.config import LMConfig
from tests.nearness import causal_nearness


@pytest.mark.parametrize(("world_size", "n_paired"), [(1, 16), (3, 7)])
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
            texts = sorted(torch.cat(rows, 1)[seed].tolist())
            assert texts == (paired if phase == "compose" else list(range(n_paired, n)))
    assert len(read) == 5


def labels_of(tokenizer, n=None):
    return pair_labels(TokenizedRelation.of("city->country", Catalogue.load(), tokenizer), n)


def test_texts_never_give_an_answer_away(world_tokenizer):
    labels = labels_of(world_tokenizer, 20)
    texts = sample_texts(labels, world_tokenizer, 1024, 128, seed=5)
    assert (
        len(set(texts.subjects)) == len(texts.subjects) == 1152
    )  # so no subject of one phase is in the other
    answers = {
        token
        for name in ("reference", "permuted", "letters")
        for mapped in [map_labels(labels, name, world_tokenizer)]
        for token in (*mapped.source_tokens, *mapped.target_tokens)
    }
    prompts = labels.relation.source_prompts(texts.subjects)
    prompts += labels.relation.target_prompts(texts.subjects)
    rows = world_tokenizer(prompts, add_special_tokens=False)["input_ids"]
    assert not any(answers & set(ids) for ids in rows)
    assert not any(world_tokenizer.unk_token_id in ids for ids in rows)
    for part in (texts.answers[:1024], texts.answers[1024:]):
        counts = Counter(part)
        assert len(counts) == 20
        assert max(counts.values()) - min(counts.values()) <= 1
    assert sample_texts(labels, world_tokenizer, 1024, 128, 5) == texts
    assert sample_texts(labels, world_tokenizer, 1024, 128, 6).subjects != texts.subjects


def test_too_few_subjects_say_how_many_there_are(tokenizer):
    with pytest.raises(SubjectsError, match=r"5128 subjects.*the vocabulary has \d+"):
        sample_texts(labels_of(tokenizer), tokenizer, 5000, 128, 0)


def test_unusable_settings_are_refused():
    with pytest.raises(ConfigError, match=r"plan=module\.plan"):
        PairedTextsDataModule().setup()
    with pytest.raises(ConfigError, match="max_source_labels"):
        PairedTextsDataModule(max_source_labels=1)


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
    source_texts = [labels.relation.source.texts[i] for i in labels.sources]
    target_texts = [labels.relation.target.texts[i] for i in labels.targets]
    for texts in corpus.texts:
        letters = {}
        for i in texts.answers[7:]:
            letters.setdefault(source_texts[i][0], []).append(target_texts[i][0])
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
    near = [
        [causal_nearness(weight, labels.source_tokens, labels.domain_tokens) for labels in row]
        for row in corpus.mapped
    ]
    for m, row in enumerate(zip(*near, strict=True)):
        hits = [
            corpus.mapped[s][m].domain_tokens[by[:, i].argmax()]
            == corpus.mapped[s][m].target_tokens[i]
            for s, by in enumerate(row)
            for i in corpus.texts[s].answers[7:]
        ]
        assert found["causal_inner_product"][m] == pytest.approx(np.mean(hits))
