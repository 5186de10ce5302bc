"""Correlations during training, against scikit-learn and a count by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pandas import read_csv
from scipy import stats
from sklearn.linear_model import LinearRegression

from lincorr_lightning.callbacks import Formation
from lincorr_lightning.data.tiny_world.world import WorldConfig
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.vocabulary import sample_subjects
from lincorr_lightning.pretraining.datamodule import CorpusDataModule
from lincorr_lightning.pretraining.module import LlamaSize, Pretraining
from tests.toys import quiet_trainer


def naive_correlation(x, y):
    model = LinearRegression().fit(x[::2], y[::2])
    predicted = model.predict(x[1::2])
    r = [stats.pearsonr(p, t)[0] for p, t in zip(predicted.T, y[1::2].T, strict=True)]
    return np.mean(r), model.coef_


def test_correlations_are_those_of_scikit_learn_at_each_step(naive, small_lm, fit):
    module = naive.module(small_lm, lr=0.02)
    states = naive.loop(module, list(naive.sentences(small_lm))).states
    watch = Formation(["city->country"], n_subjects=120, every_n_steps=2, control=None)
    fit(watch, module=module)
    assert [point["step"] for point in watch.correlations] == [0, 2, 4]
    inputs = sample_subjects(module.tokenizer, 120, seed=0)
    for point in watch.correlations:
        x, y = (
            naive.logits(states[point["step"]], module.tokenizer, name, inputs)
            for name in ("city", "country")
        )
        r, weight = naive_correlation(x, y)
        assert point["label_mean"] == pytest.approx(r, abs=1e-4)
        assert point["control_label_mean"] is None
        mask = watch._layout.references["city", "country"]
        hits = [
            mask[w.argmax(), column] for column, w in enumerate(weight.T) if mask[:, column].any()
        ]
        assert point["influenced"] == pytest.approx(np.mean(hits))
    assert watch.recall == []  # the dataset knows no facts


def test_random_words_and_the_vocabulary_stand_beside_each_point(naive, small_lm, fit):
    module = naive.module(small_lm, lr=0.02)
    states = naive.loop(module, list(naive.sentences(small_lm))).states
    watch = Formation(["city->country"], n_subjects=120, every_n_steps=4, control=None)
    fit(watch, module=module)
    inputs = sample_subjects(module.tokenizer, 120, seed=0)
    words = {
        name: module.tokenizer.convert_ids_to_tokens(tokens)
        for name, tokens in watch._layout.words.items()
    }
    assert not set(words["city"]) & {*naive.cities} and len(words["city"]) >= 24
    rng = np.random.default_rng(3)
    for point in watch.correlations:
        state = states[point["step"]]
        city, country = (
            {
                "labels": naive.logits(state, module.tokenizer, name, inputs),
                "words": naive.logits(state, module.tokenizer, name, inputs, words[name]),
                "targets": naive.logits(state, module.tokenizer, name, inputs, naive.countries),
            }
            for name in ("city", "country")
        )
        draws = [rng.permutation(len(words["city"]))[:12] for _ in range(40)]
        r = [naive_correlation(city["words"][:, draw], country["labels"])[0] for draw in draws]
        assert point["random_label_mean"] == pytest.approx(np.mean(r), abs=0.03)
        # There are fewer cities than are compared: all of them.
        own = point["label_mean"]
        assert point["excess_over_random"] == pytest.approx(own - np.mean(r), abs=0.03)
        r, _ = naive_correlation(city["labels"], country["words"])
        assert point["random_target_label_mean"] == pytest.approx(r, abs=0.03)
        head = state.get_output_embeddings().weight.detach().double().numpy()
        sides = []
        for labels in (naive.cities, naive.countries):
            rows = head[module.tokenizer.convert_tokens_to_ids(labels)]
            rows = rows - rows.mean(0)
            sides.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
        _, same_states = naive_correlation(city["labels"], city["targets"])
        pairings = [sides[1] @ sides[0].T, same_states]
        right = [naive.countries.index(p) if p else None for p in naive.places.values()]
        shares = [
            np.mean([w[:, i].argmax() == j for i, j in enumerate(right) if j is not None])
            for w in pairings
        ]
        constant = 1 / sum(j is not None for j in right)  # each country has one city
        assert point["best_baseline_1"] == pytest.approx(max(*shares, constant))


def test_without_random_labels_there_are_no_baselines(naive, small_lm, fit):
    watch = Formation(["city->country"], n_subjects=40, every_n_steps=9, random_labels=0)
    fit(watch, module=naive.module(small_lm))
    for point in watch.correlations:
        assert point["random_label_mean"] is point["best_baseline_1"] is None
        assert point["label_mean"] is not None and point["control_label_mean"] is not None
    assert not any("random" in key or "baseline" in key for key in watch.history)


WORLD = WorldConfig(n_people=30, nicknames=False)


@pytest.fixture(scope="module")
def formed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    module = Pretraining(
        LlamaSize(hidden_size=32, intermediate_size=48, n_heads=2), mixing_epochs=0
    )
    data = CorpusDataModule(
        WORLD, ["city", "country", "color"], batch_size=32, pair="city->country", cooccurrence=0.5
    )
    watch = Formation(["city->country", "city->color"], n_subjects=80, every_n_steps=20)
    trainer = quiet_trainer(
        folder, max_epochs=15, callbacks=[watch], check_val_every_n_epoch=15,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return watch, data, module, trainer


def test_recall_of_stated_and_of_withheld_facts(formed):
    watch, data, module, trainer = formed
    last = {row["knowledge"]: row for row in watch.recall if row["step"] == trainer.global_step}
    assert set(last) == {"city", "country", "color"}
    assert last["color"]["withheld"] is None
    for name in ("city", "country"):
        domain = watch._layout.domains[name]
        stated = {(s.subject, s.answer.identity) for s in data.corpus.facts(name)[0]}
        withheld = {(s.subject, s.answer.identity) for s in data.corpus.facts(name)[1]}
        assert not stated & withheld
        for facts, share in ((stated, last[name]["stated"]), (withheld, last[name]["withheld"])):
            hits = []
            for subject, identity in facts:
                prompt = domain.knowledge.prompt(subject)
                ids = data.corpus.tokenizer(prompt, return_tensors="pt")["input_ids"]
                with torch.no_grad():
                    logits = module.lm.eval()(input_ids=ids).logits[0, -1, domain.token_ids]
                label = domain.labels[int(logits.argmax())]
                hits.append(identity in {answer.identity for answer in label.answers})
            assert share == pytest.approx(np.mean(hits))


def test_numbers_stand_in_results_tables_and_figure(formed):
    watch, _, _, trainer = formed
    run = Path(trainer.log_dir)
    found = json.loads((run / "results.json").read_text())["formation"]
    assert found["correlations"] == watch.correlations
    assert len(watch.correlations) == 2 * len({row["step"] for row in watch.correlations})
    frame = read_csv(run / "tables" / "formation.csv")
    by_step = sorted(watch.correlations, key=lambda point: -point["step"])
    for name in ("step", "label_mean", "random_label_mean", "excess_over_random"):
        assert list(frame[name]) == pytest.approx([point[name] for point in by_step])
    assert (frame["step"].iloc[0], frame["step"].iloc[-1]) == (trainer.global_step, 0)
    assert (run / "figures" / "formation.png").stat().st_size > 20_000


@pytest.mark.parametrize(("relation", "pairs"), [
    (None, ["city->country", "city->color"]),
    ("country->city", ["country->city", "country->color"]),
    ("color->city", ["color->city"]),
])  # fmt: skip
def test_pairs_are_those_of_the_run_by_default(naive, small_lm, relation, pairs, fit):
    """The training dataset says what the run is about."""
    formation, module = Formation(n_subjects=40, every_n_steps=1000), naive.module(small_lm)
    sentences = naive.sentences(small_lm)
    if relation is not None:
        about = TokenizedRelation.of(relation, Catalogue.load(), module.tokenizer)
        sentences.dataset.relation = about
    fit(formation, module=module, data=sentences)
    assert list(dict.fromkeys(point["pair"] for point in formation.correlations)) == pairs


def test_too_few_subjects_are_refused(fit):
    with pytest.raises(ConfigError, match="n_subjects is 5; it must be at least 20"):
        fit(Formation(["city->country"], n_subjects=5))
