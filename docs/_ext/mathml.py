"""Formulas as MathML, which browsers render: a page loads no script of another host."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def _write(self: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    self.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Register the renderer of `html_math_renderer`."""
    app.add_html_math_renderer("mathml", (_write, None), (_write, None))
