"""The documentation's site: `make docs`. Broken links, unknown names and public names without a docstring fail."""

from __future__ import annotations

import argparse
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

import roundpipe
from roundpipe.tools.command_line import COMMANDS

project = "roundpipe"
author = "the authors of roundpipe"
release = roundpipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "roundpipe"
html_copy_source = False
pygments_style = "default"

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# A name in single backticks is a link, and has to be one of the package; what is no name has two.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*")]  # annotations, which name what other packages document

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # a method that only overrides one of torch's is no news
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def without_fields(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Leaves the list of fields, which is for ``help()``, out of a class's text: each has an entry of its own here."""
    if what == "class" and "Fields:" in lines:
        del lines[lines.index("Fields:") :]


class Options(SphinxDirective):
    """All options of a command: ``{options} plan``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        parser = argparse.ArgumentParser(add_help=False)
        COMMANDS[self.arguments[0]].add_options(parser)
        entries = nodes.definition_list()
        for action in parser._actions:
            values = " | ".join(map(str, action.choices)) if action.choices else str(action.metavar or "")
            term = f"{', '.join(action.option_strings)} {values if action.nargs != 0 else ''}".strip()
            text = nodes.paragraph(text=(action.help or "").replace("%%", "%"))
            entries += nodes.definition_list_item(
                "", nodes.term("", "", nodes.literal(text=term)), nodes.definition("", text)
            )
        return [entries]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_directive("options", Options)
    app.connect("autodoc-process-docstring", without_fields, priority=100)
