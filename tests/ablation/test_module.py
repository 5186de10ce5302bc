"""The ablation against single networks trained the plain way, and its files."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from lincorr_lightning.ablation.datamodule import LearnSettings, PhaseDataset
from lincorr_lightning.ablation.module import PhaseSettings, VocabularyAblation
from lincorr_lightning.ablation.networks import NetworkSettings, StackedNetworks
from lincorr_lightning.errors import ConfigError, NonFiniteError
from tests.ablation.conftest import COMPOSE, LEARN
from tests.toys import NO_FILES, quiet_trainer, read_table

SHARES = ("source_learned", "generalized", "unrestricted", "says_source", "macro_generalized")


def train_plainly(run, lm, index, phases):
    """One network of a run after some phases: torch.nn.Linear, every text pooled at every step.

    Embeddings are the rows of a whole table, in which those of new subjects' tokens are trained.
    """
    module, corpus = run.module, run.data.corpus
    s, m = divmod(index, len(corpus.plan.mappings))
    paired, mapped, seed = corpus.texts[s], corpus.mapped[s][m], corpus.plan.seeds[s]
    tokenizer = AutoTokenizer.from_pretrained(lm)
    vocabulary = AutoModelForCausalLM.from_pretrained(lm).get_input_embeddings().weight.detach()
    prompts = [
        prompt(list(paired.subjects))
        for prompt in (corpus.labels.relation.source_prompts, corpus.labels.relation.target_prompts)
    ]
    texts = [text for side in prompts for text in side]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    first = torch.stack([vocabulary[ids].mean(0) for ids in rows])
    middle = first.mean(0)
    scale = 0.3 / (first - middle).pow(2).mean().sqrt()
    words = corpus.labels.relation.source_prompts([""])[0]
    of_prompts = tokenizer(words, add_special_tokens=False)["input_ids"]
    new_rows = rows[paired.n_paired : len(paired.subjects)]
    new_tokens = sorted({token for ids in new_rows for token in ids} - set(of_prompts))
    new_embeddings = torch.nn.Parameter(vocabulary[new_tokens].clone())
    train = module.plan.phases["learn"].train
    answers = [
        tokens[i] for tokens in (mapped.source_tokens, mapped.target_tokens) for i in paired.answers
    ]
    d = vocabulary.shape[1]
    drawn = StackedNetworks(1, d, module.network)
    drawn.reset([seed])
    if module.network.kind == "gated":
        network = LlamaMLP(
            LlamaConfig(hidden_size=d, intermediate_size=4 * d, num_attention_heads=1)
        )
        layers = [network.gate_proj, network.up_proj, network.down_proj]
        weights = [drawn.weight_in, drawn.weight_up, drawn.weight_out]
    else:
        network = torch.nn.Sequential(
            torch.nn.Linear(d, 4 * d), torch.nn.GELU(), torch.nn.Linear(4 * d, d)
        )
        layers, weights = [network[0], network[2]], [drawn.weight_in, drawn.weight_out]
        with torch.no_grad():
            network[0].bias.copy_(drawn.bias_in[0, 0])
            network[2].bias.copy_(drawn.bias_out[0, 0])
    with torch.no_grad():
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.copy_(weight[0].T)
    candidates = torch.tensor(module.texts.candidate_tokens[s])
    column = {int(token): i for i, token in enumerate(candidates)}
    steps = PhaseDataset(corpus)
    optimizer = None

    def logits(which):
        table = vocabulary.index_copy(0, torch.tensor(new_tokens), new_embeddings)
        x = (torch.stack([table[rows[i]].mean(0) for i in which]) - middle) * scale
        return (x + network(x)) @ vocabulary[candidates].T

    for batch in (steps[i] for i in range(len(steps))):
        if batch.phase not in phases:
            continue
        if batch.begins:
            settings = COMPOSE if batch.phase == "compose" else LEARN
            way = "network" if batch.phase == "compose" else train
            of_network = [] if way == "embeddings" else [*network.parameters()]
            optimizer = torch.optim.AdamW(
                of_network + ([] if way == "network" else [new_embeddings]),
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
            )
        which = batch.rows[s]
        targets = torch.tensor([column[answers[i]] for i in which])
        loss = torch.nn.functional.cross_entropy(logits(which), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    n = len(paired.subjects)
    new = torch.arange(paired.n_paired, n)
    domain = torch.tensor([column[token] for token in mapped.domain_tokens])
    target_logits = logits(new + n)
    right = [mapped.reference[i] for i in paired.answers[paired.n_paired :]]
    first = target_logits[:, domain].argmax(1)
    good = np.array([row[int(i)] for row, i in zip(right, first, strict=True)])
    top = target_logits.argmax(1)
    source = torch.tensor([column[answers[i]] for i in new])
    hits = {}
    for i, hit in zip(new, good, strict=True):
        hits.setdefault(answers[i + n], []).append(hit)
    return {
        "source_learned": (logits(new).argmax(1) == source).double().mean().item(),
        "generalized": good.mean(),
        "unrestricted": (good & (top == domain[first]).numpy()).mean(),
        "says_source": (top == source).double().mean().item(),
        "macro_generalized": np.mean([np.mean(answer_hits) for answer_hits in hits.values()]),
    }, (layers[0].weight.T.detach(), layers[-1].weight.T.detach(), new_embeddings.detach())


@pytest.mark.parametrize(
    ("kind", "train"),
    [("plain", "network"), ("gated", "all"), ("plain", "embeddings")],
)
def test_side_by_side_is_one_by_one(kind, train, ablate, small_lm):
    learn = LearnSettings(LEARN.epochs, LEARN.batch_size, LEARN.learning_rate, train=train)
    run = ablate(seeds=[0, 7], learn=learn, network=NetworkSettings(kind=kind))
    networks = run.module.networks
    keys = [(r["composed"], r["mapping"], r["seed"]) for r in run.results["runs"]]
    networks_in_order = [("reference", 0), ("permuted", 0), ("reference", 7), ("permuted", 7)]
    assert keys == [(composed, *key) for composed in (True, False) for key in networks_in_order]
    for row, scores in enumerate(run.results["runs"]):
        index = row % 4
        phases = ("compose", "learn") if scores["composed"] else ("uncomposed",)
        expected, weights = train_plainly(run, small_lm, index, phases)
        assert {name: scores[name] for name in SHARES} == pytest.approx(expected)
        if not scores["composed"]:  # only the last networks are kept
            continue
        *layers, rows = weights
        for stacked, single in zip((networks.weight_in, networks.weight_out), layers, strict=True):
            torch.testing.assert_close(stacked[index].detach(), single, rtol=1e-3, atol=1e-4)
        if train != "network":  # rows beyond those of this seed stay zero
            embeddings = networks.embeddings[index].detach()
            torch.testing.assert_close(embeddings[: len(rows)], rows, rtol=1e-3, atol=1e-4)
            assert not embeddings[len(rows) :].any()
            assert not torch.equal(rows, run.module.texts.embeddings[index // 2][: len(rows)])


def test_results_tables_and_figures(ablate):
    run = ablate(seeds=[0, 1])
    results, saved, corpus = run.results, run.module.results, run.data.corpus
    assert (results["study"], results["mapping"]) == ("vocabulary_ablation", "reference")
    assert results["n"] == 12
    assert results["lm"] == run.module.embedding.stored.info
    assert results["settings"]["data"]["n_paired"] == 40
    assert results["random"] == pytest.approx(1 / len(corpus.labels.target_domain))
    of_reference = [r for r in results["runs"] if r["mapping"] == "reference"]
    composed = [r["generalized"] for r in of_reference if r["composed"]]
    bare = [r["generalized"] for r in of_reference if not r["composed"]]
    assert len(composed) == len(bare) == 2
    assert results["generalized"] == pytest.approx(np.mean(composed))
    assert results["mappings"][0]["std"] == pytest.approx(np.std(composed, ddof=1))
    assert results["gain"] == pytest.approx(np.mean(composed) - np.mean(bare))
    answers = [[corpus.labels.targets[i] for i in one.answers[40:]] for one in corpus.texts]
    majority = [max(map(targets.count, targets)) / 12 for targets in answers]
    assert results["majority"] == pytest.approx(np.mean(majority))

    cases = read_table(run.folder / "tables" / "cases.csv")[:12]
    assert {case["mapping"] for case in cases} == {"reference"}
    hits = [case["generalized"] == "True" for case in cases]
    assert np.mean(hits) == pytest.approx(composed[0])
    assert hits == [case["reference"] == case["target_in_domain"] for case in cases]
    summary = saved.table("summary")
    assert summary.headline and list(summary.frame["mapping"]) == ["reference", "permuted"]
    assert summary.frame["generalized"][0] == results["generalized"]
    assert len(saved.table("runs")) == 8

    figures = {path.stem for path in (run.folder / "figures").iterdir()}
    assert figures == {"generalization", "training"}
    bars, curves = (figure.matplotlib() for figure in saved.figures)
    heights = [bar.get_height() for bar in bars.axes[0].patches]
    assert heights == pytest.approx(
        [one[name] for name in ("generalized", "uncomposed") for one in results["mappings"]]
    )
    assert len(curves.axes) == 6


def test_any_dataloader_of_batches_trains(ablate, tmp_path):
    usual = ablate()
    lm, mapping = usual.module.plan.lm, ["reference", "permuted"]
    module = VocabularyAblation(lm, mapping=mapping, compose=COMPOSE, learn=LEARN)
    trainer = quiet_trainer(tmp_path / "plain", **NO_FILES)
    steps = PhaseDataset(usual.data.corpus)
    trainer.fit(module, DataLoader(steps, batch_size=None))
    assert module.scores == usual.module.scores
    key = "val/learn/generalized/permuted"
    assert float(trainer.callback_metrics[key]) == pytest.approx(module.history[key][-1][1])
    other = VocabularyAblation(lm, seeds=[8])
    with pytest.raises(ConfigError, match=r"plan=module\.plan"):
        quiet_trainer(tmp_path, **NO_FILES).fit(other, DataLoader(steps, batch_size=None))


def test_vocabulary_or_texts_are_candidates_and_only_networks_are_trained(ablate, small_lm):
    run, few = ablate(candidates="vocabulary"), ablate()
    n = len(run.module.embedding.weight)
    assert run.module.texts.head.shape[-1] == len(run.module.texts.candidate_tokens[0]) == n
    tokens = few.module.texts.candidate_tokens[0]
    assert len(tokens) < n and set(few.data.corpus.mapped[0][0].domain_tokens) <= set(tokens)
    assert run.module.texts.corpus is run.data.corpus  # no batch holds a copy
    vocabulary = AutoModelForCausalLM.from_pretrained(small_lm).get_input_embeddings().weight
    assert torch.equal(run.module.embedding.weight, vocabulary)
    assert {name.split(".")[0] for name, _ in run.module.named_parameters()} == {"networks"}


def test_a_part_of_the_phases_is_not_scored(ablate):
    stop = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", True)
    )
    for part in ({"max_steps": 9}, {"callbacks": [stop]}):
        with pytest.raises(ConfigError, match="after all phases"):
            ablate(trainer=part)


def test_a_loss_that_is_not_finite_stops(ablate):
    with pytest.raises(NonFiniteError, match="phase uncomposed"):
        ablate(learn=PhaseSettings(epochs=9, batch_size=8, learning_rate=1e38))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"mapping": "scrambled"}, "model.mapping"),
        ({"seeds": [-1]}, "model.seeds"),
        ({"network": {"kind": "llama"}}, "model.network.kind"),
        ({"learn": {"train": "lm"}}, "model.learn.train"),
    ],
)
def test_unusable_settings_are_refused(bad, message):
    with pytest.raises(ConfigError, match=message):
        VocabularyAblation(**bad)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [({"max_epochs": 3}, "max_epochs is 3"), ({"gradient_clip_val": 0.5}, "learning_rate")],
)
def test_unusable_trainers_are_refused(ablate, trainer, message):
    with pytest.raises(ConfigError, match=message):
        ablate(trainer=trainer)


def test_a_checkpoint_has_the_trained_embeddings(ablate, tmp_path):
    keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1)
    learn = LearnSettings(1, 8, train="all")
    ablate(trainer={"callbacks": [keep], "enable_checkpointing": True}, learn=learn)
    stored = torch.load(keep.best_model_path)["state_dict"]
    loaded = VocabularyAblation.load_from_checkpoint(keep.best_model_path).state_dict()
    assert stored.keys() == loaded.keys() and "networks.embeddings" in stored
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)
