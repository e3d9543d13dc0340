"""Sphinx's settings: `make docs` builds what is in this folder, and a warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "_ext"))

from gridtrain import __version__

project = "gridtrain"
author = "the gridtrain authors"
copyright = "the gridtrain authors, Apache-2.0"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "repository"]
exclude_patterns = ["_build", "_ext", "decisions"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
highlight_language = "none"  # a block that does not name its language is a terminal's, or a drawing
suppress_warnings = [
    "myst.header",  # a decision's sections follow its title as h2, whatever includes it
    "misc.highlighting_failure",  # json and toml blocks with an ellipsis
]

default_role = "code"  # docstrings say `name`
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"gridtrain {__version__}"
html_copy_source = False
html_show_sphinx = False
