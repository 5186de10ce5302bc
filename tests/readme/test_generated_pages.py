"""Parts of the documentation that are made from the code."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.test_architecture import IMPORTS, LAYERS, _part

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    """The module that Sphinx imports from docs/_ext."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs" / "_ext"))
        return importlib.import_module("generated")


def test_every_marker_has_a_part(generated: ModuleType) -> None:
    text = "\n".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert set(re.findall(r"<!-- generated: (\w+) -->", text)) == set(generated.PARTS)
    assert "<!--" not in generated.fill("<!-- generated: parts -->")


def test_every_config_has_its_command_and_all_of_its_options(generated: ModuleType) -> None:
    page = generated.studies()
    assert re.findall(r"^### (.*)$", page, re.MULTILINE) == [path.stem for path in STUDIES]
    for path, section in zip(STUDIES, page.split("\n### "), strict=True):
        text = path.read_text("utf-8")
        assert re.search(rf"```bash\nlincorr \w+ --config configs/{path.name}\n", section)
        (first,) = map(int, re.findall(r"^:lines: (\d+)-$", section, re.MULTILINE))
        shown = "\n".join(text.splitlines()[first - 1 :])
        assert shown.startswith("#")  # the comment of the first key
        assert yaml.safe_load(shown) == yaml.safe_load(text)
        assert section.count("```") % 2 == 0


def test_layers_and_imports_are_those_of_the_architecture_test(generated: ModuleType) -> None:
    assert generated.layers() == LAYERS
    for part in (name for row in LAYERS for name in row):
        edges = {_part(m) for own, names in IMPORTS.items() if _part(own) == part for m in names}
        assert generated.imports(part) == edges - {"__init__", part}


def test_the_figure_has_every_part_below_those_that_import_it(generated: ModuleType) -> None:
    figure = generated.layer_figure()
    shown = re.findall(r'<text [^>]*y="(\d+)">(\w+)</text>', figure)
    height = {name: int(y) for y, name in shown}
    assert set(height) == {name for row in LAYERS for name in row}
    for part in height:
        assert all(height[name] > height[part] for name in generated.imports(part))
