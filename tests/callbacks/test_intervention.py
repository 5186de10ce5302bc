"""Moves of states, against hidden states that a hook reads and numpy projects."""

import json

import numpy as np
import pytest
import torch

from lincorr_lightning.callbacks import Intervention
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.finetune.interventions import STRENGTHS, EditStates, TargetSpace
from lincorr_lightning.linear_map.fitting import sample_fitted_subjects
from tests.callbacks import naive
from tests.toys import save_toy_lm

TRAINING = EditTraining(edits_per_step=3, n_steps=12)
ARMS = ["W", "W, plain", "W0", "W - W0", "W, other labels", "reference's row"]


@pytest.fixture
def run(small_lm, fit, tmp_path):
    """Train six edits in adapters; keep what the head reads at each target prompt, and the LM."""

    file = tmp_path / "edits.json"

    def train(change=None, edits=naive.EDITS[:6]):
        file.write_text(json.dumps(edits))

        class Recording(naive.Stacked):
            def states(self, subjects, adapters):
                read, rows = [], [f"{x} lives in the country of" for x in subjects]
                head = self.backbone.get_output_embeddings()
                keep = head.register_forward_pre_hook(lambda _, args: read.append(args[0][:, -1]))
                with torch.no_grad(), self.adapters.rows(adapters):
                    self.backbone(self.tokenizer(rows, return_tensors="pt")["input_ids"])
                keep.remove()
                return read[0].double().numpy()

            def on_train_batch_end(self, outputs, batch, batch_idx):
                subjects = [edit.subject for edit in batch.edits]
                if batch.last:
                    after = self.states(subjects, range(len(subjects)))
                    before = self.states(subjects, [-1] * len(subjects))
                    for i, edit in enumerate(batch.edits):
                        self.found[edit.subject] = (edit, before[i], after[i])

        module = Recording(small_lm)
        module.found = {}
        if change is not None:
            change(module)
        watch = Intervention(n_subjects=150)
        fit(
            watch,
            module=module,
            data=naive.edits_data(module, edits_file=str(file), training=TRAINING),
        )
        return module, watch

    return train


@pytest.mark.slow
def test_moves_are_those_of_the_hidden_states(run):
    """In all dimensions, each edit and arm by itself."""
    module, watch = run()
    ids = module.tokenizer.convert_tokens_to_ids(naive.COUNTRIES)
    head = module.backbone.get_output_embeddings().weight.detach().double().numpy()[ids]
    u, maps = head - head.mean(0), {k: w.numpy() for k, (w, _) in watch.maps.items()}
    doses = watch.output.table("intervention_doses").frame
    learned = [edit for edit, *_ in module.found.values()]
    assert watch.results["n_learned"] == len(watch.edits.after) > 1
    kept = {watch.edits.after[i].numpy().round(3).tobytes() for i in range(len(watch.edits.after))}
    seen = [
        e.subject
        for e in learned
        if (module.found[e.subject][2] @ head.T).round(3).tobytes() in kept
    ]
    assert len(seen) == len(kept)
    references = sorted(
        {naive.COUNTRIES.index(naive.PLACES[module.found[x][0].answer]) for x in seen}
    )
    for part in ("own", "change", "state", "only"):
        for arm in ARMS:
            rows = doses[(doses["part"] == part) & (doses["arm"] == arm)]
            for strength in (0.0, 0.5, 2.0):
                found = {name: {r: [] for r in references} for name in ("hit", "p", "share")}
                for subject in seen:
                    edit, before, after = module.found[subject]
                    right = naive.COUNTRIES.index(naive.PLACES[edit.answer])
                    w = {"W": "auto", "W, plain": "plain", "W0": "vocabulary"}
                    columns = {k: maps[v][:, edit.label] for k, v in w.items()}
                    columns["W - W0"] = columns["W"] - columns["W0"]
                    columns["W, other labels"] = np.where(
                        np.arange(len(head)) == right, 0, columns["W"] - columns["W"].mean()
                    )
                    columns["reference's row"] = np.eye(len(head))[right]
                    along, along_w = (u.T @ columns[k] for k in (arm, "W"))
                    along, along_w = (x / np.linalg.norm(x) for x in (along, along_w))
                    v = after if part == "state" else after - before
                    length = v @ (along if part == "own" else along_w)
                    step = np.sign(v @ along) * abs(length) * along * strength
                    logits = head @ (before + step if part == "only" else after - step)
                    p = np.exp(logits - logits.max())
                    found["hit"][right].append(logits.argmax() == right)
                    found["p"][right].append(p[right] / p.sum())
                    shown = np.linalg.pinv(u) @ u @ v
                    found["share"][right].append((v @ along) ** 2 / (shown @ shown))
                (own,) = rows[rows["strength"] == strength].to_dict("records")
                means = {k: np.mean([np.mean(x) for x in one.values()]) for k, one in found.items()}
                where = part, arm, strength
                assert own["mean"] == pytest.approx(means["hit"]), where
                assert own["share"] == pytest.approx(means["share"], rel=1e-3), where
                (moved,) = watch.edits.moved(part, arm)[0][STRENGTHS.index(strength)]
                p = (moved.softmax(1) * watch.edits.reference_mask).sum(1)
                p = watch.edits.by_reference(p).mean()
                assert float(p) == pytest.approx(means["p"], abs=1e-4), where
    zero, one = (doses[doses["strength"] == x].reset_index()["mean"] for x in (0, 1))
    effects = doses[doses["strength"] == 1].reset_index()
    assert np.allclose(effects["effect"], one - zero)
    assert (effects["effect_low"] <= effects["effect"] + 1e-9).all()


@pytest.mark.slow
def test_the_nulls_and_the_map_of_the_vocabulary(run):
    module, watch = run()
    edits, w = watch.edits, watch.maps["auto"][0].T
    # Columns of other answers are those of edits with another reference.
    places = [naive.PLACES[city] for city in naive.CITIES]
    assert edits.weights["other answer"].shape[:2] == (8, len(edits.references))
    for draw in edits.weights["other answer"]:
        for column, reference in zip(draw, edits.references, strict=True):
            (label,) = (w == column).all(1).nonzero().flatten().tolist()
            assert places[label] in set(edits.references) - {reference}
    # Shuffled columns keep the weight of the reference.
    (w,), shuffled = edits.weights["W"], edits.weights["W, shuffled"]
    for draw in shuffled:
        assert torch.equal(draw[edits.reference_mask], w[edits.reference_mask])
        assert torch.equal(draw.sort(-1).values, w.sort(-1).values)
    assert not torch.equal(shuffled[0], shuffled[1])
    # W0 leads to the countries' logits at the source prompt, by ridge regression in numpy.
    subjects = sample_fitted_subjects(module.tokenizer, 150, [*module.found])
    lm, tokenizer = module.backbone, module.tokenizer
    with module.adapters.rows([-1] * len(subjects)):
        x = naive.logits(lm, tokenizer, "city", subjects)
        y = naive.logits(lm, tokenizer, "city", subjects, naive.COUNTRIES)
    x, y = x - x.mean(0), y - y.mean(0)
    solutions = [
        np.linalg.solve(x.T @ x + 10 ** (i / 2) * np.eye(12), x.T @ y).T for i in range(-12, 13)
    ]
    errors = [np.abs(each - watch.maps["vocabulary"][0].numpy()).max() for each in solutions]
    assert min(errors) < 1e-4


def test_draws_are_averaged():
    generator = torch.Generator().manual_seed(0)
    head, before, after = (
        torch.randn(n, m, generator=generator).double() for n, m in ((5, 9), (40, 5), (40, 5))
    )
    space = TargetSpace(head)
    draws = torch.randn(3, 40, 5, generator=generator).double()
    mask = torch.eye(5).bool()[torch.arange(40) % 5]
    names = [str(i % 5) for i in range(40)]

    def states(weights):
        return EditStates(space, before, after, mask, names, weights)

    together = states({"W": draws[:1], "drawn": draws}).moved("change", "drawn")
    alone = [states({"W": draws[:1], "drawn": one[None]}).moved("change", "drawn") for one in draws]
    assert torch.allclose(together[0], torch.cat([logits for logits, _ in alone], 1))
    assert torch.allclose(together[1], sum(share for _, share in alone) / 3)
    change = (after - before).numpy()
    u = (head - head.mean(0)).numpy()
    along = draws[0].numpy() @ u
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    shown = change @ np.linalg.pinv(u).T
    share = np.sum(shown * along, 1) ** 2 / np.sum(shown**2, 1)
    assert np.allclose(alone[0][1].numpy(), share)


def test_edits_that_are_not_learned(small_lm, run):
    base = naive.Module(small_lm)
    known = naive.logits(base.backbone, base.tokenizer, "city", ["name0"]).argmax()
    taught = next(city for i, city in enumerate(naive.CITIES) if i != known and city != "London")

    def freeze(module):
        module.lr = 1e-12

    with pytest.warns(UserWarning, match="none of 1 edits has learned its source answer"):
        _, watch = run(freeze, [{"subject": "name0", "answer": taught}])
    assert watch.results == {"relation": "city->country", "n_learned": 0}


def test_what_cannot_be_moved_is_refused(small_lm, fit, tmp_path):
    with pytest.raises(ConfigError, match="independent edits of the source of city->country"):
        fit(Intervention(), module=naive.Module(small_lm))
    module = naive.OnEdits(small_lm)
    full = EditTraining("full", edits_per_step=1)
    with pytest.raises(ConfigError, match=r"model\.method lora"):
        fit(Intervention(), module=module, data=naive.edits_data(module, n_edits=2, training=full))
    capped = naive.Stacked(str(save_toy_lm(tmp_path / "capped", architecture="gemma2")))
    with pytest.raises(ConfigError, match="scales, caps or shifts"):
        fit(
            Intervention(),
            module=capped,
            data=naive.edits_data(capped, n_edits=2, training=TRAINING),
        )
