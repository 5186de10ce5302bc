"""Sphinx configuration, for `python -m sphinx -W -b html docs docs/_build`."""

import sys
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from generated import MARKER, fill

from lincorr_lightning.version import __version__

project = "lincorr-lightning"
version = release = __version__
extensions = ["mathml", "myst_nb", "sphinx_design", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_math_renderer = "mathml"
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_title = f"lincorr-lightning {__version__}"
html_show_copyright = False
exclude_patterns = ["_build"]
html_extra_path = ["examples"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tutorials have their outputs: benchmarks/docs_tables/notebooks.py
autodoc_typehints = "description"
# Else the fields of a dataclass appear a second time, as parameters without a description.
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
# A hook without a docstring of its own is Lightning's: its documentation has it.
autodoc_inherit_docstrings = False
# Fields of named tuples stand in their class's docstring and would appear twice.
napoleon_use_ivar = True
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    # There is no network for the inventories of other packages.
    (r"py:.*", r"(?!lincorr_lightning\b)[a-z]\w*(\.\w+)+"),
    # The same, by the names under which modules import them for annotations alone.
    (
        r"py:class",
        r"BatchEncoding|DataFrame|DeviceMesh|L\.Trainer|LlamaForCausalLM|MatplotlibFigure|Path|"
        r"PreTrained\w+|Tensor|lincorr_lightning\.io\.ReadKeys",
    ),
    # Aliases of Literal and Mapping, which the docstrings spell out.
    (r"py:class", r"Activation|Block|Candidates|Choice|Entities|Examples|HookKind"),
    (r"py:class", r"MappingName|Pair|(.*\.)?Phase|Ridge|SampleBy|SubjectKind"),
    (r"py:(class|obj)", r"(.*\.)?(AdapterContext|FittedMaps|RowReader)"),
    # What a checkpoint keeps of a callback.
    (r"py:class", r"lincorr_lightning\.callbacks\.\w+\.\w+State"),
    # In backticks, a single word in lower case is the name of an argument or a setting.
    (r"py:obj", r"[a-z]\w*"),
]


def _fill_page(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = fill(source[0])


def _generated_pages(app: Sphinx, env: BuildEnvironment, *changes: object) -> list[str]:
    """Return the pages with generated parts: the code behind them may have changed."""
    return [n for n in env.found_docs if MARKER.search(Path(env.doc2path(n)).read_text("utf-8"))]


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Resolve the bare name of a class or constant that is documented in another module."""
    name = node["reftarget"]
    if node["refdomain"] != "py" or name[0].islower():
        return None
    domain = env.domains.python_domain
    objects = domain.objects.items()
    found = [full for full, one in objects if full.endswith(f".{name}") and not one.aliased]
    if len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, content)


def setup(app: Sphinx) -> None:
    """Connect to Sphinx."""
    app.connect("source-read", _fill_page)
    app.connect("env-get-outdated", _generated_pages)
    app.connect("missing-reference", _resolve)
