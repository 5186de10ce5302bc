"""Every study on toy inputs, as a command that takes a second or two."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.toys import NAMES, WORDS, save_toy_lm

QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
# Keys of results.json that depend on how a run was made, or on its folder.
_OF_A_FOLDER = {"seconds", "settings", "versions", "name_or_path", "model"}


@dataclass(frozen=True)
class SmallRun:
    """A study in small form; in its options, ``{inputs}`` is the folder of `make_inputs`.

    A study that trains can be resumed at the checkpoints `resumes`: those after a step (``s3``),
    after a validation (``v0``) and at the end of an epoch (``e0``); the nightly lane resumes at all
    of them, the others at the first. With the option `changed` it cannot be resumed, since that
    changes its numbers.
    """

    verb: str
    config: str
    options: str
    resumes: tuple[str, ...] = ()
    changed: str = ""

    def command(self, inputs: Path, root: Path, *more: str) -> list[str]:
        """Return the command line of a run below `root`."""
        options = [option.replace("{inputs}", str(inputs)) for option in self.options.split()]
        folder = f"--trainer.default_root_dir={root}"
        return [self.verb, "--config", f"{self.config}.yaml", *options, *QUIET, folder, *more]


_LM = "--model.lm.name_or_path={inputs}/lm"
_TUNED = "--model.before.name_or_path={inputs}/lm --model.lm.name_or_path={inputs}/tuned"
_PROBE = "--model.knowledge=[city,country] --data.n_subjects=160 --data.batch_size=20"
_EDITS = f"{_LM} --model.learning_rate=0.01 --model.steps_per_edit=3 --data.n_edits=5"
_JOINT = f"{_EDITS} --model.protocol=joint --model.edits_per_step=2 --trainer.max_epochs=2"
_TEXTS = "--data.texts=[{inputs}/texts.txt]"
# Steps 1 to 8 are of the phase uncomposed, 9 to 23 of compose, 24 to 31 of learn.
_ABLATION = (
    "--model.mapping=[reference,permuted] --data.n_paired=40 --data.n_new=12 "
    "--data.max_source_labels=null --model.compose.epochs=3 --model.score_every=2 "
    "--model.compose.batch_size=16 --model.learn.epochs=4 --model.learn.batch_size=8 "
    "--model.learn.train=all"
)
_WORLD = (
    "--data.n_people=24 --data.second_home_repeats=0 "
    "--data.knowledge=[city,country,color] --data.repeats={} --data.batch_size=32 "
    "--model.size.hidden_size=32 --model.size.intermediate_size=48 --model.size.n_heads=2 "
    "--trainer.max_epochs=2 --trainer.check_val_every_n_epoch=1"
)
_GEOMETRY = (
    "--data.n_tokens=16 --data.n_texts=24 --model.shuffles=[0,1,2] --model.range_scalings=[2] "
    "--model.ks=[3]"
)
# Blocks of four steps.
_SAES = (
    "--data.n_tokens=384 --data.batch_tokens=32 --data.block_steps=4 --data.n_held_out=20 "
    "--model.sae.n_features=32 --model.sae.k=4 --model.sae.dead_after_steps=5"
)
_FLOW = (
    "--model.saes={inputs}/saes --model.n_subjects=100 --data.n_texts=60 "
    "--model.deactivation.n_cases=40 --model.steering.n_answers=1 "
    "--model.steering.strengths=[0.0,1.0] --model.steering.n_prompts=8 --model.steering.n_texts=8"
)
_EDITED = "--data.edits_file={inputs}/edits.jsonl --model.n_others=5 --model.n_subjects=60"

SMALL_RUNS = {
    "probe": SmallRun("fit", "linear_probe", f"{_LM} {_PROBE}"),
    "all pairs": SmallRun("fit", "correlation_matrix", f"{_LM} {_PROBE}"),
    "resilience": SmallRun("test", "resilience", f"{_TUNED} {_PROBE}"),
    "full, independent": SmallRun(
        "fit", "source_finetune", _EDITS, ("s4", "s6"), "model.learning_rate=0.02"
    ),
    "full, joint": SmallRun(
        "fit", "source_finetune", _JOINT, ("s2", "s3", "e0"), "trainer.gradient_clip_val=0.5"
    ),
    "LoRA, independent": SmallRun(
        "fit",
        "source_finetune_lora",
        f"{_EDITS} --model.edits_per_step=2",
        ("s2", "s3", "e0"),
        "data.seed=1",
    ),
    "LoRA, joint": SmallRun("fit", "source_finetune_lora", _JOINT, ("s3", "e0"), "data.n_edits=4"),
    "causal": SmallRun(
        "fit",
        "causal",
        f"{_EDITS} --model.edits_per_step=2 --model.learning_rate=0.1",
        ("s2", "e0"),
        "seed_everything=7",
    ),
    "edited LM": SmallRun("test", "edited_lm", f"{_TUNED} {_EDITED}"),
    "forecast": SmallRun("predict", "forecast", f"{_LM} --data.n_edits=7"),
    "ablation": SmallRun(
        "fit",
        "vocabulary_ablation",
        f"{_LM} {_ABLATION}",
        ("s4", "s23", "s26", "e0"),
        "model.learn.epochs=5",
    ),
    "pretraining": SmallRun(
        "fit", "pretraining", _WORLD, ("s3", "s2", "v1", "e0"), "model.learning_rate=0.001"
    ),
    "token geometry": SmallRun("test", "token_geometry", f"{_LM} {_TEXTS} {_GEOMETRY}"),
    "SAEs": SmallRun(
        "fit",
        "sparse_autoencoders",
        f"{_LM} {_TEXTS} {_SAES}",
        ("s3", "s4", "v0", "e0"),
        "data.n_tokens=320",
    ),
    "feature flow": SmallRun("test", "feature_flow", f"{_LM} {_TEXTS} {_FLOW}"),
}
"""Small runs by study; feature flow needs the SAEs that `SAEs` writes, in the inputs' folder."""

RESUMED = [study for study, run in SMALL_RUNS.items() if run.resumes]


def make_inputs(folder: Path) -> None:
    """Make the toy LMs, texts and edits that the studies read."""
    for seed, name in enumerate(("lm", "tuned")):
        save_toy_lm(folder / name, seed=seed)
    draw = random.Random(0)
    lines = [" ".join(draw.choices([*WORDS, *NAMES], k=24)) for _ in range(200)]
    (folder / "texts.txt").write_text("\n".join(lines) + "\n")
    edits = [{"subject": f"name{i}", "answer": ["Paris", "Tokyo"][i % 2]} for i in range(4)]
    (folder / "edits.jsonl").write_text("".join(json.dumps(edit) + "\n" for edit in edits))


def numbers(run: Path) -> tuple[Any, dict[str, str]]:
    """Return results and tables of a finished run, without what differs between equal runs."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    tables = {path.name: path.read_text() for path in sorted(run.glob("tables/*.csv"))}
    return _comparable(results), tables


def results_of(root: Path) -> Any:
    """Return the results of the only run below a folder, as `numbers` does."""
    (path,) = root.rglob("results.json")
    return numbers(path.parent)[0]


def _comparable(results: Any) -> Any:
    if not isinstance(results, dict):
        return results
    return {key: _comparable(x) for key, x in results.items() if key not in _OF_A_FOLDER}


def keeping(folder: Path) -> list[str]:
    """Return options that keep a checkpoint of every step, validation and epoch in a folder."""
    kinds = {
        "s{step}": ["every_n_train_steps=1"],
        "e{epoch}": ["every_n_epochs=1", "save_on_train_epoch_end=true"],
        # With another mode, because Lightning takes no two of the same settings.
        "v{epoch}": ["every_n_epochs=1", "save_on_train_epoch_end=false", "mode=max"],
    }
    options = ["--trainer.enable_checkpointing=true"]
    for name, when in kinds.items():
        settings = [f"filename={name}", f"dirpath={folder}", "auto_insert_metric_name=false"]
        options.append("--trainer.callbacks+=ModelCheckpoint")
        options += [f"--trainer.callbacks.{x}" for x in (*settings, "save_top_k=-1", *when)]
    return options
