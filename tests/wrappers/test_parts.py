"""Parts: what running a module apart would lose is noticed, and such a module goes back to the CPU."""

from __future__ import annotations

import contextvars
import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import (
    AutoRoundPipe,
    BackwardError,
    RoundPipeRunConfig,
)
from roundpipe.core import trees
from roundpipe.wrappers.auto import PartsProgram
from roundpipe.wrappers.parts import IN_ONE_PIECE
from tests.equality import assert_same_gradients, assert_same_state
from tests.wrappers.cases_parts import WIDTH, auto


class WritesArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, notes: Any = None) -> torch.Tensor:
        return self.linear(self.norm(x.mul_(2)))


class NotesInArgument(WritesArgument):
    def forward(self, x: torch.Tensor, notes: Any = None) -> torch.Tensor:
        out = self.linear(self.norm(x))
        notes.append(out.square().mean())
        return out


class NotesInAttribute(WritesArgument):
    def forward(self, x: torch.Tensor, notes: Any = None) -> torch.Tensor:
        out = self.linear(self.norm(x))
        self.noted = out.square().mean()
        return out


class NotesInOwnList(WritesArgument):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, notes: Any = None) -> torch.Tensor:
        out = self.linear(self.norm(x))
        self.noted.append(out.square().mean())
        return out


class Memory:
    """An object that a module fills, as caches are."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []


class FillsMemory(WritesArgument):
    def forward(self, x: torch.Tensor, notes: Any = None, memory: Memory | None = None) -> torch.Tensor:
        out = self.linear(self.norm(x))
        assert memory is not None
        memory.values.append(out.square().mean())
        return out


class Root(nn.Module):
    """Everything that its odd module leaves behind reaches the output."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * 1
        notes: list[torch.Tensor] = []
        more = {"memory": Memory()} if isinstance(self.odd, FillsMemory) else {}
        out = self.odd(hidden, notes, **more) + hidden
        noted = getattr(self.odd, "noted", [])
        if isinstance(noted, list):
            notes += [*noted, *(more["memory"].values if more else ())]
            noted.clear()
        else:
            notes.append(noted)
        return out + sum(notes)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (WritesArgument, "odd runs on the CPU from now on: it writes into a tensor that it is given"),
        (NotesInArgument, "it changes a list or dict that it is given"),
        (NotesInAttribute, "its forward stores tensors in attribute 'noted'"),
        (NotesInOwnList, "NotesInOwnList's code remembers something"),
        (FillsMemory, "it is given a Memory, which it may change"),
    ],
)
def test_what_is_handed_on_beside_the_return_value(make: Callable[[], nn.Module], cause: str) -> None:
    model = Root(make()).double()
    reference = copy.deepcopy(model)
    with auto(model) as pipe:
        for step in range(3):
            x = torch.randn(8, WIDTH, dtype=torch.float64)
            if step == 0:
                with pytest.warns(UserWarning, match=cause):
                    found = pipe(x)
            else:
                found = pipe(x)
            expected = reference(x)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            found.square().sum().backward()
            expected.square().sum().backward()
        pipe.synchronize()
        assert_same_gradients(model, reference, 1e-10)
        assert_same_state(model, reference, 1e-12)  # BatchNorm counted the first call once


class PassesOn(nn.Module):
    """Returns what it is given and what it made, some of it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        made = self.linear(x * 1)
        return made, {"again": made, "given": more["kept"]}, x


class WritesWhatItGets(nn.Module):
    """In place into what its parts return: what they made, or also what they were given."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part = PassesOn()
        self.dropout = nn.Dropout(0.0)
        self.flatten = nn.Flatten(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.first(x), self.first(x + 1)
        made, others, given = self.part(x, {"kept": kept})
        others["again"].mul_(2)
        if self.what == "given":
            others["given"].add_(1)
            given.mul_(3)
        out = made + others["again"] + kept + others["given"] + x + given
        same = self.dropout(out)
        same.mul_(0.5)
        flat = self.flatten(out)
        flat.add_(1)
        return out + same + flat.view_as(out)


@pytest.mark.parametrize("what", ["made", "given"])
def test_what_a_part_hands_on_is_the_same_tensor(what: str) -> None:
    model = WritesWhatItGets(what).double()
    reference = copy.deepcopy(model)
    parts = dict.fromkeys(model.children(), IN_ONE_PIECE)
    with AutoRoundPipe(PartsProgram(model, parts), name="whole", devices=["cpu"]) as pipe:
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # its dropout, which computes nothing, goes to the host without a word
            found = pipe(x)
        torch.testing.assert_close(found, reference(x), rtol=1e-12, atol=1e-12)
        found, expected = pipe(x), reference(x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        expected.square().sum().backward()
        if what == "given":  # which the part runs again from
            with pytest.raises(BackwardError, match=r"args\[0\], args\[1\]\['kept'\]: .*changed in place"):
                found.square().sum().backward()
            return
        found.square().sum().backward()
        pipe.synchronize()
        assert_same_gradients(model, reference, 1e-10)


class Skips(nn.Module):
    """Has weights that it does not always use."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        made = x if "given" in self.what else self.linear(x)
        if self.what in ("view of given", "given"):
            return (made[:, 1:] if "view" in self.what else made), self.linear.weight.sum()
        if self.what == "made and view":
            return made, made[:, 1:]
        return (made[:, :2], made[:, 2:]) if self.what == "two views" else made


class WritesBehind(nn.Module):
    """Writes in place into one thing that its part returned, and reads the rest."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        made = self.part(x)
        first, rest = made if isinstance(made, tuple) else (made, x)
        first.mul_(2)
        return torch.cat([first, rest.expand(len(x), -1) if rest.ndim else rest.expand(len(x), 1), x], -1)


@pytest.mark.parametrize("num_microbatch", [1, 2])
@pytest.mark.parametrize(
    ("part", "cause"),
    [
        (Skips("view of given"), "part runs on the CPU from now on: it returns memory of a tensor that it is given"),
        (Skips("made and view"), "part runs on the CPU from now on: it returns tensors that share memory"),
        (Skips("two views"), None),
        (Skips("given"), None),
        (nn.Sequential(Skips("all given"), nn.Dropout(0.0)), "part runs on the CPU from now on: it returns memory of"),
        (nn.Sequential(Skips("all given"), nn.Linear(WIDTH, WIDTH)), None),
    ],
    ids=["view of given", "made and view", "two views", "given", "sequence of views", "sequence"],
)
def test_a_write_into_what_a_part_returned_is_seen_wherever_it_is_in_eager(
    part: nn.Module, cause: str | None, num_microbatch: int, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(0)
    model = WritesBehind(copy.deepcopy(part)).double()
    reference = copy.deepcopy(model)
    parts = dict.fromkeys(model.children(), RoundPipeRunConfig(num_microbatch=num_microbatch))
    with AutoRoundPipe(PartsProgram(model, parts), name="whole", devices=["cpu"] * 2) as pipe:
        for _ in range(2):
            x = torch.randn(4, WIDTH, dtype=torch.float64)
            found, expected = pipe(x), reference(x)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    said = [str(one.message) for one in recwarn if "from now on" in str(one.message)]
    assert len(said) == (cause is not None) and all(cause in one for one in said)


class Collects(nn.Module):
    """Sends what hooks find deep inside, and at its blocks, through a context variable, as transformers does."""

    collected: contextvars.ContextVar[dict[str, list[torch.Tensor]] | None] = contextvars.ContextVar("collected")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))) for _ in range(2)
        )
        self.blocks.extend(Skips("made") for _ in range(2))
        for block in self.blocks:
            block.register_forward_hook(functools.partial(self.collect, "blocks"))
        self.blocks[0][1][0].register_forward_hook(functools.partial(self.collect, "inside"))

    @classmethod
    def collect(cls, key: str, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        found = cls.collected.get(None)
        if found is not None and key in found:
            found[key].append(output)

    def forward(self, x: torch.Tensor, *keys: str) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
        found: dict[str, list[torch.Tensor]] = {key: [] for key in keys}
        token = self.collected.set(found)
        try:
            for block in self.blocks:
                x = block(x)
        finally:
            self.collected.reset(token)
        return x, found


@pytest.mark.parametrize("num_microbatch", [1, 2])
@pytest.mark.parametrize("keys", [(), ("blocks",), ("inside",), ("blocks", "inside")], ids=str)
def test_hooks_hand_on_through_a_context_variable(
    keys: tuple[str, ...], num_microbatch: int, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(0)
    model = Collects().double()
    reference = copy.deepcopy(model)
    parts = dict.fromkeys(model.blocks, RoundPipeRunConfig(num_microbatch=num_microbatch))
    with AutoRoundPipe(PartsProgram(model, parts), name="whole", devices=["cpu"] * 2) as pipe:
        for _ in range(2):
            x = torch.randn(4, WIDTH, dtype=torch.float64)
            losses = []
            for one in (pipe, reference):
                out, found = one(x, *keys)
                tensors = trees.tensors(found)
                assert len(tensors) == 4 * ("blocks" in keys) + ("inside" in keys)
                losses.append(out.square().sum() + sum(tensor.sin().sum() for tensor in tensors))
                losses[-1].backward()
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
            pipe.synchronize()
            assert_same_gradients(model, reference, 1e-10)
    said = {str(one.message) for one in recwarn if "from now on" in str(one.message)}
    assert said == (
        {"blocks.0 runs on the CPU from now on: it changes a list or dict that a context variable holds"}
        if "inside" in keys
        else set()
    )


def test_hooks_of_a_part_run_once_around_it() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Scales()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x, scale=2.0) + self.part.seen.mean()

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.seen = torch.zeros(1)

        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            self.last_scale = scale
            return self.linear(x) * scale

    whole = Calls().double()
    calls: list[tuple[str, int]] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        calls.append(("before", len(args[0])))
        return (args[0] + 1,), {"scale": kwargs["scale"] * 3}

    def after(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        calls.append(("after", len(output)))
        module.seen = output.detach() * 2
        return output.tanh()

    whole.part.register_forward_pre_hook(before, with_kwargs=True)
    whole.part.register_forward_hook(after)
    reference = copy.deepcopy(whole)
    parts = {whole.part: RoundPipeRunConfig(num_microbatch=2)}
    with AutoRoundPipe(PartsProgram(whole, parts), name="whole", devices=["cpu"] * 2) as pipe:
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        for _ in range(2):
            found, expected = pipe(x), reference(x)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(whole.part.seen, reference.part.seen, rtol=1e-12, atol=1e-12)
            assert whole.part.last_scale == reference.part.last_scale == 6.0
            found.square().sum().backward()
            expected.square().sum().backward()
        pipe.synchronize()
        assert calls == [("before", 4), ("after", 4)] * 4
        assert_same_gradients(whole, reference, 1e-10)
