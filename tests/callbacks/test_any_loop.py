"""Callbacks in loops that are not ours: right numbers whatever changes the weights, and when.

What is right is computed by plain forwards of copies of the LM, made as training goes.
"""

import copy
from itertools import pairwise
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter

from lincorr_lightning.callbacks import Generalization, GradientCorrelation, Resilience
from lincorr_lightning.finetune.batches import EditTraining
from tests.callbacks import naive
from tests.launching import launch, starting_processes
from tests.toys import NO_FILES, quiet_trainer, read_table

pytestmark = pytest.mark.slow

EDITS = naive.EDITS
N_WATCHED = 3
SUBJECTS = [f"name{i}" for i in range(5, 17)]
EVERYONE = [edit["subject"] for edit in EDITS] + SUBJECTS


def three_callbacks(own_map, edits=EDITS, **options):
    options = {"linear_map": own_map.folder, "every_n_steps": 1} | options
    return [
        Generalization("city->country", edits, n_watch=N_WATCHED, **options),
        GradientCorrelation("city->country", subjects=SUBJECTS, **options),
        Resilience(relation="city->country", subjects=SUBJECTS, **options),
    ]


# -- loops -----------------------------------------------------------------------------------------


class Recorded(naive.Module):
    """Trains on the texts of the edits, and copies its LM before training and after each batch."""

    def __init__(self, folder, lr=0.02):
        super().__init__(folder, lr)
        self.states, self.counts = [], []

    def train_dataloader(self):
        return naive.lessons(self.tokenizer, batch_size=2)

    val_dataloader = train_dataloader

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.backbone(input_ids=batch)

    def on_train_start(self):
        super().on_train_start()
        self.on_train_batch_end()

    def on_train_batch_end(self, *_):
        self.states.append(copy.deepcopy(self.backbone))
        self.counts.append(self.trainer.global_step)


def low_rank(folder):
    torch.manual_seed(0)
    module, config = Recorded(folder, 0.1), LoraConfig(r=2, target_modules="all-linear")
    module.backbone = get_peft_model(module.backbone, config)
    return module


class Raw(Recorded):
    """Steps its optimizer behind Lightning's back: `global_step` stays at 0."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Editor(Recorded):
    """Writes `param.data`, which leaves no trace in the parameter's version."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        weights = list(self.backbone.parameters())
        gradients = torch.autograd.grad(super().training_step(batch, batch_idx), weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.data.sub_(0.02 * gradient.sign())

    def configure_optimizers(self):
        return None


class Two(Recorded):
    """Two optimizers, the second of which steps in every n-th batch."""

    automatic_optimization = False
    every = 1

    def configure_optimizers(self):
        weights = list(self.backbone.parameters())
        return [torch.optim.AdamW(part, lr=self.lr) for part in (weights[:3], weights[3:])]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.backbone.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        first.step()
        if batch_idx % self.every == 0:
            second.step()


class Skipping(Two):
    every = 2


class Replacing(Recorded):
    """Puts another LM in the place of its own when training has ended."""

    def on_train_end(self):
        self.backbone = copy.deepcopy(self.states[2])


class HalvesAdapters(L.Callback):
    """No weight changes, but what the LM computes."""

    def on_train_end(self, trainer, pl_module):
        for layer in pl_module.modules():
            if isinstance(getattr(layer, "scaling", None), dict):
                layer.scaling["default"] /= 2


class Meddling(L.Callback):
    """Bounds the weights after each batch, and restores those of the first epoch at last."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        for weight in pl_module.parameters():
            weight.data.clamp_(-0.8, 0.8)

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            self.best = copy.deepcopy(pl_module.state_dict())

    def on_train_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.best)


# name: module, options of the Trainer, and another callback
LOOPS = {
    "accumulating": (Recorded, {"accumulate_grad_batches": 3}, None),
    "bf16-mixed": (Recorded, {"precision": "bf16-mixed"}, None),
    "raw": (Raw, {}, None),
    "editor": (Editor, {}, None),
    "skipping": (Skipping, {}, None),
    "ema": (Recorded, {}, lambda: EMAWeightAveraging(decay=0.5)),
    "meddling": (Recorded, {}, Meddling),
    "replacing": (Replacing, {}, None),
    "halved": (low_rank, {}, HalvesAdapters),
}


# -- the oracle ------------------------------------------------------------------------------------


def read(model, tokenizer, others):
    return naive.answers(model, tokenizer, [*EVERYONE, *others])


OTHERS = slice(len(EVERYONE), None)


def correlation(own_map, now, before=None):
    """r of the map's predictions, or of its predictions of the change between two copies."""
    bias = own_map.bias if before is None else 0
    kinds = ("city", "country")
    source, target = (now[k] - (0 if before is None else before[k]) for k in kinds)
    watched = slice(len(EDITS), len(EVERYONE))
    return naive.r((source @ own_map.weight.T + bias)[watched], target[watched])


def metric_of(key, value):
    """What monitors see: the worst value where there is none yet."""
    return np.nan_to_num(value, nan=float(key.endswith("hallucinated_of_learned")))


def differ(one, other):
    return any((one[kind] != other[kind]).any() for kind in one)


def expected_of(module, own_map, others):
    """What is to be logged with `every_n_steps=1`, ``(step, value)`` by key; and the results."""
    base, *after, left = (
        read(lm, module.tokenizer, others) for lm in (*module.states, module.backbone)
    )
    counts = module.counts if any(module.counts) else range(len(module.states))
    # Under accumulation, the weights stay for some batches.
    changed = [i for i, (one, two) in enumerate(pairwise([base, *after])) if differ(one, two)]
    assert len(changed) > 1 and differ(base, left), "the loop teaches nothing"
    at, steps = [0, *(counts[i + 1] for i in changed)], [base, *(after[i] for i in changed)]
    gradients = [correlation(own_map, now, before) for before, now in pairwise(steps)]
    final = naive.outcomes(base, left, EDITS, OTHERS)
    watched = [*(naive.outcomes(base, now, EDITS[:N_WATCHED], OTHERS) for now in steps[:-1]), final]
    r = [correlation(own_map, now) for now in (*steps, left)]
    results = {"worst": min(r)}  # also of the last step, whose point is replaced
    del r[-2]
    curves = {key: [one[key] for one in watched] for key in final}
    curves |= {f"{name}/city->country": r for name in ("resilience", "logit_correlation")}
    curves["gradient_correlation/city->country"] = [np.nan, *gradients]
    names = ("generalized", "hallucinated", "unchanged", "right_before")
    names = (*names, "source_learned", "constant")
    results |= {name: final[f"generalization/{name}"] for name in names}
    results |= {"before": r[0], "after": r[-1], "gradient_correlation": np.mean(gradients)}
    results |= {"probability_reference": final["probability/reference"]}
    return {key: [*zip(at, curve, strict=True)] for key, curve in curves.items()}, results


def check(module, trainer, three, own_map):
    """Compare curves, metrics and results with the copies, and with what `fit` has left."""
    curves, results = expected_of(module, own_map, three[0].others)
    history = {key: points for each in three for key, points in each.history.items()}
    own = three[0].results | three[1].results | three[2].results
    sides = {name: (own[name], value) for name, value in results.items()}
    for key, points in curves.items():
        drawn = [point for point in points if point[1] == point[1]]
        sides[f"curve of {key}"] = history.get(key, []), drawn
        sides[f"metric {key}"] = float(trainer.callback_metrics[key]), metric_of(key, points[-1][1])
    wrong = {
        key: f"{found}, to be {expected}"
        for key, (found, expected) in sides.items()
        if np.shape(found) != np.shape(expected) or not np.allclose(found, expected, 0, 3e-4)
    }
    assert not wrong, wrong
    assert own["n_edits"] == len(EDITS)
    rows = {row["step"]: row for row in own["by_step"]}
    last = max(rows, default=0)
    for name in ("source_learned", "generalized", "leak", "specific"):
        points = curves[f"generalization/{name}"]
        curve = {step: value for step, value in points if 0 < step < last}
        assert {step: rows[step][name] for step in curve} == pytest.approx(curve)
    for name in ("leak", "specific"):
        assert own[name]["mean"] == pytest.approx(curves[f"generalization/{name}"][-1][1])


# -- right numbers ---------------------------------------------------------------------------------


@pytest.fixture
def run(small_lm, make_trainer):
    """Train the LM of a module of some kind with some callbacks."""

    def train(kind, *callbacks, data=None, ckpt_path=None, **options):
        module, trainer = kind(small_lm), make_trainer(*callbacks, **options)
        trainer.fit(module, None if data is None else data(module), ckpt_path=ckpt_path)
        return module, trainer

    return train


@pytest.mark.parametrize(
    ("loop", "first"), [*((loop, True) for loop in LOOPS), ("meddling", False)]
)
def test_numbers_in_any_loop(run, own_map, tmp_path, loop, first):
    """In results, metrics and loggers; and training is the same without the callbacks."""
    (kind, options, other), three = LOOPS[loop], three_callbacks(own_map)
    others = [other()] if other else []
    order = [*three, *others] if first else [*others, *three]
    logger = CSVLogger(tmp_path, name="", version="csv")
    module, trainer = run(kind, *order, max_epochs=2, logger=logger, **options)
    check(module, trainer, three, own_map)
    rows = read_table(tmp_path / "csv" / "metrics.csv")
    for key, points in (item for each in three for item in each.history.items()):
        logged = [(int(row["step"]), float(row[key])) for row in rows if row[key]]
        # Where nothing is learned in the end, there is no last point of what is learned.
        assert logged[-1] == pytest.approx(points[-1]) or "of_" in key
    bare, alone = run(kind, *([other()] if other else []), max_epochs=2, **options)
    assert alone.global_step == trainer.global_step
    assert all(torch.equal(w, bare.state_dict()[name]) for name, w in module.state_dict().items())


def fit_in_two(rank, small_lm, own_map, folder):
    """One of the two processes: the numbers are right on both."""
    three, module = three_callbacks(own_map), Recorded(small_lm)
    options = {"strategy": "ddp", "devices": 2, "max_epochs": 2, "callbacks": three}
    trainer = quiet_trainer(Path(folder), **options, **NO_FILES)
    trainer.fit(module)
    check(module, trainer, three, own_map)


def test_two_processes(small_lm, own_map, tmp_path):
    launch(2, fit_in_two, small_lm, own_map, str(tmp_path))


@pytest.mark.parametrize(
    "start",
    ["forkserver", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("spawn", "fork"))],
)
def test_processes_that_the_trainer_starts(small_lm, own_map, tmp_path, start):
    """What `ddp_spawn` and `ddp_notebook` measured comes back, as the weights do."""
    three = three_callbacks(own_map)
    module, strategy = naive.Module(small_lm, 0.02), DDPStrategy(start_method=start)
    base = read(module.backbone, module.tokenizer, ())
    options = {"strategy": strategy, "devices": 2, "callbacks": three}
    trainer = quiet_trainer(tmp_path, **options, **NO_FILES)
    with starting_processes():
        trainer.fit(module, naive.sentences(small_lm))
    after = read(module.backbone, module.tokenizer, three[0].others)
    assert three[2].results["before"] == pytest.approx(correlation(own_map, base), abs=3e-4)
    assert three[2].results["after"] == pytest.approx(correlation(own_map, after), abs=3e-4)
    cities = [naive.CITIES[i] for i in after["city"][: len(EDITS)].argmax(1)]
    learned = [city == edit["answer"] for city, edit in zip(cities, EDITS, strict=True)]
    assert [case.source_learned for case in three[0].cases] == learned
    for callback in three:
        for table in callback.output.tables:
            (file,) = tmp_path.rglob(f"{table.name}.csv")
            assert len(read_table(file)) == len(table) > 0
        assert all(figure.png for figure in callback.output.figures)


# -- the steps that are measured -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        (Recorded, {"accumulate_grad_batches": 3}, 2),
        (Two, {}, 5),
        (Skipping, {}, 3),
        (Raw, {}, 3),
    ],
)
def test_steps_between_measurements(run, own_map, kind, options, most):
    """At most as many as are asked for, and no more measurements than that takes."""
    three = three_callbacks(own_map, every_n_steps=most)
    module, _ = run(kind, *three, max_epochs=3, **options)
    counts = module.counts if any(module.counts) else range(len(module.counts))
    history = {key: points for each in three for key, points in each.history.items()}
    keys = "generalization/unchanged gradient_correlation/city->country resilience/city->country"
    for key in keys.split():
        steps = sorted({0, counts[-1], *(step for step, _ in history[key])})
        gaps = np.diff(steps)
        assert {*steps} <= {*counts} and max(gaps) <= most, (key, steps, counts)
        if "gradient" not in key:  # which needs the logits before a step, too
            assert all(gaps[:-1] + max(np.diff(counts)) > most), (key, steps, counts)
            assert {0, counts[-1]} <= {step for step, _ in history[key]}


class AsItStarts(L.Callback):
    """Keeps the metrics as the run's first batch begins."""

    metrics = None

    def on_train_batch_start(self, trainer, *_):
        self.metrics = self.metrics or {k: float(x) for k, x in trainer.callback_metrics.items()}


@pytest.mark.parametrize("independent", [False, True])
def test_every_key_can_be_monitored(run, own_map, tmp_path, independent):
    """By callbacks that look at it after each step, before any measurement but the first."""
    kind, data, training = Recorded, None, EditTraining(edits_per_step=2, n_steps=2)
    if independent:
        kind, data = naive.OnEdits, lambda lm: naive.edits_data(lm, n_edits=4, training=training)
    none = dict.fromkeys(("city", "country", "color"), np.ones((99, len(naive.CITIES))))
    keys = [
        *naive.outcomes(none, none, EDITS, OTHERS),
        "permuted_gradient_correlation/city->country",
    ]
    keys += [f"{k}/city->country" for k in ("gradient_correlation", "resilience")]

    def monitored(ckpt_path=None):
        start, three = AsItStarts(), three_callbacks(own_map, every_n_steps=1000)
        if independent:
            three[0] = Generalization(linear_map=own_map.folder, every_n_steps=1000)
        stops = [EarlyStopping(key, patience=99, check_on_train_epoch_end=True) for key in keys]
        names = {key: key.replace("/", " ") for key in keys}
        keeps = [ModelCheckpoint(tmp_path, names[key], key, every_n_train_steps=1) for key in keys]
        options = {"data": data, "enable_checkpointing": True, "ckpt_path": ckpt_path}
        return start, three, run(kind, *stops, *three, *keeps, start, **options)[0]

    start, three, module = monitored()
    resumed, *_ = monitored(tmp_path / "generalization constant.ckpt")  # of the first step
    assert resumed.metrics.keys() >= {*keys}
    assert start.metrics.keys() >= {*keys}
    assert not any(value for key, value in start.metrics.items() if "gradient" in key)
    if not independent:
        base = read(module.states[0], module.tokenizer, three[0].others)
        expected = naive.outcomes(base, base, EDITS[:N_WATCHED], OTHERS)
        found = [start.metrics[key] for key in expected]
        assert found == pytest.approx([metric_of(*one) for one in expected.items()], abs=3e-4)
        # What is monitored is measured where a checkpoint is saved, however large the interval is.
        assert [step for step, _ in three[0].history["generalization/unchanged"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("saved", "options", "other"),
    [
        ({"every_n_train_steps": 3}, {}, None),
        ({}, {"val_check_interval": 3, "check_val_every_n_epoch": None}, None),
        ({}, {"val_check_interval": 3, "accumulate_grad_batches": 2}, None),
        ({}, {"val_check_interval": 2}, lambda: EMAWeightAveraging(decay=0.5)),
        ({"every_n_train_steps": 3}, {"kind": Two}, None),
    ],
)
def test_a_checkpoint_is_chosen_by_the_number_of_its_weights(
    run, own_map, tmp_path, saved, options, other
):
    """However many steps lie between two measurements."""
    options = {"kind": Recorded, "max_epochs": 2, "enable_checkpointing": True} | options
    key = "resilience/city->country"
    keeps = ModelCheckpoint(tmp_path, "{step}", key, save_top_k=-1, **saved)
    callbacks = [
        *three_callbacks(own_map, every_n_steps=1000),
        keeps,
        *([other()] if other else []),
    ]
    module, _ = run(options.pop("kind"), *callbacks, **options)
    assert len(keeps.best_k_models) > 1
    for path, r in keeps.best_k_models.items():
        module.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
        now = read(module.backbone, module.tokenizer, ())
        assert float(r) == pytest.approx(correlation(own_map, now), abs=3e-4), path


# -- compiled LMs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way", ["layers", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("whole", "fullgraph"))]
)
def test_measuring_never_uses_the_compiled_call(run, own_map, way):
    """Nothing is compiled for it, and weights are the same bit for bit."""

    def compiled(folder):
        module = Recorded(folder)
        layers, whole = module.backbone.model.layers, [module.backbone]
        for part in layers if way == "layers" else whole:
            part.compile(backend=counter, fullgraph=way == "fullgraph")
        return module

    counts, weights, three = [], [], three_callbacks(own_map)
    for callbacks in ([], three):
        torch._dynamo.reset()
        counter = CompileCounter()
        module, trainer = run(compiled, *callbacks, limit_val_batches=0)
        counts.append(counter.frame_count)
        weights.append(module.state_dict())
    assert counts[0] == counts[1] > 0
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    check(module, trainer, three, own_map)
