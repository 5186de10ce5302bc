"""Every study on toy inputs, as a command that takes a second or two."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.toys import NAMES, WORDS, save_toy_lm


@dataclass(frozen=True)
class Work:
    """Folder of inputs; `reference` returns folder and seconds of a study's uninterrupted run."""

    inputs: Path
    reference: Callable[..., tuple[Path, float]]


QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
TWO_PROCESSES = ["--config", "trainer/ddp_cpu.yaml"]


@dataclass(frozen=True)
class Study:
    """A study in small form.

    In `options`, ``{inputs}`` is the folder that `make_inputs` fills; `checkpoint` is the option of
    ModelCheckpoint that says when (None if the study has no use for one), and `processes` are
    options that it needs on two processes (None if it refuses them).
    """

    verb: str
    config: str
    options: tuple[str, ...]
    checkpoint: str | None = None
    processes: tuple[str, ...] | None = ()
    resumes_two: bool = True

    def command(self, inputs: Path, root: Path, two: bool = False) -> list[str]:
        """Return the command line, with checkpoints where the study can be resumed."""
        words = [self.verb, "--config", f"{self.config}.yaml"]
        words += TWO_PROCESSES if two else []
        words += [option.format(inputs=inputs) for option in self.options]
        words += (self.processes or ()) if two else ()
        if self.checkpoint:
            words += [
                "--trainer.enable_checkpointing=true",
                "--trainer.callbacks+=ModelCheckpoint",
                "--trainer.callbacks.filename={step}",
                "--trainer.callbacks.save_top_k=-1",
                f"--trainer.callbacks.{self.checkpoint}",
            ]
        return [*words, *QUIET, f"--trainer.default_root_dir={root}"]


def _steps(n: int) -> str:
    return f"every_n_train_steps={n}"


_LM = "--model.lm.name_or_path={inputs}/lm"
_KNOWLEDGE = "--model.knowledge=[city,country,color]"
_PROBE = (_LM, "--model.knowledge=[city,country]", "--data.n_subjects=160", "--data.batch_size=20")
_EDITS = (
    _LM,
    "--data.n_edits=5",
    "--model.steps_per_edit=3",
    "--trainer.callbacks=[{{class_path: Generalization}},{{class_path: GradientCorrelation}}]",
)
_ABLATION = (
    _LM,
    "--model.mapping=[reference,permuted]",
    "--data.n_paired=40",
    "--data.n_new=13",
    "--data.max_source_labels=null",
    "--model.compose.epochs=5",
    "--model.learn.epochs=9",
    "--model.compose.batch_size=16",
    "--model.learn.batch_size=8",
)
_TEXTS = "--data.texts=[{inputs}/texts.txt]"
_SAES = (
    _LM,
    _TEXTS,
    "--model.sae.n_features=48",
    "--model.sae.k=6",
    "--data.n_tokens=3072",
    "--data.batch_tokens=64",
    "--data.block_steps=4",
    "--data.n_held_out=30",
    "--data.eval_batch_size=7",
)
_WORLD = (
    "--data.world.n_people=31",
    "--data.world.nicknames=false",
    "--data.world.letters=false",
    "--data.world.numbered=false",
    "--data.knowledge=[city,country]",
    "--data.repeats={{}}",
    "--data.batch_size=8",
    "--model.size.hidden_size=32",
    "--model.size.intermediate_size=48",
    "--model.size.n_heads=2",
    "--trainer.max_epochs=3",
    "--model.mixing_epochs=1",
    "--trainer.check_val_every_n_epoch=3",
)

STUDIES = {
    "linear_probe": Study("fit", "linear_probe", (*_PROBE, "--model.ridge=0")),
    "correlation_matrix": Study(
        "fit", "correlation_matrix", (_LM, _KNOWLEDGE, *_PROBE[2:], "--model.ridge=auto")
    ),
    "resilience": Study(
        "test",
        "resilience",
        (
            "--model.before.name_or_path={inputs}/lm",
            "--model.lm.name_or_path={inputs}/tuned",
            _KNOWLEDGE,
            *_PROBE[2:],
        ),
    ),
    "source_finetune": Study(
        "fit", "source_finetune", _EDITS, checkpoint=_steps(4), resumes_two=False
    ),
    "source_finetune_joint": Study(
        "fit",
        "source_finetune",
        (
            *_EDITS[:1],
            "--data.n_edits=11",
            "--model.protocol=joint",
            "--model.edits_per_step=4",
            "--trainer.max_epochs=4",
        ),
        checkpoint=_steps(4),
        processes=("--model.edits_per_step=2",),
    ),
    "source_finetune_lora": Study(
        "fit",
        "source_finetune_lora",
        (*_EDITS, "--data.n_edits=9", "--model.edits_per_step=2"),
        checkpoint=_steps(4),
        resumes_two=False,
    ),
    "forecast": Study("predict", "forecast", (_LM, "--data.n_edits=7")),
    "vocabulary_ablation": Study("fit", "vocabulary_ablation", _ABLATION, checkpoint=_steps(20)),
    "pretraining": Study("fit", "pretraining", _WORLD, checkpoint=_steps(5)),
    "token_geometry": Study(
        "test",
        "token_geometry",
        (
            _LM,
            _TEXTS,
            "--data.n_tokens=16",
            "--data.n_texts=24",
            "--model.shuffles=[0,1,2]",
            "--model.range_scalings=[2]",
            "--model.ks=[3]",
        ),
    ),
    "sparse_autoencoders": Study("fit", "sparse_autoencoders", _SAES, checkpoint=_steps(10)),
    "feature_flow": Study(
        "test",
        "feature_flow",
        (
            _LM,
            _TEXTS,
            "--model.saes={inputs}/saes",
            "--model.n_subjects=100",
            "--data.n_texts=60",
            "--model.deactivation.n_cases=40",
            "--model.steering.n_answers=1",
            "--model.steering.strengths=[0.0,1.0]",
            "--model.steering.n_prompts=8",
            "--model.steering.n_texts=8",
        ),
        processes=None,
    ),
}


def make_inputs(folder: Path, seed: int = 0) -> None:
    """Make the toy LMs and texts that the studies read."""
    save_toy_lm(folder / "lm", seed=seed)
    save_toy_lm(folder / "tuned", seed=seed + 1)
    draw = random.Random(seed)
    lines = [" ".join(draw.choices([*WORDS, *NAMES], k=24)) for _ in range(200)]
    (folder / "texts.txt").write_text("\n".join(lines) + "\n")
    edits = [{"subject": f"name{i}", "answer": ["Paris", "Tokyo"][i % 2]} for i in range(4)]
    (folder / "edits.jsonl").write_text("".join(json.dumps(edit) + "\n" for edit in edits))
