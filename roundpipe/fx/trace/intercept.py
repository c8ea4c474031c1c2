"""Hooks into torch, Python's random numbers and transformers, for one thread while it traces.

The places patched are global, so tracing holds a lock, and a patch acts only for the thread that
traces; any other thread's calls go straight through.

Invariant: outside `intercepting` nothing is patched.
This file is the only one that patches anything.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.apis
import torch.utils.checkpoint
from torch import nn

from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import TraceCause, TraceError, TraceFacts
from roundpipe.core.module_tree import modules_in
from roundpipe.effects.reach import ReachedState
from roundpipe.fx.fakes import FAKE, is_fake
from roundpipe.fx.locations import asking_frame, is_model_file, makes_text_for_people
from roundpipe.fx.operations import MATH_FUNCTIONS
from roundpipe.fx.sizes import math_of

if TYPE_CHECKING:
    from roundpipe.fx.trace.attempt import Attempt


TRACING = threading.RLock()
"""Held by the one trace of this process."""
_ACTIVE = threading.local()
ORIGINAL_CALL = nn.Module.__call__
ORIGINAL_DEEPCOPY = torch.Tensor.__deepcopy__
ORIGINAL_TOLIST, ORIGINAL_FORMAT = FAKE.tolist, FAKE.__format__

PYTHON_RANDOM = "random randint uniform choice choices shuffle sample gauss randrange normalvariate".split()
NUMPY_RANDOM = "rand randn random randint uniform choice permutation random_sample normal shuffle binomial".split()


def _attempt() -> Attempt | None:
    return getattr(_ACTIVE, "attempt", None)


def _attempt_in_glue() -> Attempt | None:
    """What traces this thread, if the model's own Python runs there rather than an operator or a leaf."""
    attempt = _attempt()
    return attempt if attempt is not None and attempt.recorder.in_glue() else None


@contextmanager
def intercepting(attempt: Attempt, model: nn.Module, reach: ReachedState) -> Iterator[None]:
    """Sends the calls of this thread to ``attempt``; ``reach`` has what the model's code calls or holds in closures."""
    with TRACING, ExitStack() as stack:
        _patch(stack, nn.Module, "__call__", _call_module)
        _patch_function_apply(stack)
        _patch_transforms(stack)
        _patch(stack, torch.Tensor, "__deepcopy__", _copied)
        _patch(stack, FAKE, "tolist", _listed)
        _patch(stack, FAKE, "__format__", _formatted)
        for name in PYTHON_RANDOM:
            _patch(stack, random, name, _refused("random", name, getattr(random, name)))
        numpy: Any = sys.modules.get("numpy")
        for name in NUMPY_RANDOM if numpy is not None else ():
            _patch(stack, numpy.random, name, _refused("numpy.random", name, getattr(numpy.random, name)))
        for owner in (torch, torch.random):
            _patch(stack, owner, "manual_seed", _refused("torch", "manual_seed", torch.manual_seed))
        _patch_grad_mode(stack, reach.cells)
        _patch_transformers(stack)
        _patch_texts_of_sizes(stack)
        found = _variables_of(model, reach)
        _patch_math(stack, [math.__dict__, *found])
        for variables in found:
            for name, function in _BUILTINS.items():
                if name not in variables:
                    variables[name] = function
                    stack.callback(variables.pop, name, None)
        stack.callback(setattr, _ACTIVE, "attempt", _attempt())
        _ACTIVE.attempt = attempt
        yield


def _variables_of(model: nn.Module, reach: ReachedState) -> list[dict[str, Any]]:
    """The global variables of a model's code: of the files that its classes are from, but for torch's, and of the
    functions that it reaches, such as helpers from other files; those that were typed in have no file.
    """
    kinds = dict.fromkeys(kind for own in dict.fromkeys(map(type, modules_in(model))) for kind in own.__mro__)
    names = dict.fromkeys(kind.__module__ for kind in kinds if kind.__module__.partition(".")[0] != "torch")
    found = [sys.modules[name].__dict__ for name in names if name != "builtins" and name in sys.modules]
    found += [function.__globals__ for function in reach.functions]
    return list({id(each): each for each in found}.values())


def _patch(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    stack.callback(setattr, owner, name, owner.__dict__.get(name, getattr(owner, name)))
    setattr(owner, name, new)


def _call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    attempt = _attempt_in_glue()
    if attempt is None:
        return ORIGINAL_CALL(module, *args, **kwargs)
    return attempt.call_module(module, args, kwargs)


def _length(value: Any, /) -> Any:
    attempt = _attempt_in_glue() if isinstance(value, torch.Tensor) else None
    return len(value) if attempt is None else attempt.glue.length_of(value)


def _is_instance(value: Any, kinds: Any, /) -> bool:
    """The builtin takes no size for a number."""
    if isinstance(value, kinds):
        return True
    number = _NUMBERS.get(type(value))
    return number is not None and _attempt() is not None and isinstance(number, kinds)


_NUMBERS: dict[type, float] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
"""Per type of symbolic sizes, a number of the type that eager mode has."""
_BUILTINS: dict[str, Callable[..., Any]] = {"len": _length, "isinstance": _is_instance}
"""What takes the place of builtins in a model's code, since they can neither give symbols nor know them."""


_UNKNOWN = "?"
"""In a text for people, what only the data of a call tell."""


def _patch_texts_of_sizes(stack: ExitStack) -> None:
    """A text that a model's code makes of a size, or a key, has the number, as in eager mode, and no name of a symbol.

    The graph then serves that number only, unless the text is for people. Torch's own code, sympy's and this package's
    get the symbol's name.
    """
    plain: dict[type, Callable[[Any], Any]] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    _patch(stack, torch.SymInt, "__hash__", _by_number(lambda size: hash(int(size)), torch.SymInt.__hash__))
    _patch(stack, torch.SymFloat, "__bool__", lambda number: bool(number != 0))  # torch's own asks for the number
    # a symbol takes an integer to be rounded already, also to tens
    _patch(
        stack, torch.SymInt, "__round__", _by_number(_rounded, torch.SymInt.__round__, lambda *given: len(given) > 1)
    )
    # Python floors a division of fractions exactly, and a symbol what the division gives: 1.0 // 0.1 is 9
    for name, symbol in itertools.product(("__floordiv__", "__rfloordiv__"), (torch.SymInt, torch.SymFloat)):
        divided = functools.partial(_divided, getattr(float, name))
        _patch(stack, symbol, name, _by_number(divided, getattr(symbol, name), _has_fraction))
    for kind, number in plain.items():
        _patch(stack, kind, "__repr__", _text_of_size(number, kind.__repr__))
        _patch(stack, kind, "__format__", _text_of_size(number, kind.__format__))


def _text_of_size(number: Callable[[Any], Any], original: Callable[..., str]) -> Callable[..., str]:
    def text(size: Any, *spec: str) -> str:
        frame = asking_frame() if _attempt() is not None else None
        if frame is None:
            return original(size, *spec)
        if makes_text_for_people(frame):
            return _UNKNOWN if size.node.hint is None else format(number(size.node.hint), *spec)
        return format(number(size), *spec)

    return text


def _patch_math(stack: ExitStack, found: Iterable[dict[str, Any]]) -> None:
    """Functions of ``math`` take symbols, under whatever name code has them."""
    of_symbols = {id(original := getattr(math, name)): _of_symbols(name, original) for name in MATH_FUNCTIONS}
    for variables in found:
        for name in [name for name, value in variables.items() if id(value) in of_symbols]:
            stack.callback(variables.__setitem__, name, variables[name])
            variables[name] = of_symbols[id(variables[name])]


def _of_symbols(name: str, original: Callable[..., float]) -> Callable[..., Any]:
    def function(*args: Any) -> Any:
        is_asked = len(args) == 1 and type(args[0]) in _NUMBERS and _attempt_in_glue() is not None
        made = math_of(name, args[0]) if is_asked else None
        return original(*args) if made is None else made

    return function


def _by_number(
    plain: Callable[..., Any], original: Callable[..., Any], applies: Callable[..., bool] = lambda *given: True
) -> Callable[..., Any]:
    """A method of symbols that is ``plain`` for a model's code, where it ``applies`` to what is given."""

    def method(*given: Any) -> Any:
        is_asked = applies(*given) and _attempt() is not None and asking_frame() is not None
        return plain(*given) if is_asked else original(*given)

    return method


def _rounded(size: Any, ndigits: int | None) -> Any:
    return round(int(size), ndigits)


def _has_fraction(number: Any, other: Any) -> bool:
    return isinstance(number, torch.SymFloat) or isinstance(other, (float, torch.SymFloat))


def _divided(function: Callable[[float, float], float], number: Any, other: Any) -> float:
    return function(float(number), float(other))


def _listed(tensor: torch.Tensor) -> Any:
    """The numbers of a fake in one read of data; torch's own method reads them one by one."""
    attempt = _attempt_in_glue()
    known = None if attempt is None else attempt.list_of(tensor)
    return ORIGINAL_TOLIST(tensor) if known is None else known


def _formatted(tensor: torch.Tensor, spec: str) -> str:
    """A text of a fake; one that is for people needs no data, and has those that arguments tell."""
    attempt = _attempt_in_glue()
    frame = asking_frame()
    if attempt is None or tensor.dim() or frame is None or not makes_text_for_people(frame):
        return ORIGINAL_FORMAT(tensor, spec)
    known = attempt.number_of(tensor)
    return _UNKNOWN if known is None else format(known, spec)


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy of a fake; torch's own would copy the whole world that it is of, and its memo is no operand."""
    if _attempt() is None or not is_fake(tensor):
        return ORIGINAL_DEEPCOPY(tensor, memo)
    if not tensor.is_leaf:
        raise RuntimeError("copy.deepcopy copies leaves of the autograd graph only, and no activation")
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _patch_function_apply(stack: ExitStack) -> None:
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        attempt = _attempt_in_glue()
        if attempt is None or attempt.recorder.watch.below_transform:
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            function, _preserve_rng_state, *inputs = args
            # Recomputation is the runtime's affair. Without an input that requires grad, eager gives no gradients.
            requires_grad = any(tensor.requires_grad for tensor in inputs if isinstance(tensor, torch.Tensor))
            with torch.set_grad_enabled(torch.is_grad_enabled() and requires_grad):
                return function(*inputs)
        return attempt.recorder.record_function(cls, args, kwargs)

    _patch(stack, torch.autograd.Function, "apply", classmethod(apply))


def _patch_transforms(stack: ExitStack) -> None:
    apis = torch._functorch.apis
    original = apis.vmap_impl

    def vmap_impl(*args: Any, **kwargs: Any) -> Any:
        attempt = _attempt_in_glue()
        with attempt.recorder.transform() if attempt is not None else nullcontext():
            return original(*args, **kwargs)

    _patch(stack, apis, "vmap_impl", vmap_impl)


def _refused(owner: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        attempt = _attempt_in_glue()
        if attempt is None:
            return original(*args, **kwargs)
        what = f"{owner}.{name}"
        words = f"{what} is called, and its result would be the same at every call of the graph"
        raise attempt.recorder.give_up(TraceError(words, TraceCause.RANDOM, TraceFacts(function=what)))

    return draw


def _patch_grad_mode(stack: ExitStack, cells: Iterable[types.CellType]) -> None:
    """Wherever code has the question from: ``torch``, a global of any file under any name, or a closure."""
    original = torch.is_grad_enabled

    def noting() -> bool:
        attempt = _attempt()
        if attempt is not None and is_model_file(sys._getframe(1).f_code.co_filename):
            attempt.recorder.note_grad_mode_asked()
        return original()

    noting.__wrapped__ = original  # type: ignore[attr-defined]
    _patch(stack, torch, "is_grad_enabled", noting)
    for file, module in list(sys.modules.items()):  # thousands, of which few have changed since the last time
        namespace = getattr(module, "__dict__", None)
        if type(namespace) is not dict:
            continue
        state, known = (id(namespace), len(namespace)), _NAMES.get(file)
        if known is None or known[0] != state or file == "__main__":
            known = _NAMES[file] = state, _names_of(original, file, namespace)
        for name in known[1]:
            if namespace.get(name) is original:
                stack.callback(namespace.__setitem__, name, original)
                namespace[name] = noting
    for cell in cells:
        if cell.cell_contents is original:
            stack.callback(setattr, cell, "cell_contents", original)
            cell.cell_contents = noting


def _names_of(function: Any, file: str, namespace: dict[str, Any]) -> list[str]:
    """Under which names a file that may be a model's has a function."""
    is_other = file.partition(".")[0] in _OTHERS
    return [] if is_other else [name for name, value in list(namespace.items()) if value is function]


_NAMES: dict[str, tuple[tuple[int, int], list[str]]] = {}
"""Per file, for a namespace of that identity and length."""
_OF_TORCH = {"torch", "numpy", "sympy", "mpmath", "networkx", "jinja2", "fsspec"}
_WITHOUT_TORCH = {"scipy", "pandas", "pyarrow", "narwhals", "matplotlib", "PIL", "IPython", "_pytest", "hypothesis"}
_OTHERS = frozenset({"roundpipe", *_OF_TORCH, *_WITHOUT_TORCH, *sys.stdlib_module_names}) - {"__main__"}
"""Packages whose files are no model's."""


def _patch_transformers(stack: ExitStack) -> None:
    """Transformers takes other paths for fakes; where their data can be read it must not."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if original is None:
        return

    def is_fake_tensor(tensor: Any) -> bool:
        attempt = _attempt_in_glue()
        return (attempt is None or not attempt.has_readable_data(tensor)) and bool(original(tensor))

    _patch(stack, module, "is_fake_tensor", is_fake_tensor)
