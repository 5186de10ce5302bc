"""Inputs that are damaged, senseless or hostile, each made from a valid one by a seed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.faults.runs import PAYLOAD, Case, checkpoints
from tests.faults.studies import QUIET, STUDIES, Work

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

_VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    -0.5,
    10**18,
    -(10**18),
    1e400,
    float("nan"),
    "",
    " ",
    "-",
    "--",
    "two",
    "null",
    "[]",
    "{}",
    "[[[[",
    "a: b: c",
    "*x",
    "!!python/object/apply:os.system [touch payload]",
    "../../..",
    "/dev/null",
    "/",
    "💥",
    "\x07",
    "x" * 3000,
    [],
    {},
    [None],
    {"a": {"b": []}},
    ["city", "city"],
    "city->city",
    "city->",
    "{}{}",
]
# A number of these would be that of processes to start.
_COUNTS = ("devices", "num_nodes")


class _Touch:
    """Makes the file `PAYLOAD` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {PAYLOAD}",)


Maker = Callable[[random.Random, Work, Path], Case]
"""Makes a case from random numbers, the folder of inputs and references, and one to write to."""


def command(study: str, work: Work, *more: str) -> list[str]:
    """Return the command line of a study without checkpoints."""
    made = STUDIES[study]
    options = [option.format(inputs=work.inputs) for option in made.options]
    return [made.verb, "--config", f"{made.config}.yaml", *options, *QUIET, *more]


# -- damage ---------------------------------------------------------------------------------------


def damage_file(path: Path, draw: random.Random) -> tuple[str, bool]:
    """Damage a file; return what was done, and whether nobody can read it any more."""
    content = bytearray(path.read_bytes())
    at = draw.randrange(max(len(content), 1))
    path.unlink()

    def flip() -> None:
        for _ in range(draw.choice([1, 1, 4, 40])):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)

    ways: dict[str, Callable[[], object]] = {
        "flip": flip,
        "noise": lambda: path.write_bytes(content[:at] + draw.randbytes(8) + content[at:]),
        "remove": lambda: None,
        "cut": lambda: path.write_bytes(content[:at]),
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "pickle": lambda: torch.save({"state_dict": _Touch()}, path),
    }
    kind = draw.choice([*ways, "cut", "flip"])
    ways[kind]()
    return f"{path.name}: {kind}", kind not in ("flip", "noise", "remove")


def _damage_tree(path: Path, draw: random.Random) -> str:
    """Replace, remove, rename or nest a random value of a JSON or YAML file."""
    text = path.read_text(encoding="utf-8")
    tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    node, key = draw.choice(list(_nodes_of(tree)))
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
    deep = "[" * 20000 + "]" * 20000
    path.write_text(dump.replace('"DEEP"', deep).replace("DEEP", deep), encoding="utf-8")
    return f"{path.name}: {kind} of {key}" + f" = {str(value)[:60]!r}" * (kind == "value")


def _nodes_of(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each mapping or list of a tree with each of its keys."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _nodes_of(tree[key])


def _damage_text(text: str, draw: random.Random) -> tuple[bytes, str]:
    """Damage a text line by line or byte by byte."""
    lines, whole = text.splitlines(keepends=True), text.encode()
    i, at = draw.randrange(len(lines)), draw.randrange(len(whole))
    head, colon, _ = lines[i].rpartition(":")
    bomb = [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 30)]
    changed = {
        "drop": "",
        "twice": lines[i] * 2,
        "indent": f"  {lines[i]}",
        "value": f"{head}{colon} {draw.choice(_VALUES)}\n",
        "surrogate": lines[i].replace("a", '"\\ud800"', 1),
        "deep": "[" * 20000 + "\n",
        "tag": lines[i].rstrip("\n") + " !!python/object/apply:os.system ['touch payload']\n",
    }
    contents = {
        kind: "".join([*lines[:i], new, *lines[i + 1 :]]).encode() for kind, new in changed.items()
    }
    contents |= {
        "cut": whole[:at],
        "bomb": "".join(["a0: &a0 [x, x]\n", *bomb]).encode(),
        "bytes": whole[:at] + b"\xff\xfe\x80\0" + whole[at:],
    }
    kind = draw.choice(list(contents))
    return contents[kind], f"{kind} at line {i + 1} or byte {at}"


# -- inputs by kind -------------------------------------------------------------------------------


_MORE_OPTIONS = [
    "trainer.strategy",
    "trainer.precision",
    "trainer.limit_train_batches",
    "ckpt_path",
    "trainer.max_steps",
    "trainer.num_nodes",
    "trainer.logger",
    "trainer.profiler",
    "trainer.accelerator",
    "seed_everything",
    "trainer.gradient_clip_val",
]


def _options(draw: random.Random, work: Work, folder: Path) -> Case:
    study = draw.choice(list(STUDIES))
    config = yaml.safe_load((CONFIGS / f"{STUDIES[study].config}.yaml").read_text(encoding="utf-8"))

    def names(node: dict[str, Any], trail: str = "") -> Iterator[str]:
        for key, value in node.items():
            here = trail if key == "init_args" else f"{trail}.{key}"
            if isinstance(value, dict) and value:
                yield from names(value, here)
            elif key not in ("class_path", "callbacks", "default_root_dir"):
                yield here.removeprefix(".")

    name, value = draw.choice([*names(config), *_MORE_OPTIONS]), draw.choice(_VALUES)
    if name.endswith(_COUNTS) and isinstance(value, int) and value > 1:
        value = -1
    spelled = name if draw.random() < 0.9 else name[:-1] + draw.choice("xy_")
    text = json.dumps(value) if isinstance(value, (list, dict)) else str(value)
    text = "null" if value is None else text
    option = [f"--{spelled}={text}"] if draw.random() < 0.8 else [f"--{spelled}", text]
    return Case(command(study, work, *option), f"{study}: {' '.join(option)[:120]}")


def _damage_yaml(path: Path, text: str, draw: random.Random) -> str:
    if draw.random() < 0.65:
        content, what = _damage_text(text, draw)
        path.write_bytes(content)
        return what
    path.write_text(text, encoding="utf-8")
    return _damage_tree(path, draw)


def _config(draw: random.Random, work: Work, folder: Path) -> Case:
    study, path = draw.choice(list(STUDIES)), folder / "mine.yaml"
    text = (CONFIGS / f"{STUDIES[study].config}.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
    what = _damage_yaml(path, "\n".join(lines) + "\n", draw)
    verb, *options = command(study, work)
    return Case([verb, "--config", str(path), *options[2:]], f"{study}: {what}")


KNOWLEDGE = """version: 1
source: me
entities:
  town:
    Paris: {country: France}
    Rome: {country: Italy}
    Oslo: {country: Norway}
knowledge:
  town: {family: attribute, language: en, template: "One day {} saw", answers: town}
"""


def _knowledge(draw: random.Random, work: Work, folder: Path) -> Case:
    path = folder / "mine.yaml"
    what = _damage_yaml(path, KNOWLEDGE, draw)
    more = [f"--model.knowledge_files=[{path}]", "--model.knowledge=[town,country]"]
    return Case(command("linear_probe", work, *more, "--model.require_reference=[]"), what)


def _rows(study: str, option: str, file: str) -> Maker:
    """Return a maker of cases with a damaged file of rows."""

    def make_case(draw: random.Random, work: Work, folder: Path) -> Case:
        content, what = _damage_text((work.inputs / file).read_text(), draw)
        path = folder / file
        path.write_bytes(content)
        return Case(command(study, work, option.format(path)), f"{study}, {what}")

    return make_case


def _checkpoint(draw: random.Random, work: Work, folder: Path) -> Case:
    studies = [name for name, study in STUDIES.items() if study.checkpoint]
    study, other = draw.choice(studies), draw.choice(studies)
    path = folder / "last.ckpt"
    shutil.copy(draw.choice(checkpoints(work.reference(study)[0])), path)
    kind = draw.choice(["damage", "damage", "damage", "key", "other", "lightning"])
    must_fail = False
    if kind == "damage":
        what, must_fail = damage_file(path, draw)
        must_fail = must_fail or "remove" in what
    elif kind == "other":
        shutil.copy(checkpoints(work.reference(other)[0])[0], path)
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
    words = STUDIES[study].command(work.inputs, folder / "runs")
    return Case([*words, f"--ckpt_path={path}"], f"{study}: {what}", must_fail)


def _folder(
    source: Callable[[Work], Path], uses: list[tuple[str, str]], checked: tuple[str, ...]
) -> Maker:
    """Return a maker of cases with a damaged folder.

    `source` returns the valid folder; `uses` are studies that read it, with the option that names
    it. Without files with a suffix in `checked`, no run can be right.
    """

    def make_case(draw: random.Random, work: Work, folder: Path) -> Case:
        copy = folder / "input"
        shutil.copytree(source(work), copy)
        path = draw.choice(sorted(p for p in copy.rglob("*") if p.is_file()))
        must_fail = False
        if path.suffix == ".json" and draw.random() < 0.6:
            what = _damage_tree(path, draw)
        else:
            what, unreadable = damage_file(path, draw)
            must_fail = unreadable and path.suffix in checked
        study, option = draw.choice(uses)
        return Case(command(study, work, option.format(copy)), f"{study}: {what}", must_fail)

    return make_case


def _remote_code(folder: Path) -> str:
    """Make an LM's folder ask for code of its own."""
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"},
    }
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
_damaged_lm = _folder(lambda work: work.inputs / "lm", _LM_USES, (".safetensors",))


def _lm(draw: random.Random, work: Work, folder: Path) -> Case:
    if draw.random() < 0.85:
        return _damaged_lm(draw, work, folder)
    copy = folder / "input"
    shutil.copytree(work.inputs / "lm", copy)
    what = draw.choice([_remote_code, _pickled_lm])(copy)
    study, option = draw.choice(_LM_USES)
    return Case(command(study, work, option.format(copy)), f"{study}: {what}", True)


INPUTS: dict[str, Maker] = {
    "options": _options,
    "config": _config,
    "checkpoint": _checkpoint,
    "lm": _lm,
    "knowledge": _knowledge,
    "edits": _rows("source_finetune", "--data.edits_file={}", "edits.jsonl"),
    "texts": _rows("token_geometry", "--data.texts=[{}]", "texts.txt"),
    "linear map": _folder(
        lambda work: work.reference("correlation_matrix")[0] / "linear_map",
        [("resilience", "--model.linear_map={}")],
        (".safetensors", ".json"),
    ),
    "saes": _folder(
        lambda work: work.inputs / "saes", [("feature_flow", "--model.saes={}")], (".safetensors",)
    ),
    "embedding": _folder(
        lambda work: work.inputs / "lm",
        [("vocabulary_ablation", "--model.lm.name_or_path={}")],
        (".safetensors",),
    ),
}
"""Kinds of input: name -> what makes a case."""
