"""The documentation's site: `make docs`. Broken links, unknown names and public names without a docstring fail."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import roundpipe
from roundpipe.tools.command_line import COMMANDS

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.documents import names_missing_in_reference, undocumented_names

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


def with_fields(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Leaves the list of fields, which is for ``help()``, out of a class's text: each has an entry of its own here.
    Fields whose text is that of a command line's option have none, so theirs is added.
    """
    if what == "class" and "Fields:" in lines:
        del lines[lines.index("Fields:") :]
    if what == "class" and dataclasses.is_dataclass(thing):
        helps = {field.name: field.metadata["help"] for field in dataclasses.fields(thing) if "help" in field.metadata}
        lines += [*(["", "Args:"] if helps else []), *(f"    {name}: {text}" for name, text in helps.items())]


class FieldTexts:
    """Texts of fields as they stand: napoleon takes what is before a colon in their first line for a type."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def keep(self, app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
        if what in ("attribute", "property"):
            self._lines[name] = list(lines)

    def restore(self, app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
        if name in self._lines:
            lines[:] = self._lines.pop(name)


def check_public_names(app: Any) -> None:
    """Sphinx leaves out in silence what has no docstring, and does not know what is public."""
    for name in undocumented_names():
        logging.getLogger(__name__).warning("roundpipe.%s has no docstring", name)
    for name in sorted(names_missing_in_reference()):
        logging.getLogger(__name__).warning("roundpipe.%s is public and not in api.md", name)


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
    app.connect("builder-inited", check_public_names)
    app.connect("autodoc-process-docstring", with_fields, priority=100)
    texts = FieldTexts()
    app.connect("autodoc-process-docstring", texts.keep, priority=100)
    app.connect("autodoc-process-docstring", texts.restore, priority=900)
