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

from tests.faults.runs import PAYLOAD, Case, Work
from tests.small_runs import RESUMED, SMALL_RUNS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

_VALUES = [
    None,
    True,
    -1,
    0,
    1.5,
    10**18,
    1e400,
    float("nan"),
    "",
    "--",
    "two",
    "null",
    "[[[[",
    "a: b: c",
    "*x",
    "!!python/object/apply:os.system [touch payload]",
    "../../..",
    "/dev/null",
    "💥",
    "\x07",
    "x" * 3000,
    [],
    {},
    [None],
    {"a": {"b": []}},
    ["city", "city"],
    "city->city",
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
    """Return the command line of a study, without its folder."""
    *words, _ = SMALL_RUNS[study].command(work.inputs, Path())
    return [*words, *more]


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
    """Replace, remove or rename a random value of a JSON or YAML file."""
    text = path.read_text(encoding="utf-8")
    tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    node, key = draw.choice(list(_nodes_of(tree)))
    kind = draw.choice(["value", "value", "value", "remove", "rename"])
    value = draw.choice(_VALUES)
    if kind == "value":
        node[key] = value
    elif kind == "remove" or isinstance(node, list):
        del node[key]
    else:
        node[f"{key}x"] = node.pop(key)
    dump = json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree, allow_unicode=True)
    path.write_text(dump, encoding="utf-8")
    return f"{path.name}: {kind} of {key}, {str(value)[:60]!r}"


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


def _damage_yaml(path: Path, text: str, draw: random.Random) -> str:
    if draw.random() < 0.65:
        content, what = _damage_text(text, draw)
        path.write_bytes(content)
        return what
    path.write_text(text, encoding="utf-8")
    return _damage_tree(path, draw)


# -- inputs by kind -------------------------------------------------------------------------------


def _options(draw: random.Random, work: Work, folder: Path) -> Case:
    study = draw.choice(list(SMALL_RUNS))
    path = CONFIGS / f"{SMALL_RUNS[study].config}.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))

    def names(node: dict[str, Any], trail: str = "") -> Iterator[str]:
        for key, value in node.items():
            here = trail if key == "init_args" else f"{trail}.{key}"
            if isinstance(value, dict) and value:
                yield from names(value, here)
            elif key not in ("class_path", "callbacks", "default_root_dir"):
                yield here.removeprefix(".")

    name, value = draw.choice(list(names(config))), draw.choice(_VALUES)
    if name.endswith(_COUNTS) and isinstance(value, int) and value > 1:
        value = -1
    spelled = name if draw.random() < 0.9 else name[:-1] + draw.choice("xy_")
    text = json.dumps(value) if isinstance(value, (list, dict)) else str(value)
    option = f"--{spelled}={'null' if value is None else text}"
    return Case(command(study, work, option), f"{study}: {option[:120]}")


def _config(draw: random.Random, work: Work, folder: Path) -> Case:
    study, path = draw.choice(list(SMALL_RUNS)), folder / "mine.yaml"
    text = (CONFIGS / f"{SMALL_RUNS[study].config}.yaml").read_text(encoding="utf-8")
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
    return Case(command("probe", work, *more, "--model.require_reference=[]"), what)


def _checkpoint(draw: random.Random, work: Work, folder: Path) -> Case:
    study, path = draw.choice(RESUMED), folder / "last.ckpt"
    shutil.copy(draw.choice(work.checkpoints(study)), path)
    if draw.random() < 0.7:
        what, must_fail = damage_file(path, draw)
        must_fail = must_fail or "remove" in what
    else:
        content = torch.load(path, weights_only=True)
        key = draw.choice(list(content))
        content[key] = value = draw.choice(_VALUES)
        what, must_fail = f"{key} = {str(value)[:60]!r}", key == "state_dict"
        torch.save(content, path)
    return Case(command(study, work, f"--ckpt_path={path}"), f"{study}: {what}", must_fail)


def _folder(source: Callable[[Work], Path], *uses: tuple[str, str]) -> Maker:
    """Return a maker of cases with a damaged folder.

    `source` returns the valid folder; `uses` are studies that read it, with the option that names
    it. Without its tensors, no run can be right.
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
            must_fail = unreadable and path.suffix == ".safetensors"
        study, option = draw.choice(uses)
        return Case(command(study, work, option.format(copy)), f"{study}: {what}", must_fail)

    return make_case


_NAME = "--model.lm.name_or_path={}"

INPUTS: dict[str, Maker] = {
    "options": _options,
    "config": _config,
    "checkpoint": _checkpoint,
    "lm": _folder(
        lambda work: work.inputs / "lm",
        ("probe", _NAME),
        ("token geometry", _NAME),
        ("ablation", _NAME),
        ("forecast", _NAME),
    ),
    "knowledge": _knowledge,
    "linear map": _folder(
        lambda work: work.reference("all pairs") / "linear_map",
        ("resilience", "--model.linear_map={}"),
    ),
    "saes": _folder(lambda work: work.inputs / "saes", ("feature flow", "--model.saes={}")),
}
"""Kinds of input: name -> what makes a case."""
