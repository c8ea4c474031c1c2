"""Arguments in one normal form, so that ``f(x, mask=m)`` and ``f(x=x, mask=m)`` are one call.

Everything that can be named is a keyword argument under its parameter's name; arguments left at their default (the very
object) are dropped. Positional-only parameters, and all in front of a ``*args`` that is not empty, stay positional.

Invariant: calling the model with the normal form equals calling it with the arguments as given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class CallForm:
    """The signature of one model's forward, which is looked at once."""

    def __init__(self, model: nn.Module) -> None:
        self._signature = _signature_of(model.forward)
        parameters = {} if self._signature is None else self._signature.parameters
        self._defaults = {name: parameter.default for name, parameter in parameters.items()}

    def normalise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments in normal form.

        Raises:
            TypeError: they don't fit the signature, in Python's own words.
        """
        if self._signature is None:
            return tuple(args), dict(kwargs)
        bound = self._signature.bind(*args, **kwargs)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        kinds = {name: self._signature.parameters[name].kind for name in bound.arguments}
        before_variadic = any(
            kinds[name] is inspect.Parameter.VAR_POSITIONAL and value for name, value in bound.arguments.items()
        )
        for name, value in bound.arguments.items():
            kind = kinds[name]
            if kind is inspect.Parameter.VAR_POSITIONAL:
                positional.extend(value)
                before_variadic = False
            elif kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            elif kind is inspect.Parameter.POSITIONAL_ONLY or before_variadic:
                positional.append(value)
            elif value is not self._defaults[name]:
                named[name] = value
        return tuple(positional), named


def _signature_of(forward: Callable[..., Any]) -> inspect.Signature | None:
    """The signature, or None if Python can't tell (compiled and scripted functions)."""
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):
        return None
