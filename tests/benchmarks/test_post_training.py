"""Post-training of an LM and the scores of its maps, against torch and scikit-learn."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import Ridge
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_lms import post_training
from lincorr_lightning.lm import tiny_world
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.probe.resilience import MapResilience
from tests.toys import mean_r

TINY_WORLD = Path(*tiny_world.__path__)

QUESTION, ANSWER = "Where does Paris lie", "Paris lives in the country of France"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"N_HALF": 60, "SEEDS": 2, "LENGTH": 8, "N_HELD_OUT": 3}.items():
        monkeypatch.setattr(post_training, name, value)


def test_questions_are_those_whose_answer_is_right(small_lm: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small_lm)
    prompts = {
        "36_sciq_tf": f"Q: {QUESTION}\nA: {ANSWER}",
        "90_glue_qnli": f"{QUESTION} | {ANSWER}",
        "41_truthqa_tf": f"Q. {QUESTION}\nA. {ANSWER}\nA: no",
    }

    def rows(name: str) -> list[dict[str, str]]:
        return [{"prompt": prompts[name], "target": x} for x in ("0", "1", "correct", "incorrect")]

    found = post_training.texts_of("questions", rows, tokenizer)
    whole = f"Question: {QUESTION}\nAnswer: {ANSWER}"
    assert sorted(found) == [whole, whole, whole + "\nA: no"]
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert f"[user]{QUESTION}[assistant]{ANSWER}" in post_training.texts_of(
        "questions", rows, tokenizer
    )


def test_held_out_loss_and_maps_of_before(tmp_path: Path) -> None:
    """As the LMs are run, in two steps of training on the tiny world."""
    texts = ["Peru lies in Asia", "Rome lives in the city of Lima", "Paris is red"] * 40
    own = tmp_path / "questions"
    post_training.train(TINY_WORLD, texts, own, steps=(1, 2))
    tokenizer = AutoTokenizer.from_pretrained(TINY_WORLD)
    first = [x for t in texts for x in (*tokenizer(t)["input_ids"], tokenizer.eos_token_id)]
    held_out = torch.tensor(first[:24]).reshape(3, 8)
    losses = pd.read_csv(own / "losses.csv", index_col=0).loss
    for step, folder in ((0, TINY_WORLD), (1, own / "1"), (2, own / "2")):
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(held_out).logits
        each = [
            cross_entropy(logits[i][:, :-1].flatten(0, 1), held_out[i][:, 1:].flatten())
            for i in (slice(0, 2), slice(2, 3))
        ]
        assert losses[step] == pytest.approx((sum(each) / 2).item(), rel=1e-4)
    assert losses[2] < losses[1] < losses[0]

    found = []
    for steps, tuned in ((0, None), (2, own / "2")):
        rows = [*post_training.score(TINY_WORLD, tuned, tmp_path)]
        assert len(rows) == 2 * len(post_training.PAIRS)
        about = {"lm": "tiny", "text": "questions" if steps else "nothing", "steps": steps}
        about["training"] = 0
        found += [{**about, "loss_before": losses[0], "loss": losses[2], **row} for row in rows]
    before, now = (torch.load(x / "rows.pt").numpy() for x in (tmp_path, own / "2"))
    layout = MapResilience(pairs=post_training.PAIRS, before=LMConfig()).layout
    x, y = (layout.columns(name).numpy() for name in ("city", "country"))
    fit, test = np.random.default_rng(1).permutation(120).reshape(2, 60)
    for steps, new, refit in ((0, before, np.arange(120, 180)), (2, now, fit)):
        (row,) = (r for r in found if (r["steps"], r["seed"], r["target"]) == (steps, 1, "country"))
        ridge = max(row["ridge"], 1e-9)
        for key, rows, half in (("after", before, fit), ("refitted", new, refit)):
            one = Ridge(alpha=ridge).fit(rows[half][:, x], rows[half][:, y])
            r = mean_r(one.predict(new[test][:, x]), new[test][:, y])
            assert row[key] == pytest.approx(r, abs=1e-3)
    # A second training, with all r of W lower by .1: the mean of both, and Student's t of two.
    other = [{**x, "training": 1, "after": x["after"] - 0.1} for x in found if x["steps"]]
    lines = post_training.table(pd.DataFrame([*found, *other])).splitlines()
    assert len(lines) == 2 + 2 * len(post_training.PAIRS)
    rows = [x for x in found if x["steps"] == 2 and x["target"] == "company"]
    after = [x["after"] - low for x in rows for low in (0, 0.1)]
    shown = "| tiny | questions | 2 | 2 | ceo→company | {:.2f} ({:.2f}–{:.2f}) "
    line = next(
        x for x in lines if x.startswith(shown.format(np.mean(after), min(after), max(after)))
    )
    leads = [x["after"] - x["same_prompt_label_mean"] for x in rows]
    assert line.split("|")[
        8
    ].strip() == f"{100 * np.mean(leads) - 5:.0f} ± {12.706 * 5:.0f}".replace("-", "−")
    drawn = post_training.figure(pd.DataFrame([*found, *other])).axes[0]
    assert [one.get_xdata().tolist() for one in drawn.lines] == [[0, 2]] * 5


def test_another_training_takes_other_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def sequences(texts: list[str], tokenizer: object, n: int) -> list[torch.Tensor]:
        seen.append(list(texts))
        return [torch.ones(1, 8, dtype=torch.long)] * 2

    monkeypatch.setattr(post_training, "sequences", sequences)
    texts = [f"Text {i}" for i in range(20)]
    for order in (0, 1, 1):
        post_training.train(TINY_WORLD, texts, tmp_path / f"{len(seen)}", (1,), order)
    held_out, trained = seen[::2], seen[1::2]
    assert held_out == [texts[:10]] * 3 and trained[0] == texts[10:]
    assert trained[1] == trained[2] != trained[0] and sorted(trained[1]) == sorted(texts[10:])
