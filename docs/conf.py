"""Sphinx configuration, for `python -m sphinx -W -b html docs docs/_build`."""

from lincorr_lightning.version import __version__

project = "lincorr-lightning"
version = release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"lincorr-lightning {__version__}"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
# The tutorials run in a temporary folder; a cell that fails ends the build.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 600
# Lightning's log lines and warnings.
nb_output_stderr = "remove"
autodoc_typehints = "description"
autodoc_member_order = "bysource"
# Fields of named tuples stand in their class's docstring and would appear twice.
napoleon_use_ivar = True
default_role = "py:obj"
