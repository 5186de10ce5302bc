"""Imports point one way: from each module to layers below its own, without cycles."""

from __future__ import annotations

import ast
import importlib
import inspect
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lincorr_lightning"

# From the ground up. A module imports from lower layers and from its own package.
LAYERS = [
    ["version", "errors", "terminal"],
    ["io", "progress", "distributed"],
    ["functional", "lightning_workarounds"],
    ["lm"],
    ["knowledge"],
    ["metrics", "linear_map"],
    ["results"],
    ["study"],
    ["data"],
    ["sae"],
    ["probe", "finetune", "ablation", "geometry", "flow", "pretraining"],
    ["callbacks"],
    ["api"],
    ["cli"],
    ["reproduce"],
    ["__main__"],
]
LAYER = {name: i for i, names in enumerate(LAYERS) for name in names}
STUDIES = ["sae", *LAYERS[LAYERS.index(["sae"]) + 1]]


def _module_name(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "callbacks":
        parts = [PACKAGE, *parts]
    return ".".join(part for part in parts if part != "__init__")


FILES = {
    _module_name(file): file
    for folder in (PACKAGE, "callbacks")
    for file in sorted((ROOT / folder).rglob("*.py"))
}


def _imports(module: str) -> set[str]:
    """Modules of this package that a module imports, in functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in FILES else str(node.module))
    return {name for name in found if name.split(".")[0] == PACKAGE and name != module}


IMPORTS = {module: _imports(module) for module in FILES}
# A package's __init__ only hands out the names of its modules.
EDGES = {
    module: {name for name in names if name in FILES and FILES[name].name != "__init__.py"}
    for module, names in IMPORTS.items()
    if FILES[module].name != "__init__.py"
}


def _part(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _public_classes(module: str) -> list[type]:
    members = vars(importlib.import_module(module)).values()
    classes = [each for each in members if isinstance(each, type) and each.__module__ == module]
    return [each for each in classes if not each.__name__.startswith("_")]


@pytest.mark.parametrize("module", sorted(FILES))
def test_public_methods_have_a_docstring_of_their_own_or_of_what_they_override(module: str) -> None:
    for kind in _public_classes(module):
        for name, member in vars(kind).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                assert inspect.getdoc(getattr(kind, name)), f"{module}.{kind.__name__}.{name}"


def test_every_part_has_a_layer() -> None:
    assert {_part(module) for module in FILES} - {"__init__", "configs"} == set(LAYER)


@pytest.mark.parametrize("module", sorted(FILES))
def test_imports_point_down(module: str) -> None:
    own = _part(module)
    if own in ("__init__", "configs"):
        return
    wrong = sorted(
        name
        for name in IMPORTS[module]
        if _part(name) not in ("__init__", own) and LAYER[_part(name)] >= LAYER[own]
    )
    assert not wrong, f"{module} imports from its own or a higher layer: {wrong}"


def test_no_modules_import_each_other() -> None:
    TopologicalSorter(EDGES).prepare()  # a CycleError names the cycle


def test_callbacks_use_no_lightning_module_of_a_study() -> None:
    studies = {f"{PACKAGE}.{study}.module" for study in STUDIES}
    for module, names in EDGES.items():
        if module.startswith(f"{PACKAGE}.callbacks"):
            assert not names & studies, f"{module} imports {sorted(names & studies)}"


def test_data_import_no_results_and_only_feature_flow_imports_sparse_autoencoders() -> None:
    for module, names in IMPORTS.items():
        parts = {_part(name) for name in names}
        if _part(module) == "data":
            assert "results" not in parts, module
        if _part(module) in set(STUDIES) - {"sae", "flow"}:
            assert "sae" not in parts, module
