"""Modules of matplotlib, which the extra ``plot`` brings, imported when a picture is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

from roundpipe.core.errors import ConfigError


def matplotlib_modules(picture: str, otherwise: str, *names: str) -> list[ModuleType]:
    """The modules below ``matplotlib.``; a `ConfigError` if it is missing says what is drawn, and what needs none."""
    try:
        return [importlib.import_module(f"matplotlib.{name}") for name in names]
    except ImportError as error:
        raise ConfigError(
            f"{picture} as .png needs the package matplotlib: pip install 'roundpipe[plot]'; {otherwise} needs nothing"
        ) from error
