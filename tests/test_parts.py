"""Parts: what running a module apart would lose is noticed, and such a module goes back to the CPU."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from roundpipe import (
    AutoRoundPipe,
    BackwardError,
    ConfigError,
    Device,
    RoundPipeRunConfig,
    doing_recompute,
)
from roundpipe.core import trees
from roundpipe.effects.run_once import FirstCall, first_to_run_once
from roundpipe.wrappers.auto import Parts, PartsProgram
from roundpipe.wrappers.part import IN_ONE_PIECE, overlaid
from tests.equality import assert_same_gradients, assert_same_state

WIDTH = 6


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


def auto(model: nn.Module, **options: Any) -> AutoRoundPipe:
    parts = {module: RoundPipeRunConfig() for module in model.children()}
    return AutoRoundPipe(PartsProgram(model, Parts(parts)), name="whole", devices=["cpu"], **options)


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
    with AutoRoundPipe(PartsProgram(model, Parts(parts)), name="whole", devices=["cpu"]) as pipe:
        x = torch.randn(4, WIDTH, dtype=torch.float64)
        with pytest.warns(UserWarning, match="dropout runs on the CPU.*it returns memory of a tensor that it is given"):
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
    with AutoRoundPipe(PartsProgram(model, Parts(parts)), name="whole", devices=["cpu"] * 2) as pipe:
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
    with AutoRoundPipe(PartsProgram(model, Parts(parts)), name="whole", devices=["cpu"] * 2) as pipe:
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
    with AutoRoundPipe(PartsProgram(whole, Parts(parts)), name="whole", devices=["cpu"] * 2) as pipe:
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


class Experts(nn.Module):
    """Two experts, each for those rows that its sign fits."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, goes_to: torch.Tensor) -> torch.Tensor:
        out = x * self.router(x)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(goes_to == index)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


@pytest.mark.parametrize("budget_bytes", [None, 40_000])
def test_an_expert_that_no_token_goes_to_gets_gradients_of_zero(budget_bytes: int | None) -> None:
    model = Experts().double()
    reference = copy.deepcopy(model)
    parts = {module: RoundPipeRunConfig() for module in [model.router, *model.experts]}
    devices = [Device("cpu", memory_bytes=budget_bytes)] * 2
    with AutoRoundPipe(PartsProgram(model, Parts(parts)), name="whole", devices=devices) as pipe:
        for goes_to in (torch.arange(6) % 2, torch.zeros(6), torch.ones(6), torch.arange(6) % 2):
            x = torch.randn(6, WIDTH, dtype=torch.float64)
            found, expected = pipe(x, goes_to), reference(x, goes_to)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            found.square().sum().backward()
            expected.square().sum().backward()
            pipe.synchronize()
            assert_same_gradients(model, reference, 1e-10)
            assert all(parameter.grad is not None for parameter in model.parameters())
            for one in (model, reference):
                one.zero_grad()


def test_names_of_modules_are_free() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("reads", "makes", "unpack", "model", "source"):
                self.add_module(name, nn.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.source(self.model(self.unpack(self.makes(self.reads(x)))))

    model = Named()
    x = torch.randn(4, WIDTH)
    with auto(model) as pipe:
        torch.testing.assert_close(pipe(x), model(x))


def test_a_list_argument_that_is_only_read_is_no_obstacle(recwarn: pytest.WarningsRecorder) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, others: list[torch.Tensor], *, scale: dict[str, float]) -> torch.Tensor:
            return self.linear(x + others[0]) * scale["value"]

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reads = Reads()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.reads(x, [x, 2 * x], scale={"value": 0.5})

    model = Calls()
    x = torch.randn(4, WIDTH)
    with auto(model) as pipe:
        torch.testing.assert_close(pipe(x), model(x))
    assert not recwarn


def test_modules_that_write_into_what_the_one_before_made_stay_together(recwarn: pytest.WarningsRecorder) -> None:
    stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    model = nn.ModuleDict({"stack": stack})
    model.forward = lambda x: model["stack"](x)  # type: ignore[method-assign]
    reference = copy.deepcopy(stack)
    x = torch.randn(4, WIDTH)
    with auto(model) as pipe:
        pipe.model["stack"](x).sum().backward()
        pipe.synchronize()
    reference(x).sum().backward()
    assert_same_gradients(stack, reference, 1e-6)
    assert not recwarn


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factor = 1.0
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x) * self.factor
        self.aux = out.sum()
        return out


def test_attributes_of_modules_on_the_host_are_the_models() -> None:
    model = Caller()
    x = torch.randn(4, WIDTH)
    with auto(model) as pipe:
        pipe.factor = 3.0
        assert model.factor == 3.0
        out = pipe(x)
        torch.testing.assert_close(out, 3 * model.linear(x))
        assert model.aux is not None and model.aux.requires_grad
        torch.testing.assert_close(pipe.aux, out.sum())


def test_replaced_submodules_are_refused() -> None:
    model = Caller()
    with auto(model) as pipe:
        model.linear = nn.Linear(WIDTH, WIDTH)
        with pytest.raises(ConfigError, match="submodules of a Caller were replaced"):
            pipe(torch.randn(4, WIDTH))


def test_errors_of_a_part_keep_their_type_and_the_next_call_works() -> None:
    model = Caller()
    with auto(model) as pipe:
        with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
            pipe(torch.randn(4, WIDTH + 1))
        assert any("linear" in note for note in caught.value.__notes__)
        assert pipe(torch.randn(4, WIDTH)).shape == (4, WIDTH)


class TakesApart(nn.Module):
    """Calls a stack as a whole, and its children one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stack(self.stack[0](x))
        for module in self.stack:
            x = module(x)
        return self.stack[-2:](x) * len(self.stack)


def test_children_of_a_sequential_part_can_be_taken() -> None:
    model = TakesApart()
    eager = copy.deepcopy(model)
    x = torch.randn(4, WIDTH)
    eager(x).square().mean().backward()
    with auto(model) as pipe:
        pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().mean(), run_config=IN_ONE_PIECE)
        pipe.synchronize()
        assert_same_gradients(model, eager, 1e-6)


def test_code_around_a_part_finds_an_object_of_its_class() -> None:
    class Asks(Caller):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append((type(self.linear), isinstance(self.linear, nn.Linear), self.linear.weight is weight))
            return super().forward(x)

    found: list[Any] = []
    model = Asks()
    weight = model.linear.weight
    with auto(model) as pipe:
        pipe(torch.randn(4, WIDTH))
        assert pipe._runner.tree.parts[0].why_on_host is None  # no public name tells
    assert found == [(nn.Linear, True, True)]


def test_a_part_whose_class_changes_what_a_call_is() -> None:
    class Doubled(nn.Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 2

    model = Caller()
    model.linear = Doubled(WIDTH, WIDTH)
    reference, x = copy.deepcopy(model), torch.randn(4, WIDTH)
    with auto(model) as pipe:
        torch.testing.assert_close(pipe(x), reference(x))


def test_the_first_config_that_gives_a_field_wins() -> None:
    both = overlaid(IN_ONE_PIECE, RoundPipeRunConfig(num_microbatch=4, recompute_grain="layer"))
    assert both == RoundPipeRunConfig(num_microbatch=1, recompute_grain="layer")


# What would run twice


@dataclasses.dataclass
class Tally:
    """An object that modules share."""

    number: int = 0
    loss: Any = 0


class Remembers(nn.Module):
    """A factor that each call of its forward changes; what it keeps is the subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.tally = Tally()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return out * self.factor(out)

    def factor(self, out: torch.Tensor) -> Any:
        raise NotImplementedError


class Counts(Remembers):
    number = 0

    def factor(self, out: torch.Tensor) -> Any:
        self.number += 1
        return self.number


class ReplacesTuple(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.seen = (0,)

    def factor(self, out: torch.Tensor) -> Any:
        self.seen = (self.seen[0] + 1, *self.seen)
        return self.seen[0]


class ReplacesList(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def factor(self, out: torch.Tensor) -> Any:
        self.seen = [*self.seen, len(out)]
        return len(self.seen)


class ChangesContainers(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.kinds = (set[int](), collections.deque[int](), collections.Counter[str]())
        self.nested = {"of": [0]}

    def factor(self, out: torch.Tensor) -> Any:
        some, queue, counter = self.kinds
        some.add(len(some))
        queue.append(1)
        counter["calls"] += 1
        self.nested["of"][0] += 1
        return len(some) + len(queue) * counter["calls"] + self.nested["of"][0]


class ChangesObject(Remembers):
    def factor(self, out: torch.Tensor) -> Any:
        self.tally.number += 1
        return self.tally.number


class CountsOnce(Remembers):
    """Names of attributes that are made up are read by no code that can be looked at."""

    def factor(self, out: torch.Tensor) -> Any:
        vars(self)["number"] = vars(self).get("number", 0) + 1
        return vars(self)["number"]


class Draws(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def factor(self, out: torch.Tensor) -> Any:
        return self.random.random()


class Advances(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.factors = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])

    def factor(self, out: torch.Tensor) -> Any:
        return next(self.factors)


class AddsToTheLoss(Remembers):
    """An activation reaches the root through an object."""

    def factor(self, out: torch.Tensor) -> Any:
        self.tally.loss = self.tally.loss + out.square().mean()
        return 1


class WritesWeight(nn.Module):
    """By a function that code which only looks at names does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nn.init.constant_(self.linear.bias, 0.25)
        return self.linear(x)


class ReplacesWeight(Remembers):
    def factor(self, out: torch.Tensor) -> Any:
        self.linear._parameters["bias"] = nn.Parameter(self.linear.bias.detach() * 0.5)
        return 1


class Around(nn.Module):
    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tally = getattr(self.odd, "tally", Tally())
        tally.loss = 0
        out = self.odd(self.first(x))
        return out + tally.loss


REMEMBERING = [
    *(Counts, ReplacesTuple, ReplacesList, ChangesContainers, ChangesObject, CountsOnce, Draws, Advances),
    *(AddsToTheLoss, WritesWeight, ReplacesWeight),
]


@pytest.mark.parametrize("make", REMEMBERING)
@pytest.mark.filterwarnings("ignore:forward_backward of an AutoRoundPipe")
def test_what_must_run_once_runs_on_the_host(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Around(make()).double()
    reference = copy.deepcopy(model)
    with auto(model, model_run_config=RoundPipeRunConfig(num_microbatch=2)) as pipe:
        for step in range(2):
            x = torch.randn(6, WIDTH, dtype=torch.float64)
            with pytest.warns(UserWarning) if step == 0 else contextlib.nullcontext() as caught:
                found = pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().sum())
            expected = torch.zeros((), dtype=torch.float64)
            for piece in x.tensor_split(2):
                loss = reference(piece).square().sum()
                loss.backward()
                expected += loss.detach()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            pipe.synchronize()
            if make is not ReplacesWeight:
                assert_same_gradients(model, reference, 1e-10)
            if step == 0:
                assert any("odd runs on the CPU from now on" in str(one.message) for one in caught)
        for name, value in vars(reference.odd).items():
            if isinstance(value, (int, tuple, list, dict)) and not name.startswith("_"):
                assert vars(model.odd)[name] == value, name
        assert_same_state(model, reference, 1e-12)


def test_what_the_first_call_changed_is_put_back() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.names: list[Any] = []
            self.number = 1

    odd = Odd()
    assert first_to_run_once(odd) is None
    state = copy.deepcopy(odd.state_dict())
    before = FirstCall(odd)
    assert before.diff() is None
    odd.norm(torch.randn(4, WIDTH))
    odd.number, odd.more = 2, 3
    assert before.diff() is None  # buffers and attributes are looked at elsewhere
    odd.names.append("a")
    assert before.diff() == "Odd.names"
    before.restore()
    assert odd.number == 1 and odd.names == [] and "more" not in vars(odd)
    torch.testing.assert_close(dict(odd.state_dict()), dict(state))


def test_what_only_a_recomputation_does_is_an_error() -> None:
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if doing_recompute():
                self.seen = x
            return super().forward(x)

    model = Around(Odd(WIDTH, WIDTH))
    with auto(model) as pipe:
        out = pipe(torch.randn(4, WIDTH))
        with pytest.raises(ConfigError, match=r"an? Odd, run again for the backward.*attribute 'seen'.*skip_modules"):
            out.sum().backward()


def test_a_part_without_state_stays_on_the_devices() -> None:
    """Neither tables of its own, nor what a hook writes down for the user, keep it from there."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.sizes = {"a": 1}

        @functools.cached_property
        def scale(self) -> float:
            return 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.length = len(x)
            return self.linear(x) * self.scale * self.sizes["a"]

    model = Around(Plain())
    noted: list[int] = []
    model.odd.linear.register_forward_hook(lambda module, args, output: noted.append(len(output)))
    with auto(model) as pipe:
        pipe(torch.randn(4, WIDTH)).sum().backward()
        (part,) = (part for part in pipe._runner.tree.parts if part.module is model.odd)  # no public name tells
        assert part.why_on_host is None and noted
        assert model.odd.length == 2


def test_hooks_around_what_goes_back_to_the_host_run_once() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.linear(x)
            return self.seen * 2

    model = Around(Odd())
    reference = copy.deepcopy(model)
    calls: list[str] = []
    model.odd.register_forward_pre_hook(lambda module, args: calls.append("before"))
    model.odd.register_forward_hook(lambda module, args, output: calls.append("behind") or output + 1)
    x = torch.randn(4, WIDTH)
    with auto(model) as pipe:
        with pytest.warns(UserWarning, match="odd runs on the CPU"):
            torch.testing.assert_close(pipe(x), reference(x) + 1)
        torch.testing.assert_close(pipe(x), reference(x) + 1)
    assert calls == ["before", "behind"] * 2
    assert isinstance(model.odd.seen, torch.Tensor)


class Equalized:
    """Makes the weight from a parameter before each call."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        module.weight = module.weight_orig * 0.5  # type: ignore[assignment]

    @staticmethod
    def apply(module: nn.Linear) -> nn.Linear:
        weight = module.weight
        del module._parameters["weight"]
        module.register_parameter("weight_orig", nn.Parameter(weight.data))
        module.weight = weight.data  # type: ignore[assignment]
        module.register_forward_pre_hook(Equalized())
        return module


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "pruned", "equalized"])
@pytest.mark.parametrize("holder", ["alone", "Sequential"])
def test_weights_that_hooks_make(kind: str, holder: str) -> None:
    make = {
        "spectral_norm": nn.utils.spectral_norm,
        "weight_norm": nn.utils.weight_norm,
        "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.3),
        "equalized": Equalized.apply,
    }[kind]

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            normed = make(nn.Linear(WIDTH, WIDTH))
            self.first = normed if holder == "alone" else nn.Sequential(normed, nn.Tanh())
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    model = Normed().double()
    torch.manual_seed(0)
    reference = Normed().double()
    parts = dict.fromkeys(model.children(), IN_ONE_PIECE)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "model_run_config": IN_ONE_PIECE}
    with AutoRoundPipe(PartsProgram(model, Parts(parts, splits_inside=False)), **options) as pipe:
        own = torch.optim.SGD(pipe.optim_parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(4, WIDTH, dtype=torch.float64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().sum())
            expected = reference(x).square().sum()
            expected.backward()
            pipe.synchronize()
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0, msg=f"step {step}")
            assert_same_gradients(model, reference, 1e-9)
            optimizer.step()
            optimizer.zero_grad()
            pipe.step(lambda: (own.step(), own.zero_grad()), is_async=False)
        pipe.synchronize()
        assert_same_state(model, reference, 1e-9)


def test_nested_tensors_are_for_the_host() -> None:
    """Torch's encoder gives them to its layers in eval mode; in training these run on the devices."""

    class Encodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, src_key_padding_mask=padding)

    model = Encodes()
    reference = copy.deepcopy(model)
    x, padding = torch.randn(4, 5, 8), torch.zeros(4, 5, dtype=torch.bool)
    padding[1:, 3:] = True
    parts = dict.fromkeys(model.encoder.layers, IN_ONE_PIECE)
    with AutoRoundPipe(PartsProgram(model, Parts(parts)), devices=["cpu"]) as pipe, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors")
        warnings.filterwarnings("error", message=".*runs on the CPU")
        for is_training in (True, False, True):
            pipe.train(is_training)
            reference.train(is_training)
            with torch.set_grad_enabled(is_training):
                torch.testing.assert_close(pipe(x, padding), reference(x, padding), rtol=1e-5, atol=1e-6)
