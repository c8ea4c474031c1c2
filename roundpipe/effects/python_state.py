"""What a forward can change besides tensors: containers, objects, closures, globals and class attributes.

A graph runs no Python, and a recomputation runs a leaf's Python twice, so whoever counts, caches or remembers in
plain Python must be found out. Module attributes are `roundpipe.fx.trace.leaves.TreeState`'s affair; here is everything
that is reached from them, and from the code of the modules' classes.

Invariant: `PythonState.restore` leaves every place found as it was, so that tracing leaves no trace.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import operator
import sys
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe.effects.user_code import codes_of, functions_reached_by, names_in
from roundpipe.effects.views import View, is_closed, view_of

PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Types of values that are compared by what they are."""
OF_TORCH = frozenset(nn.Module().__dict__)
"""Names of attributes that every module has."""
_CONTAINERS = (list, dict, set, deque, OrderedDict)
_MAX_PLACES = 30_000
"""Places looked at; a model with more has tables, not counters."""
_MAX_DEPTH = 4
"""Functions are looked into that are reached from others in so many steps."""
_MAX_NESTING = 100
_MAX_BYTES = 1 << 24
_MAX_PLACES_BETWEEN_CALLS = 3000
_MAX_BYTES_BETWEEN_CALLS = 1 << 20
_MAX_ITEMS_BETWEEN_CALLS = 256
"""What is compared before every call: no large tables, and nothing that lies deep inside others."""
_LIBRARIES = frozenset(
    "torch torchvision builtins collections functools typing types inspect logging math os sys re abc enum copy json "
    "warnings contextlib dataclasses itertools operator numpy sympy roundpipe importlib threading random".split()
)


def _is_library(owner: Any) -> bool:
    if owner in (types.SimpleNamespace, UserDict, UserList, ChainMap):  # hold a user's values
        return False
    return str(getattr(owner, "__module__", None) or "builtins").partition(".")[0] in _LIBRARIES


def _has_attributes(value: Any) -> bool:
    """Whether an object is of a user's class and has attributes of its own."""
    return type(getattr(value, "__dict__", None)) is dict and not _is_library(type(value))


@dataclass(slots=True)
class _Place:
    """One place that holds something, and what it held."""

    words: str
    kind: str
    """``"container"``, ``"cell"``, ``"global"``, ``"class"``, ``"names"`` of a class, or that of a `View`."""
    owner: Any
    key: Any
    held: Any
    counts: bool
    """Whether a change is the forward's own; what a user's hook writes down is not."""
    view: View | None = None


Settled = dict[tuple[str, int, Any], Any]
"""What places held after a forward: kind, identity of the owner, key -> copy."""


class PythonState:
    """Everything outside of tensors and module attributes that the code of some modules can change, at one moment.

    Args:
        modules: whose attributes and classes are looked through; torch's own have none.
        between_calls: only what is compared before every call.
        with_hidden: whether other modules that a forward may reach are looked through too, such as those in a list.
        known: modules that are no such others.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        between_calls: bool = False,
        with_hidden: bool = True,
        known: Iterable[nn.Module] = (),
    ) -> None:
        self._places: list[_Place] = []
        self._caches: list[tuple[Any, int]] = []
        self._quick: Any = None
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._seen: set[int] = set()
        self._globals: set[tuple[int, str]] = set()
        self._kept: list[Any] = []
        self._counts = True
        self.codes: list[types.CodeType] = []
        """Of the functions that were looked into, beside methods of modules."""
        self.cells: list[types.CellType] = []
        """Of closures, which hold functions that are not written in Python."""
        self.hidden: dict[nn.Module, str] = {}
        """Modules that are reached as plain Python objects only, with where."""
        self.closed: dict[str, str] = {}
        """What a forward seems to use although nothing tells how it changes it, in words, with the kind."""
        self._max_places = _MAX_PLACES_BETWEEN_CALLS if between_calls else _MAX_PLACES
        self._max_items = _MAX_ITEMS_BETWEEN_CALLS if between_calls else sys.maxsize
        self._max_bytes = _MAX_BYTES_BETWEEN_CALLS if between_calls else _MAX_BYTES
        self._max_depth = _MAX_DEPTH if between_calls else _MAX_NESTING
        modules = list(modules)
        self._modules = {*modules, *known} if with_hidden else None
        self._hidden_count: set[nn.Module] = set()
        kinds = {type(module) for module in modules}
        self._names = frozenset().union(*(uses_of_forward(kind).read for kind in kinds))
        self._names |= Uses.of(code for kind in kinds for code in _properties(kind, self._names)).read
        self._is_read = True
        self._in_global = False
        for module in modules:
            if type(module).__module__.startswith("torch.nn.modules."):
                continue
            name = type(module).__name__
            for key, value in list(module.__dict__.items()):
                if key not in ("_parameters", "_buffers", "_modules") and "_hooks" not in key:
                    self._is_read = key in self._names
                    self._visit(value, f"{name}.{key}", 0)
            self._is_read = True
            self._visit_class(type(module), 0)
        self._counts = False
        for module in modules:
            for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
                self._visit(hook, f"a hook of {type(module).__name__}", 0)
        looked_through: set[nn.Module] = set()
        while len(looked_through) < len(self.hidden):
            for module, words in list(self.hidden.items()):
                if module not in looked_through:
                    looked_through.add(module)
                    self._counts = module in self._hidden_count
                    self._visit_hidden(module, words)

    # ------------------------------------------------------------------ what is found

    def _new(self, value: Any) -> bool:
        """Whether a value was not looked at before; it is kept, so that its identity stays its own."""
        if id(value) in self._seen or len(self._places) >= self._max_places:
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def _visit(self, value: Any, words: str, depth: int) -> None:
        max_depth = _MAX_DEPTH if self._in_global else self._max_depth  # packages have large tables there
        if isinstance(value, nn.Module) and self._is_read:
            self._note_hidden(value, words)
        if isinstance(value, (*PLAIN, torch.Tensor, nn.Module, types.ModuleType)) or depth > max_depth:
            return
        if isinstance(value, torch.Generator):
            if self._new(value):
                self._generators.append((value, value.get_state()))
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, (types.MethodType, functools.partial, staticmethod, classmethod, property)):
            for inner in (getattr(value, name, None) for name in ("__self__", "__func__", "func", "fget")):
                self._visit(inner, words, depth)
            if isinstance(value, functools.partial):
                self._visit((*value.args, *value.keywords.values()), words, depth)
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            self._visit(value.__self__, words, depth)
        elif hasattr(value, "cache_info") and hasattr(value, "cache_clear"):
            if self._new(value):
                self._caches.append((value, value.cache_info().misses))
                self._visit(getattr(value, "__wrapped__", None), words, depth)
        elif isinstance(value, _CONTAINERS):
            self._visit_container(value, words, depth)
        elif isinstance(value, tuple):
            self._visit_items(value[: self._max_items], words, depth)
        elif isinstance(value, type):
            if issubclass(value, nn.Module) and not _is_library(value):
                self._visit_class(value, depth + 1)
        else:
            self._visit_object(value, words, depth)

    def _visit_object(self, value: Any, words: str, depth: int) -> None:
        if is_closed(value):
            if self._is_read and (depth == 0 or hasattr(type(value), "__next__")):
                self.closed[words] = type(value).__name__
            return
        view = view_of(value, self._max_bytes)
        if (view is None and not _has_attributes(value)) or not self._new(value):
            return
        if view is not None:
            held = view.take(value)
            counts = self._counts or view.kind == "random"
            self._places.append(_Place(words, view.kind, value, None, held, counts, view))
            if view.kind == "slots":
                self._visit_attributes(value, held, words, depth)
        self._visit_own_attributes(value, words, depth)

    def _note_hidden(self, module: nn.Module, words: str) -> None:
        is_own = type(module).__module__.startswith("roundpipe.")  # such as the compiled model, which counts calls
        if self._modules is not None and module not in self._modules and not is_own and module not in self.hidden:
            self.hidden[module] = words
            if self._counts:
                self._hidden_count.add(module)

    def _visit_hidden(self, module: nn.Module, words: str) -> None:
        if isinstance(module, torch.jit.ScriptModule) or not self._new(module):
            return
        names = self._names | uses_of_forward(type(module)).read
        self._add_container(module.__dict__, words)
        for key, value in list(module.__dict__.items()):
            if key in OF_TORCH:
                if isinstance(value, dict) and (value or key in ("_forward_hooks", "_forward_pre_hooks")):
                    self._add_container(value, f"{words}.{key}")
            else:
                self._is_read = key in names
                self._visit(value, f"{words}.{key}", 1)
        self._is_read = True
        for name, child in module._modules.items():
            self._visit(child, f"{words}.{name}", 1)
        if not type(module).__module__.startswith("torch.nn.modules."):
            self._visit_class(type(module), 0)

    def _visit_own_attributes(self, value: Any, words: str, depth: int) -> None:
        if _has_attributes(value):
            self._add_container(value.__dict__, words)
            self._visit_attributes(value, value.__dict__, words, depth)

    def _visit_attributes(self, owner: Any, attributes: dict[str, Any], words: str, depth: int) -> None:
        was = self._is_read
        names = self._names | _uses_reached(type(owner), self._names).read if was else frozenset()
        for key, item in list(attributes.items()):
            self._is_read = key in names
            self._visit(item, f"{words}.{key}", depth + 1)
        self._is_read = was

    def _visit_container(self, value: Any, words: str, depth: int) -> None:
        if len(value) > self._max_items or not self._new(value):
            return
        self._add_container(value, words)
        self._visit_own_attributes(value, words, depth)
        if not (self._in_global and len(value) > _MAX_ITEMS_BETWEEN_CALLS):
            self._visit_items(list(value.values() if isinstance(value, dict) else value), words, depth)

    def _visit_items(self, items: Sequence[Any], words: str, depth: int) -> None:
        if set(map(type, items)).issubset(PLAIN):
            return
        for item in items:
            self._visit(item, words, depth + 1)

    def _add(self, words: str, kind: str, owner: Any, key: Any, held: Any) -> None:
        self._places.append(_Place(words, kind, owner, key, held, self._counts))

    def _add_container(self, value: Any, words: str) -> None:
        held = dict(dict.items(value)) if isinstance(value, dict) else value.copy()  # as stored: [] may be overridden
        self._add(words, "container", value, None, held)

    def _visit_class(self, kind: type, depth: int) -> None:
        if depth > _MAX_DEPTH:
            return
        for owner in kind.__mro__:
            if _is_library(owner) or not self._new(owner):
                continue
            for key, value in list(vars(owner).items()):
                if isinstance(value, (*PLAIN, torch.Tensor)) and not key.startswith("__"):
                    self._add(f"{owner.__name__}.{key}", "class", owner, key, value)
                elif not key.startswith("__") or key == "__call__":
                    self._visit(value, f"{owner.__name__}.{key}", depth)
            self._add(owner.__name__, "names", owner, None, set(vars(owner)))

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        if _is_library(function) or depth > _MAX_DEPTH or not self._new(function):
            return
        self.codes.append(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if isinstance(held, (*PLAIN, torch.Tensor)):
                self._add(f"{name} of {function.__qualname__}", "cell", cell, None, held)
            if isinstance(held, types.BuiltinFunctionType):
                self.cells.append(cell)
            self._visit(held, f"{name} of {function.__qualname__}", depth + 1)
        for name in names_in(function.__code__):
            if name in function.__globals__:
                held = function.__globals__[name]
                place = (id(function.__globals__), name)
                if isinstance(held, (*PLAIN, torch.Tensor)) and place not in self._globals:
                    self._globals.add(place)
                    self._add(f"global {name}", "global", function.__globals__, name, held)
                was, self._in_global = self._in_global, True
                self._visit(held, f"global {name}", depth + 1)
                self._in_global = was

    # ------------------------------------------------------------------ what changed

    def changed(self) -> list[str]:
        """The places that hold something else now, in words; tensors put into a container don't count."""
        return list(
            dict.fromkeys(place.words for place in self._changed_places() if place.counts and not _only_tensors(place))
        )

    def drawn(self) -> list[str]:
        """Random generators of Python and NumPy that drew, in words."""
        return list(dict.fromkeys(place.words for place in self._changed_places() if place.kind == "random"))

    def is_as_it_was(self) -> bool:
        """Whether every place holds the same objects; quick, and too careful rather than too bold."""
        if self._quick is None:
            containers = [place for place in self._places if place.kind == "container"]
            self._quick = (
                [(p.owner, list(map(id, p.held.values()))) for p in containers if isinstance(p.owner, dict)],
                [(p.owner, list(map(id, p.held))) for p in containers if isinstance(p.owner, (list, deque))],
                [(p.owner, p.held) for p in containers if isinstance(p.owner, set)],
                [(p.owner, p.key, p.held) for p in self._places if p.kind == "global"],
                [(vars(p.owner), p.key, p.held) for p in self._places if p.kind == "class"],
                [(vars(p.owner), len(p.held)) for p in self._places if p.kind == "names"],
                [p for p in self._places if p.kind in ("cell", "array", "slots")],
            )
        dicts, lists, sets, variables, attributes, names, cells = self._quick
        return (
            all(list(map(id, dict.values(owner))) == held for owner, held in dicts)
            and all(list(map(id, owner)) == held for owner, held in lists)
            and all(owner == held for owner, held in sets)
            and all(owner.get(key) is held for owner, key, held in (*variables, *attributes))
            and all(len(owner) == number for owner, number in names)
            and all(_same(place.held, _now(place)) for place in cells)
        )

    def settled(self) -> Settled:
        """What the changed places hold now, for `changed_but`."""
        return {
            (place.kind, id(place.owner), place.key): dict(dict.items(now)) if isinstance(now, dict) else copy.copy(now)
            for place in self._changed_places()
            for now in [_now(place)]
        }

    def changed_but(self, settled: Settled) -> list[str]:
        """As `changed`, without what a forward that changes nothing of the graph had put there, and without draws."""
        return list(
            dict.fromkeys(
                place.words
                for place in self._changed_places()
                if place.counts
                and place.kind != "random"
                and not _only_tensors(place)
                and not _is_settled(place, settled.get((place.kind, id(place.owner), place.key)))
            )
        )

    def gained(self, by_hooks: bool = False) -> Iterator[tuple[str, Any]]:
        """The places that hold something else now, tensors included, in words and as they are.

        Args:
            by_hooks: those that only hooks of the user's can reach, in place of the others.
        """
        for place in self._changed_places():
            if place.counts is not by_hooks:
                yield place.words, _now(place)

    def restore(self, tensors_only: bool = False) -> None:
        """Puts back what every place held.

        Args:
            tensors_only: only where there are tensors now.
        """
        for place in list(self._changed_places()):
            if tensors_only and not _holds_tensors(_now(place)):
                continue
            if tensors_only and place.kind == "container" and isinstance(place.owner, (list, deque)):
                if not any(isinstance(item, torch.Tensor) for item in place.owner):  # sizes only: how many still counts
                    for index, item in enumerate(place.owner):
                        place.owner[index] = 0 if _holds_tensors(item) else item
                    continue
            if place.kind == "container":
                place.owner.clear()
                if isinstance(place.owner, dict):
                    dict.update(place.owner, place.held)
                else:
                    (place.owner.update if isinstance(place.owner, set) else place.owner.extend)(place.held)
            elif place.view is not None:
                place.view.put(place.owner, place.held)
            elif place.kind == "cell":
                place.owner.cell_contents = place.held
            elif place.kind == "global":
                place.owner[place.key] = place.held
            elif place.kind == "class":
                setattr(place.owner, place.key, place.held)
            else:
                for name in set(vars(place.owner)) - place.held:
                    delattr(place.owner, name)
        for cache, num_misses in self._caches:
            if cache.cache_info().misses != num_misses:  # its size stays what it was when it was full
                cache.cache_clear()  # it may hold fakes

    def take_back_draws(self) -> bool:
        """Puts random generators back to where they were; says whether any had drawn. On fakes, none draws."""
        drew = [(generator, was) for generator, was in self._generators if not torch.equal(generator.get_state(), was)]
        for generator, was in drew:
            generator.set_state(was)
        return bool(drew)

    def _changed_places(self) -> Iterator[_Place]:
        for place in self._places:
            if not _same(place.held, _now(place)):
                yield place


@contextlib.contextmanager
def python_state_kept(model: nn.Module) -> Iterator[None]:
    """Whatever a model's code does inside, such as to put fakes into a cache, is taken back."""
    state = PythonState(model.modules())
    try:
        yield
    finally:
        state.restore()


def _now(place: _Place) -> Any:
    if place.kind == "container":
        return place.owner
    if place.view is not None:
        return place.view.take(place.owner)
    if place.kind == "cell":
        try:
            return place.owner.cell_contents
        except ValueError:
            return None
    if place.kind == "global":
        return place.owner.get(place.key)
    if place.kind == "names":
        return {name for name in vars(place.owner) if not name.startswith(("__", "_abc"))} | place.held
    return getattr(place.owner, place.key, None)


def _is_settled(place: _Place, settled: Any) -> bool:
    """Whether a place holds what it held, or what it held after a forward; a dict item by item."""
    now = _now(place)
    if not isinstance(now, dict) or not isinstance(settled, dict):
        return _same(settled, now)
    missing = object()
    return all(
        any(same_item(held.get(key, missing), dict.get(now, key, missing)) for held in (place.held, settled))
        for key in {*place.held, *settled, *dict.keys(now)}
    )


def _same(was: Any, now: Any) -> bool:
    if isinstance(was, dict):
        if len(was) == dict.__len__(now) and all(map(operator.is_, was.values(), dict.values(now))):
            return list(was) == list(dict.keys(now)) or was.keys() == dict.keys(now)
        held = dict(dict.items(now))
        return was.keys() == held.keys() and all(same_item(value, held[key]) for key, value in was.items())
    if isinstance(was, set):
        return bool(was == now)
    if isinstance(was, (list, deque)):
        return len(was) == len(now) and all(map(same_item, was, now))
    return same_item(was, now)


def same_item(was: Any, now: Any) -> bool:
    """Whether two values are one object, or equal plain ones."""
    return was is now or (isinstance(was, PLAIN) and type(was) is type(now) and was == now)


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    if depth > 3:
        return False
    if isinstance(value, dict):
        return any(_holds_tensors(item, depth + 1) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set, deque)):
        return any(_holds_tensors(item, depth + 1) for item in value)
    return False


def _only_tensors(place: _Place) -> bool:
    """Whether a container gained tensors and is else what it was, as a cache of tables does."""
    now = _now(place)
    if place.kind != "container" or not isinstance(now, dict):
        return False
    held = dict(dict.items(now))
    return all(key in held and same_item(value, held[key]) for key, value in place.held.items()) and all(
        _holds_tensors(value) for key, value in held.items() if key not in place.held
    )


_READ: dict[type, frozenset[str]] = {}


def attributes_read(kind: type) -> frozenset[str]:
    """Names of attributes that the methods of a class read, of whatever object."""
    if kind not in _READ:
        _READ[kind] = Uses.of(code for name, code in _methods(kind).items() if name != "__init__").read
    return _READ[kind]


_FORWARD: dict[type, Uses] = {}


def uses_of_forward(kind: type) -> Uses:
    """What the forward of a class does, with those of its methods that it may call."""
    if kind not in _FORWARD:
        _FORWARD[kind] = Uses.of(_reached(kind).values())
    return _FORWARD[kind]


def _properties(kind: type, names: frozenset[str]) -> Iterator[types.CodeType]:
    """The code of those properties of a class that have some names."""
    for owner in kind.__mro__:
        if not _is_library(owner):
            for name, value in vars(owner).items():
                if name in names and isinstance(value, property) and isinstance(value.fget, types.FunctionType):
                    yield value.fget.__code__


def _uses_reached(kind: type, names: Iterable[str]) -> Uses:
    """What methods of a class do that code with some names in it may call; operators are taken for called."""
    own = [owner for owner in reversed(kind.__mro__) if not _is_library(owner)]
    methods = {name: one.__code__ for owner in own for name, one in vars(owner).items() if hasattr(one, "__code__")}
    return Uses.of(_called(methods, (*names, *_OPERATORS)).values())


_OPERATORS = frozenset("__call__ __next__ __iter__ __getitem__ __len__ __enter__ __exit__ __float__ __int__".split())


class Readers:
    """Tells which attributes of a module some other code reads, by their names.

    Args:
        kinds: classes of modules.
        functions: other code.
    """

    def __init__(self, kinds: Iterable[type], functions: Iterable[types.CodeType]) -> None:
        self._kinds = set(kinds)
        self._functions = uses_of_functions(functions, self._kinds).read

    def beside(self, kind: type) -> frozenset[str]:
        """Names that code outside of a class reads."""
        return self._functions.union(*(attributes_read(other) for other in self._kinds if other is not kind))


def uses_of_functions(codes: Iterable[types.CodeType], kinds: Iterable[type]) -> Uses:
    """What those functions do that are no methods of some classes."""
    methods = {code for kind in kinds for code in _methods(kind).values()}
    return Uses.of(code for code in codes if code not in methods)


def _reached(kind: type) -> dict[str, types.CodeType]:
    """The methods of a class that its forward may call, and those that run whatever it does."""
    return _called(_methods(kind), ("forward", "__call__", "__getattr__", "__getattribute__"))


def _called(methods: dict[str, types.CodeType], names: Iterable[str]) -> dict[str, types.CodeType]:
    """Those methods that have some names, and those that they may call."""
    reached: dict[str, types.CodeType] = {}
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in methods and name not in reached:
            reached[name] = methods[name]
            pending += list(names_in(methods[name]))
    return reached


def _methods(kind: type) -> dict[str, types.CodeType]:
    """The code of a class's own methods, not counting those it has from torch."""
    return dict(codes_of(kind))


@dataclass(frozen=True, slots=True)
class Uses:
    """What some code does to attributes, variables and items."""

    read: frozenset[str]
    set: frozenset[str]
    rebinds: bool
    """Whether it assigns to globals or to variables of an enclosing function."""
    changes_items: bool
    """Whether it assigns items or calls methods that change containers."""
    reads_any_name: bool
    """Whether it makes up names of attributes that it reads."""

    @staticmethod
    def of(codes: Iterable[types.CodeType]) -> Uses:
        """What some functions do, and those that are written inside them."""
        pending = list(codes)
        found = [Uses(frozenset(), frozenset(), False, False, False)]
        while pending:
            code = pending.pop()
            pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            found.append(_uses_of_code(code))
        read = frozenset().union(*(uses.read for uses in found))
        return Uses(
            read,
            frozenset().union(*(uses.set for uses in found)),
            any(uses.rebinds for uses in found),
            any(uses.changes_items for uses in found),
            any(uses.reads_any_name for uses in found) or "__dict__" in read,
        )


_USES_OF_CODE: weakref.WeakKeyDictionary[types.CodeType, Uses] = weakref.WeakKeyDictionary()
"""A model's code is thousands of functions, and taking one apart is slow."""


def _uses_of_code(code: types.CodeType) -> Uses:
    """What one function does, without those inside it."""
    known = _USES_OF_CODE.get(code)
    if known is not None:
        return known
    read: set[str] = set()
    stored: set[str] = set()
    rebinds = items = False
    for instruction in dis.get_instructions(code):
        name = str(instruction.argval)
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            read.add(name)
            items |= name in _CHANGING
        elif instruction.opname == "STORE_ATTR":
            stored.add(name)
        rebinds |= instruction.opname == "STORE_GLOBAL"
        rebinds |= instruction.opname == "STORE_DEREF" and name in code.co_freevars
        items |= instruction.opname == "STORE_SUBSCR"
    if "getattr" in code.co_names:
        read.update(constant for constant in code.co_consts if isinstance(constant, str))
    asks_by_name = not {"getattr", "vars"}.isdisjoint((*code.co_names, *code.co_freevars, *code.co_cellvars))
    uses = Uses(frozenset(read), frozenset(stored), rebinds, items, asks_by_name and _makes_up_names(code))
    _USES_OF_CODE[code] = uses
    return uses


def _makes_up_names(code: types.CodeType) -> bool:
    """Whether code calls ``vars``, or ``getattr`` with anything but a literal."""
    found = [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL")]
    for index, one in enumerate(found):
        if one.opname not in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") or one.argval not in ("getattr", "vars"):
            continue
        rest = found[index + 1 :]
        while rest and rest[0].opname.startswith(("LOAD_FAST", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF")):
            rest = rest[1:]
        is_literal = bool(rest) and rest[0].opname == "LOAD_CONST" and isinstance(rest[0].argval, str)
        default = rest[2:] if len(rest) > 1 and rest[1].opname.startswith("LOAD_") else rest[1:]
        if one.argval == "vars" or not is_literal or not default or "CALL" not in default[0].opname:
            return True
    return False


_CHANGING = frozenset("append extend update pop popleft setdefault add insert clear remove popitem".split())
_ASKING = frozenset({"is_grad_enabled", "requires_grad", "is_leaf", "grad_fn"})


def _forward_hooks_of(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def hook_hands_on(hook: Any) -> bool:
    """Whether a hook may leave something for a forward: in an attribute, a variable, or a container of a module.

    Or takes from a random generator or an iterator of its own, which runs of the forward share.
    """
    uses = _uses_of_hook(hook)
    if uses.set or uses.rebinds or _may_change(hook, None):
        return True
    function = hook.func if isinstance(hook, functools.partial) else hook
    held = [getattr(function, "__self__", None), *(cell.cell_contents for cell in _filled_cells(function))]
    return uses.changes_items and any(isinstance(one, nn.Module) for one in held)


def hook_keeps(hook: Any) -> bool:
    """Whether a hook may put what it is given somewhere."""
    uses = _uses_of_hook(hook)
    return bool(uses.set) or uses.rebinds or uses.changes_items


def _filled_cells(function: Any) -> Iterator[types.CellType]:
    for cell in getattr(getattr(function, "__func__", function), "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            cell.cell_contents  # noqa: B018 - raises if it is empty
            yield cell


def _uses_of_hook(hook: Any) -> Uses:
    function = hook.func if isinstance(hook, functools.partial) else hook
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        function = vars(type(function)).get("__call__")
    return Uses.of([function.__code__] if isinstance(function, types.FunctionType) else [])


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


_ASKS: dict[type, bool] = {}
_IS_GRAD_ENABLED = torch.is_grad_enabled
"""Torch's own: while a trace runs, a function around it stands in its place."""


def asks_for_gradients(kind: type) -> bool:
    """Whether the forward of a class, or a function that it calls, asks if gradients are recorded, as code tells."""
    if kind not in _ASKS:
        methods = [getattr(kind, name, None) for name in _reached(kind)]
        _ASKS[kind] = any(map(_function_asks, functions_reached_by(*methods)))
    return _ASKS[kind]


def _function_asks(function: Any) -> bool:
    if getattr(function, "__wrapped__", function) is _IS_GRAD_ENABLED:
        return True
    if not isinstance(function, types.FunctionType):
        return False
    return not _ASKING.isdisjoint(Uses.of([function.__code__]).read) or "is_grad_enabled" in names_in(function.__code__)


def must_run_once(module: nn.Module) -> bool:
    """Whether a module's forward, as far as its code tells, remembers something or asks whether gradients are recorded.

    For modules that were never traced: too careful rather than too bold.
    """
    reached = _reached(type(module))
    uses = Uses.of(reached.values())
    if uses.set & uses.read or uses.rebinds or uses.read & _ASKING or asks_for_gradients(type(module)):
        return True
    if "data" in uses.read or "no_grad" in uses.read and any(map(_is_in_place, uses.read)):  # weights may be written
        return True
    if any(map(hook_hands_on, _forward_hooks_of(module))):
        return True
    held = [module.__dict__.get(name) for name in uses.read]
    functions = [getattr(type(module), name, None) for name in reached]
    for function in functions:
        held += [function.__globals__.get(name) for name in names_in(function.__code__)] if function else []
    return any(_may_change(value, uses) for value in held)


def _may_change(value: Any, uses: Uses | None, depth: int = 0) -> bool:
    """Whether code that has a value changes it at every call, as far as the two tell.

    Args:
        value: of an attribute, a variable, or inside of one.
        uses: what the code does; None: only what gives another value whenever it is asked counts.
        depth: steps to the value from the one that the code names.
    """
    if isinstance(value, (*PLAIN, torch.Tensor, nn.Module, types.ModuleType, type)) or depth > _MAX_DEPTH:
        return False
    inside: list[Any] = []
    if isinstance(value, types.FunctionType):
        if _is_library(value):
            return False
        if uses is not None and Uses.of([value.__code__]).rebinds:
            return True
        uses, inside = None, [cell.cell_contents for cell in _filled_cells(value)]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
        inside = [value.__self__]
    elif isinstance(value, (tuple, *_CONTAINERS)):
        if uses is not None and uses.changes_items and not isinstance(value, tuple):
            return True
        inside = list(value.values() if isinstance(value, dict) else value)[:_MAX_ITEMS_BETWEEN_CALLS]
    else:
        view = view_of(value, _MAX_BYTES)
        if isinstance(value, torch.Generator) or hasattr(type(value), "__next__") and is_closed(value):
            return True
        if view is not None and view.kind != "slots":
            return view.kind == "random" or uses is not None and uses.changes_items
        if view is not None or _has_attributes(value):
            attributes = value.__dict__ if view is None else view.take(value)
            own = _uses_reached(type(value), () if uses is None else uses.read)
            if uses is not None and own.set & attributes.keys():
                return True
            uses = own if uses is not None else None
            inside = [item for name, item in attributes.items() if name in own.read or depth == 0]
    return any(_may_change(one, uses, depth + 1) for one in inside)
