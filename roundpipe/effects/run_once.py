"""Which modules must run once, on the host: a backward runs what is on the devices a second time.

    first_to_run_once, holders_of_those   before anything ran: what the code of the modules tells
    Before                                around a first call: what it changed, and the way back

What is asked of Python state is `roundpipe.effects.python_state`'s knowledge; here it is put to modules that run apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.core import trees
from roundpipe.effects.python_state import PythonState, hook_hands_on, must_run_once
from roundpipe.effects.user_code import codes_of, names_in, words_in


def hooks_run_around(module: nn.Module) -> bool:
    """Whether a part's module has hooks that run once, on the host, around what the devices do."""
    return bool(module._forward_hooks or module._forward_pre_hooks) and not (
        module._backward_hooks or module._backward_pre_hooks or isinstance(module, torch.jit.ScriptModule)
    )


def _without_hooks(module: nn.Module) -> nn.Module:
    """A module as what calls it finds it once its hooks have run."""
    if not module._forward_hooks and not module._forward_pre_hooks or isinstance(module, torch.jit.ScriptModule):
        return module
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, _forward_hooks={}, _forward_pre_hooks={})
    return twin


def _forward_must(module: nn.Module) -> bool:
    renormalizes = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    return renormalizes or must_run_once(_without_hooks(module))


def _hooks_must(module: nn.Module) -> bool:
    """Whether a hook leaves something for a forward; what it notes for the user it may note twice."""
    return any(map(hook_hands_on, (*module._forward_hooks.values(), *module._forward_pre_hooks.values())))


def first_to_run_once(module: nn.Module) -> str | None:
    """The kind of the first module, of a part's module and those below it, that must run once, if there is any.

    Hooks of the part's module itself are left out where they run around it.
    """
    for one in module.modules():
        if _forward_must(one) or _hooks_must(one) and not (one is module and hooks_run_around(one)):
            return type(one).__name__
    return None


def holders_of(name: str) -> Iterator[str]:
    """Qualified names of the modules that hold one, up to the model itself, ``""``."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def holders_of_those(model: nn.Module) -> set[nn.Module]:
    """The modules whose forward must run on the host: those that must run once, and those that hold them.

    One that only its hooks keep from running twice is none: as a part it has them around it.
    """
    found: set[nn.Module] = set()
    by_name = dict(model.named_modules(remove_duplicate=False))
    for name, module in by_name.items():
        of_hooks = _hooks_must(module)
        if _forward_must(module) or of_hooks and not hooks_run_around(module):
            found.add(module)
        elif not of_hooks:
            continue
        found.update(by_name[holder] for holder in holders_of(name))
    return found


_FUNCTIONAL = frozenset({"hessian", "jacfwd", "jacrev", "jvp", "vjp"})
_AUTOGRAD = frozenset({"autograd", "backward", "grad"}) | _FUNCTIONAL


def runs_autograd(module: nn.Module) -> bool:
    """Whether a module's code seems to compute gradients itself, which can't go twice through what is on a device."""
    return any(not _AUTOGRAD.isdisjoint(names_in(code)) for _, code in codes_of(type(module)))


def differentiates_gradients(module: nn.Module) -> bool:
    """Whether a module's code seems to make gradients that a loss goes through, as models of forces do."""
    codes = [code for _, code in codes_of(type(module))]
    return any("create_graph" in words_in(code) or not _FUNCTIONAL.isdisjoint(names_in(code)) for code in codes)


class Before:
    """A part's module as it was before a first call: attributes, buffers, and whatever Python its code reaches.

    Args:
        module: the user's.
    """

    def __init__(self, module: nn.Module) -> None:
        plain = [one for one in module.modules() if not isinstance(one, torch.jit.ScriptModule)]
        self._held = [(one, dict(one.__dict__), dict(one._buffers)) for one in plain]
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        around = hooks_run_around(module)
        self._python = PythonState(
            (_without_hooks(one) if around and one is module else one for one in module.modules()),
            known=module.modules(),
        )
        self._hidden = [
            (buffer, buffer.clone(), f"buffer {name} of {words}")
            for one, words in self._python.hidden.items()
            for name, buffer in one._buffers.items()
            if buffer is not None and not buffer.is_meta
        ]

    @property
    def untold(self) -> str | None:
        """What its code uses although nothing tells whether it changes it, such as an iterator, in words."""
        return next((f"{words}, of type {kind}" for words, kind in self._python.closed.items()), None)

    def changed(self) -> str | None:
        """What of Python was changed since, in words; of what hooks write down, tensors only.

        Generators that drew are put back where they were.
        """
        for words, _ in self._python.gained():
            return words
        for buffer, was, words in self._hidden:
            if not torch.equal(buffer, was):
                return words
        if any(trees.tensors(value) for value in self._python.settled().values()):
            return "what its hooks hold"
        return "a random generator of its own" if self._python.take_back_draws() else None

    def undo(self) -> None:
        """Makes everything again what it was."""
        for module, attributes, buffers in self._held:
            held: dict[str, Any] = module.__dict__
            for name in held.keys() - attributes.keys():
                del held[name]
            held.update((name, value) for name, value in attributes.items() if held.get(name, held) is not value)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, was in (*self._buffers, *((buffer, was) for buffer, was, _ in self._hidden)):
                buffer.copy_(was)
        self._python.restore()
        self._python.take_back_draws()
