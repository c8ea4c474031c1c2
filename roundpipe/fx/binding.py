"""Arguments in one normal form, so that ``f(x, mask=m)`` and ``f(x=x, mask=m)`` are one call.

Everything that can be named is a keyword argument under its parameter's name; arguments left at their default (the very
object) are dropped. Positional-only parameters, and all in front of a ``*args`` that is not empty, stay positional.

Invariant: calling the model with the normal form equals calling it with the arguments as given.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class CallForm:
    """The signature of one model's forward, which is looked at once."""

    def __init__(self, model: nn.Module) -> None:
        self._signature: inspect.Signature | None = None
        with suppress(TypeError, ValueError):  # Python can't tell that of compiled and scripted functions
            self._signature = inspect.signature(model.forward)

    def normalise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments in normal form.

        Raises:
            TypeError: they don't fit the signature, in Python's own words.
        """
        if self._signature is None:
            return tuple(args), dict(kwargs)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        given = [
            (self._signature.parameters[name], value)
            for name, value in self._signature.bind(*args, **kwargs).arguments.items()
        ]
        before_variadic = any(
            parameter.kind is inspect.Parameter.VAR_POSITIONAL and value for parameter, value in given
        )
        for parameter, value in given:
            kind = parameter.kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                positional.extend(value)
                before_variadic = False
            elif kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            elif kind is inspect.Parameter.POSITIONAL_ONLY or before_variadic:
                positional.append(value)
            elif value is not parameter.default:
                named[parameter.name] = value
        return tuple(positional), named
