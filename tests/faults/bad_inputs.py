"""Inputs that are damaged, senseless or hostile, each made from a valid one by a seed."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.faults.runs import checkpoints, finished
from tests.faults.studies import QUIET, STUDIES

PAYLOAD = "payload"
"""File that code in an input would make."""
CONFIGS = Path(__file__).resolve().parents[2] / "configs"

_VALUES = [
    None, True, -1, 0, 1.5, -0.5, 10**18, -(10**18), 1e400, float("nan"), "", " ", "-", "--", "two",
    "null", "[]", "{}", "[[[[", "a: b: c", "*x", "!!python/object/apply:os.system [touch payload]",
    "../../..", "/dev/null", "/", "💥", "\x07", "x" * 3000, [], {}, [None], {"a": {"b": []}},
    ["city", "city"], "city->city", "city->", "{}{}",
]  # fmt: skip
# A number of these would be that of processes to start.
_COUNTS = ("devices", "num_nodes")


class _Touch:
    """Makes the file `PAYLOAD` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {PAYLOAD}",)


@dataclass(frozen=True)
class Case:
    """A command line with a bad input.

    Attributes:
        command: The arguments.
        what: What is bad about it.
        must_fail: Whether no run can be right with it.
    """

    command: list[str]
    what: str
    must_fail: bool = False


def make(name: str, draw: random.Random, work: Path, folder: Path) -> Case:
    """Make a bad input.

    Args:
        name: Key of `INPUTS`.
        draw: Random numbers.
        work: Folder with ``inputs`` and ``references``, the uninterrupted runs.
        folder: Folder to write to; runs start in it.
    """
    return INPUTS[name](draw, work, folder)


def _command(study: str, work: Path, *more: str) -> list[str]:
    made = STUDIES[study]
    words = [made.verb, "--config", f"{made.config}.yaml"]
    options = [option.format(inputs=work / "inputs") for option in made.options]
    return [*words, *options, *QUIET, *more]


# -- damage ---------------------------------------------------------------------------------------


def damage_file(path: Path, draw: random.Random) -> tuple[str, bool]:
    """Damage a file; return what was done, and whether nobody can read it any more."""
    content = path.read_bytes()
    kind = draw.choice(
        ["cut", "cut", "empty", "flip", "flip", "noise", "repeat", "remove", "folder", "fifo",
         "pickle", "text", "loop"]
    )  # fmt: skip
    at = draw.randrange(max(len(content), 1))
    path.unlink()
    if kind == "cut":
        path.write_bytes(content[:at])
    elif kind == "empty":
        path.touch()
    elif kind == "flip":
        changed = bytearray(content)
        for _ in range(draw.choice([1, 1, 4, 40])):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
    elif kind == "noise":
        path.write_bytes(content[:at] + draw.randbytes(draw.choice([1, 8, 200])) + content[at:])
    elif kind == "repeat":
        path.write_bytes(content[:at] + content[max(at - 50, 0) :])
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "pickle":
        if draw.random() < 0.5:
            torch.save({"state_dict": _Touch()}, path)
        else:
            path.write_bytes(pickle.dumps(_Touch()))
    elif kind == "text":
        path.write_text("Not found\n")
    elif kind == "loop":
        path.symlink_to(path.name)
    unreadable = kind not in ("flip", "noise", "repeat", "remove")
    return f"{path.name}: {kind}", unreadable


def _damage_json(path: Path, draw: random.Random) -> str:
    """Replace, remove, rename or nest a random value of a JSON or YAML file."""
    text = path.read_text(encoding="utf-8")
    tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    nodes: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            nodes.append((node, key))
            if isinstance(node[key], (dict, list)):
                collect(node[key])

    collect(tree)
    node, key = draw.choice(nodes)
    kind = draw.choice(["value", "value", "value", "remove", "rename", "deep"])
    value = draw.choice(_VALUES)
    if kind == "value":
        node[key] = value
    elif kind == "remove" or isinstance(node, list):
        del node[key]
    elif kind == "rename":
        node[f"{key}x"] = node.pop(key)
    else:
        node[key] = "DEEP"
    dump = json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree, allow_unicode=True)
    path.write_text(
        dump.replace('"DEEP"', "DEEP").replace("DEEP", "[" * 20000 + "]" * 20000), encoding="utf-8"
    )
    return f"{path.name}: {kind} of {key}" + f" = {str(value)[:60]!r}" * (kind == "value")


def _damage_lines(text: str, draw: random.Random) -> tuple[bytes, str]:
    """Damage a text line by line or byte by byte."""
    lines = text.splitlines(keepends=True)
    i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.choice(
        ["drop", "twice", "swap", "indent", "value", "cut", "bytes", "nul", "surrogate", "bom",
         "deep", "bomb", "long", "empty", "tag"]
    )  # fmt: skip
    if kind == "drop":
        del lines[i]
    elif kind == "twice":
        lines.insert(j, lines[i])
    elif kind == "swap":
        lines[i], lines[j] = lines[j], lines[i]
    elif kind == "indent":
        lines[i] = " " * draw.randint(1, 3) + lines[i]
    elif kind == "value":
        head, colon, _ = lines[i].rpartition(":")
        lines[i] = f"{head}{colon} {draw.choice(_VALUES)}\n"
    elif kind == "cut":
        whole = "".join(lines)
        lines = [whole[: draw.randrange(len(whole))]]
    elif kind == "surrogate":
        lines[i] = lines[i].replace("a", '"\\ud800"', 1)
    elif kind == "bom":
        lines.insert(i, "\ufeff")
    elif kind == "deep":
        lines[i] = "[" * 20000 + "\n"
    elif kind == "bomb":
        lines = ["a0: &a0 [x, x]\n"]
        lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 30)]
    elif kind == "long":
        lines[i] = lines[i].rstrip("\n") + "x" * 3_000_000 + "\n"
    elif kind == "empty":
        lines = []
    elif kind == "tag":
        lines[i] = lines[i].rstrip("\n") + " !!python/object/apply:os.system ['touch payload']\n"
    content = "".join(lines).encode("utf-8")
    at = draw.randrange(len(content) + 1)
    if kind == "bytes":
        content = content[:at] + b"\xff\xfe\x80" + content[at:]
    elif kind == "nul":
        content = content[:at] + b"\0" + content[at:]
    return content, f"{kind} at line {i + 1}"


# -- inputs by kind -------------------------------------------------------------------------------


def _options(draw: random.Random, work: Path, folder: Path) -> Case:
    study = draw.choice(list(STUDIES))
    config = yaml.safe_load((CONFIGS / f"{STUDIES[study].config}.yaml").read_text(encoding="utf-8"))
    names = []

    def collect(node: dict[str, Any], trail: tuple[str, ...]) -> None:
        for key, value in node.items():
            here = trail if key == "init_args" else (*trail, key)
            if isinstance(value, dict) and value:
                collect(value, here)
            elif key not in ("class_path", "callbacks", "default_root_dir"):
                names.append(".".join(here))

    collect(config, ())
    names += ["trainer.strategy", "trainer.precision", "trainer.limit_train_batches", "ckpt_path",
              "trainer.max_steps", "trainer.num_nodes", "trainer.logger", "trainer.profiler",
              "trainer.accelerator", "seed_everything", "trainer.gradient_clip_val"]  # fmt: skip
    name, value = draw.choice(names), draw.choice(_VALUES)
    if name.endswith(_COUNTS) and isinstance(value, int) and value > 1:
        value = -1
    spelled = name if draw.random() < 0.9 else name[:-1] + draw.choice("xy_")
    text = json.dumps(value) if isinstance(value, (list, dict)) else str(value)
    if value is None:
        text = "null"
    option = [f"--{spelled}={text}"] if draw.random() < 0.8 else [f"--{spelled}", text]
    return Case(_command(study, work, *option), f"{study}: {' '.join(option)[:120]}")


def _config(draw: random.Random, work: Path, folder: Path) -> Case:
    study = draw.choice(list(STUDIES))
    text = (CONFIGS / f"{STUDIES[study].config}.yaml").read_text(encoding="utf-8")
    path = folder / "mine.yaml"
    if draw.random() < 0.7:
        lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
        content, what = _damage_lines("\n".join(filter(str.strip, lines)) + "\n", draw)
        path.write_bytes(content)
    else:
        path.write_text(text, encoding="utf-8")
        what = _damage_json(path, draw)
    command = _command(study, work)
    return Case([command[0], "--config", str(path), *command[3:]], f"{study}: {what}")


_KNOWLEDGE = """version: 1
source: me
entities:
  town:
    Paris: {country: France}
    Rome: {country: Italy}
    Oslo: {country: Norway}
knowledge:
  town: {family: attribute, language: en, template: "One day {} saw", answers: town}
"""


def _knowledge(draw: random.Random, work: Path, folder: Path) -> Case:
    content, what = _damage_lines(_KNOWLEDGE, draw)
    path = folder / "mine.yaml"
    path.write_bytes(content)
    if draw.random() < 0.4:
        path.write_text(_KNOWLEDGE)
        what = _damage_json(path, draw)
    more = [f"--model.knowledge_files=[{path}]", "--model.knowledge=[town,country]"]
    return Case(_command("linear_probe", work, *more, "--model.require_reference=[]"), what)


def _rows(study: str, option: str, file: str, text: Callable[[Path], str]) -> Callable[..., Case]:
    """Return a maker of cases with a damaged file of rows."""

    def make_case(draw: random.Random, work: Path, folder: Path) -> Case:
        content, what = _damage_lines(text(work / "inputs"), draw)
        path = folder / file
        path.write_bytes(content)
        unreadable = False
        if draw.random() < 0.2:
            what, unreadable = damage_file(path, draw)
        return Case(_command(study, work, option.format(path)), f"{study}, {what}", unreadable and
                    not path.is_file())  # fmt: skip

    return make_case


def _edits(inputs: Path) -> str:
    return (inputs / "edits.jsonl").read_text()


def _paired(inputs: Path) -> str:
    del inputs
    rows = [{"phase": ["compose", "learn"][i % 2], "subject": f"name{i}", "source":
             ["Paris", "Tokyo", "Oslo"][i % 3]} for i in range(12)]  # fmt: skip
    return "".join(json.dumps(row) + "\n" for row in rows)


def _checkpoint(draw: random.Random, work: Path, folder: Path) -> Case:
    studies = [name for name, study in STUDIES.items() if study.checkpoint]
    study, other = draw.choice(studies), draw.choice(studies)
    path = folder / "last.ckpt"
    kept = checkpoints(work / "references" / study)
    shutil.copy(draw.choice(kept), path)
    kind = draw.choice(["damage", "damage", "damage", "key", "other", "lightning"])
    must_fail = False
    if kind == "damage":
        what, must_fail = damage_file(path, draw)
        must_fail = must_fail or "remove" in what
    elif kind == "other":
        shutil.copy(checkpoints(work / "references" / other)[0], path)
        what = f"of {other}"
        must_fail = STUDIES[other].config.split("_")[0] != STUDIES[study].config.split("_")[0]
    else:
        content = torch.load(path, weights_only=True)
        key = draw.choice(list(content)) if kind == "key" else "state_dict"
        if draw.random() < 0.5:
            content.pop(key)
            what = f"without {key}"
        else:
            content[key] = value = draw.choice(_VALUES)
            what = f"{key} = {str(value)[:60]!r}"
        must_fail = key == "state_dict" and study not in ("linear_probe",)
        torch.save(content, path)
    command = STUDIES[study].command(work / "inputs", folder / "runs")
    return Case([*command, f"--ckpt_path={path}"], f"{study}: {what}", must_fail)


def _folder(
    source: Callable[[Path], Path], uses: list[tuple[str, str]], suffixes: tuple[str, ...] = (),
    checked: tuple[str, ...] = (),
) -> Callable[..., Case]:  # fmt: skip
    """Return a maker of cases with a damaged folder.

    Args:
        source: Returns the valid folder.
        uses: Studies that read it, and the option that names it.
        suffixes: Suffixes of the files to damage; empty for all.
        checked: Suffixes of files without which, or with other content, no run can be right.
    """

    def make_case(draw: random.Random, work: Path, folder: Path) -> Case:
        copy = folder / "input"
        shutil.copytree(source(work), copy)
        found = sorted(p for p in copy.rglob("*") if p.is_file())
        path = draw.choice([p for p in found if not suffixes or p.suffix in suffixes])
        must_fail = False
        if path.suffix == ".json" and draw.random() < 0.6:
            what = _damage_json(path, draw)
        else:
            what, unreadable = damage_file(path, draw)
            must_fail = unreadable and path.suffix in checked
        study, option = draw.choice(uses)
        return Case(_command(study, work, option.format(copy)), f"{study}: {what}", must_fail)

    return make_case


def _remote_code(folder: Path) -> str:
    """Make an LM's folder ask for code of its own."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM":
               "mine.M"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("import os; os.system('touch payload')\n")
    return "code of its own"


def _pickled_lm(folder: Path) -> str:
    """Replace an LM's weights by a pickle that runs code."""
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": _Touch()}, folder / "pytorch_model.bin")
    return "a pickle that runs code"


_LM_USES = [
    ("linear_probe", "--model.lm.name_or_path={}"),
    ("token_geometry", "--model.lm.name_or_path={}"),
    ("forecast", "--model.lm.name_or_path={}"),
    ("resilience", "--model.before.name_or_path={}"),
]
_damaged_lm = _folder(lambda work: work / "inputs" / "lm", _LM_USES, checked=(".safetensors",))


def _lm(draw: random.Random, work: Path, folder: Path) -> Case:
    if draw.random() < 0.85:
        return _damaged_lm(draw, work, folder)
    copy = folder / "input"
    shutil.copytree(work / "inputs" / "lm", copy)
    what = draw.choice([_remote_code, _pickled_lm])(copy)
    study, option = draw.choice(_LM_USES)
    return Case(_command(study, work, option.format(copy)), f"{study}: {what}", True)


_MAPS = [("resilience", "--model.linear_map={}"), ("forecast", "--model.linear_map={}")]
_SAES = [("feature_flow", "--model.saes={}")]
_EMBEDDINGS = [("vocabulary_ablation", "--model.lm.name_or_path={}")]
_SUBJECTS = "".join(f"name{i}\n" for i in range(90))

INPUTS: dict[str, Callable[[random.Random, Path, Path], Case]] = {
    "options": _options,
    "config": _config,
    "checkpoint": _checkpoint,
    "lm": _lm,
    "knowledge": _knowledge,
    "edits": _rows("source_finetune", "--data.edits_file={}", "edits.jsonl", _edits),
    "paired texts": _rows("vocabulary_ablation", "--data.texts_file={}", "texts.jsonl", _paired),
    "texts": _rows("token_geometry", "--data.texts=[{}]", "texts.txt",
                   lambda inputs: (inputs / "texts.txt").read_text()),
    "subjects": _rows("linear_probe", "--data.subjects_file={}", "subjects.txt",
                      lambda inputs: _SUBJECTS),
    "linear map": _folder(
        lambda work: finished(work / "references" / "correlation_matrix") / "linear_map", _MAPS,
        checked=(".safetensors", ".json"),
    ),
    "saes": _folder(lambda work: work / "inputs" / "saes", _SAES, checked=(".safetensors",)),
    "embedding": _folder(lambda work: work / "inputs" / "lm", _EMBEDDINGS, (".safetensors",),
                         checked=(".safetensors",)),
}  # fmt: skip
"""Kinds of input: name -> what makes a case."""
