"""Where an option belongs: what is given one that it does not have names the one that was meant, or its place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from roundpipe.core.caller import warn
from roundpipe.core.errors import OptionError

Owner = TypeVar("Owner", bound=Callable[..., Any])

_PLACES = {
    "is_async": "step(step_fn, is_async=...)",
    "optimizer": "step(lambda: (optimizer.step(), optimizer.zero_grad()))",
    "roundpipe_run_config": "model(..., roundpipe_run_config=RoundPipeRunConfig(...))",
}
"""How each known option is given. (`step` itself can't check: what it does not know is for ``step_fn``.)"""


def with_options(example: str, *further: str) -> Callable[[Owner], Owner]:
    """A function or class that refuses unknown options and tells others where its own ones belong.

    Args:
        example: how one of its options is given, with ``{0}`` in place of the name.
        *further: options that it takes as ``**kwargs``.
    """

    def decorate(owner: Owner) -> Owner:
        function = owner.__init__ if isinstance(owner, type) else owner  # type: ignore[misc]
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        named = [name for name, one in inspect.signature(function).parameters.items() if one.kind in kinds]
        options = [name for name in (*named, *further) if name not in ("self", "model")]
        for option in options:
            _PLACES.setdefault(option, example.format(option))
        known = {*named, *further}

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not known.issuperset(kwargs):
                raise _unknown(function, next(name for name in kwargs if name not in known), options)
            return function(*args, **kwargs)

        checked.further_options = further  # type: ignore[attr-defined]
        if not isinstance(owner, type):
            return checked  # type: ignore[return-value]
        owner.__init__ = checked  # type: ignore[misc]
        return owner

    return decorate


def check_passed_on(
    function: Callable[..., Any], kwargs: Mapping[str, Any], options: Collection[str], what: str, place: str
) -> None:
    """Look at arguments that go on to a user's function, which may be ``options`` of ours in the wrong place.

    Raises:
        OptionError: the function does not take one; if it takes whatever it is given, there is a warning.
    """
    found = [name for name in kwargs if name in options]
    if not found:
        return
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    for name in found:
        text = f"{what} has no argument {name!r}; as an option of roundpipe it is given as {place}"
        if name not in parameters and not takes_any:
            raise OptionError(text)
        if name not in parameters:
            warn(f"{text}. It was passed on, since there are **kwargs")


def _unknown(function: Callable[..., Any], option: str, options: Sequence[str]) -> OptionError:
    meant = [each for each in options if each.startswith(f"{option}_")]
    meant = meant or get_close_matches(option, options, 1, cutoff=0.76)
    if meant:
        advice = f"did you mean {meant[0]!r}?"
    elif option in _PLACES:
        advice = f"it is given as {_PLACES[option]}"
    else:
        advice = f"there are {', '.join(options)}"
        if "input_kwargs" in options:
            advice += "; arguments of the model belong in input_args and input_kwargs"
    return OptionError(f"{function.__qualname__.removesuffix('.__init__')} has no option {option!r}; {advice}")
