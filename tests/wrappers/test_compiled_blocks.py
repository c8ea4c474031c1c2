"""Modules that torch has compiled run compiled on the devices, on the copies that are there."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.core.compiled_modules import COMPILED_CALL, as_written, compiled_like, is_compiled, is_made_by_torch
from tests.equality import assert_same_gradients, eager_forward_backward
from tests.wrappers.cases_forwarding import DEVICES, squared
from tests.wrappers.test_compiled_modules import tiny_llama

HAS_REGIONS = "isolate_recompiles" in inspect.signature(torch.compile).parameters


class Counter:
    """A backend that counts what it compiles, and the calls of that."""

    def __init__(self) -> None:
        self.num_compiled = self.num_calls = 0

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        self.num_compiled += 1

        def run(*args: Any) -> Any:
            self.num_calls += 1
            return graph(*args)

        return run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.up(x).relu()))


class Gated(nn.Module):
    """A block with a part that is row-wise."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.rows = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.rows(x)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def call_compiled(model: Any, **options: Any) -> None:
    for block in model.blocks:
        block.compile(**options)


def wrapped_by_torch(model: Any, **options: Any) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **options)


def forward_compiled(model: Any, **options: Any) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **options)


def class_compiled(model: Any, **options: Any) -> None:
    kind = type("Compiled", (Block,), {"forward": torch.compile(Block.forward, **options)})
    for block in model.blocks:
        block.__class__ = kind


SPELLINGS = [call_compiled, wrapped_by_torch, forward_compiled, class_compiled]


@pytest.fixture(autouse=True)
def counter() -> Iterator[Counter]:
    torch._dynamo.reset()
    yield Counter()
    torch._dynamo.reset()


def assert_a_step_is_eager(
    pipe: Any, model: nn.Module, reference: nn.Module, x: torch.Tensor | None = None, name: str = "x"
) -> None:
    """Of a batch, which the model's forward takes under this name."""
    x = torch.randn(6, 6, dtype=torch.float64) if x is None else x
    loss = pipe.forward_backward((x,), loss_fn=squared)
    pipe.synchronize()
    torch.testing.assert_close(loss, eager_forward_backward(reference, {name: x}, squared, num_microbatches=3))
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.parametrize(("compile_blocks", "num_workers"), [(SPELLINGS[0], 1), *((each, 2) for each in SPELLINGS)])
def test_compiled_blocks_run_compiled(compile_blocks: Callable[..., None], num_workers: int, counter: Counter) -> None:
    """In forward, recomputation and without gradients; with no more compilations than for one block.

    That is without and with gradients, for each worker if both begin at once.
    """
    model = Model(12).double()
    reference = copy.deepcopy(model)
    compile_blocks(model, backend=counter)
    devices, num = DEVICES[:num_workers], num_workers + 1
    with roundpipe.compile(model, example_args=(torch.randn(6, 6).double(),), devices=devices) as pipe:
        assert_a_step_is_eager(pipe, model, reference)
        num_compiled, num_calls = counter.num_compiled, counter.num_calls
        assert num_compiled <= 2 * num_workers
        assert num_calls > 12 * num if num_workers > 1 else num_calls >= 12 * num  # again for most of the backwards
        assert_a_step_is_eager(pipe, model, reference)
        assert counter.num_calls == 2 * num_calls
        # two threads that look at once may not find what torch has compiled
        assert counter.num_compiled == num_compiled if num_workers == 1 else counter.num_compiled <= 2 * num_workers
        with torch.no_grad():
            x = torch.randn(6, 6).double()
            torch.testing.assert_close(pipe.eval()(x), reference.eval()(x))
        assert counter.num_calls == 2 * num_calls + 12 * num


@pytest.mark.parametrize("compile_blocks", SPELLINGS)
def test_compiled_blocks_of_a_model_in_parts_run_compiled(
    compile_blocks: Callable[..., None], counter: Counter
) -> None:
    model = Model().double()
    reference = copy.deepcopy(model)
    compile_blocks(model, backend=counter)
    with roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, devices=DEVICES) as pipe:
        assert_a_step_is_eager(pipe, model, reference)
        assert counter.num_compiled <= 2 * len(DEVICES) and counter.num_calls >= 4 * 3


def test_compiled_layers_of_a_sequence_run_compiled(counter: Counter) -> None:
    model = nn.Sequential(nn.Linear(6, 8), Block(), Block(), nn.Linear(8, 2)).double()
    reference = copy.deepcopy(model)
    model[1].compile(backend=counter, fullgraph=True)
    model[2] = torch.compile(model[2], backend=counter, fullgraph=True)
    with roundpipe.RoundPipe(model, devices=DEVICES) as pipe:
        assert_a_step_is_eager(pipe, model, reference, name="input")
    assert counter.num_calls >= 6


def test_a_block_that_is_compiled_between_steps(counter: Counter) -> None:
    model = Model(12).double()
    reference = copy.deepcopy(model)
    with roundpipe.compile(model, example_args=(torch.randn(6, 6).double(),), devices=DEVICES) as pipe:
        assert_a_step_is_eager(pipe, model, reference)
        call_compiled(model, backend=counter)
        assert_a_step_is_eager(pipe, model, reference)
        num_calls = counter.num_calls
        for block in model.blocks:
            setattr(block, COMPILED_CALL, None)
        assert_a_step_is_eager(pipe, model, reference)
        assert counter.num_calls == num_calls > 0


@pytest.mark.skipif(not HAS_REGIONS, reason="torch 2.13 and later keep what is compiled apart")
def test_what_workers_compile_leaves_the_models_own_calls_their_limit(counter: Counter) -> None:
    """With `fullgraph`, torch would raise an error. Such calls compile no more than without workers."""
    alone, model = Model().double(), Model().double()
    xs = [torch.randn(6, length, 6).double() for length in (5, 7, 9)]

    def num_compiled_of_own_calls(model: nn.Module) -> int:
        before = counter.num_compiled
        for training in (True, False):
            with torch.set_grad_enabled(training):
                for x in xs:
                    model.train(training)(x)
        return counter.num_compiled - before

    for each in (alone, model):
        call_compiled(each, backend=counter, fullgraph=True)
    expected = num_compiled_of_own_calls(alone)
    torch._dynamo.reset()
    with roundpipe.compile(model, devices=DEVICES) as pipe:
        for x in xs:
            pipe.forward_backward((x,), loss_fn=squared)
        with torch.no_grad():
            for x in xs:
                pipe.eval()(x)
        pipe.synchronize()
    assert 2 < num_compiled_of_own_calls(model) <= expected  # which sizes vary is known already


@pytest.mark.parametrize("compile_blocks", SPELLINGS[:3])
def test_later_wrappers_compile_nothing_again(compile_blocks: Callable[..., None], counter: Counter) -> None:
    model, x = Model().double(), torch.randn(6, 6).double()
    reference = copy.deepcopy(model)
    compile_blocks(model, backend=counter, dynamic=False)
    pipes, counts = [], []
    for _ in range(3):
        with roundpipe.compile(model, example_args=(x,), devices=DEVICES[:1]) as pipe:
            assert_a_step_is_eager(pipe, model, reference, x)
            pipes.append(pipe)
            counts.append(counter.num_compiled)
    assert 0 < counts[0] == counts[1] == counts[2]


def test_what_torch_is_told_not_to_compile() -> None:
    model = Model().double()
    reference = copy.deepcopy(model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compiler.disable(block)
    assert not is_compiled(model.blocks[0])
    with roundpipe.compile(model, example_args=(torch.randn(6, 6).double(),), devices=DEVICES) as pipe:
        assert_a_step_is_eager(pipe, model, reference)


@pytest.mark.parametrize("way", ["call", "wrapper"])
def test_a_model_that_is_compiled_as_a_whole_is_cut_with_a_warning(way: str, counter: Counter) -> None:
    model = Model().double()
    reference, whole = copy.deepcopy(model), model
    if way == "call":
        model.compile(backend=counter)
    else:
        whole = torch.compile(model, backend=counter)
    x = torch.randn(6, 6).double()
    with pytest.warns(UserWarning, match=r"torch has compiled the model itself.*block\.compile\(\)"):
        pipe = roundpipe.compile(whole, example_args=(x,), devices=DEVICES)
    with pipe:
        assert_a_step_is_eager(pipe, model, reference)
    assert not counter.num_calls


@pytest.mark.parametrize("way", ["call", "wrapper"])
def test_a_compiled_model_in_parts_runs_as_written_around_them(way: str, counter: Counter) -> None:
    """No graph holds the call of a part."""
    model = Model().double()
    reference, whole = copy.deepcopy(model), model
    if way == "call":
        model.compile(backend=counter, fullgraph=True)
    else:
        whole = torch.compile(model, backend=counter, fullgraph=True)
    with roundpipe.wrap_model_to_roundpipe(whole, use_sequential_preset=False, devices=DEVICES) as pipe:
        assert_a_step_is_eager(pipe, model, reference)
    assert not counter.num_calls


def test_adapters_in_compiled_blocks(counter: Counter) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model.base_model.model.config.use_cache = False
    reference = copy.deepcopy(model)
    for block in model.base_model.model.model.layers:
        block.compile(backend=counter)
    ids = torch.randint(1, 64, (6, 8))
    kwargs = {"input_ids": ids, "labels": ids}
    with roundpipe.compile(model, devices=DEVICES[:1]) as pipe:
        for _ in range(2):
            num_compiled = counter.num_compiled
            loss = pipe.forward_backward(input_kwargs=kwargs, loss_fn=lambda outputs, _: outputs.loss)
            pipe.synchronize()
            expected = eager_forward_backward(reference, kwargs, lambda outputs, _: outputs.loss, num_microbatches=2)
            torch.testing.assert_close(loss, expected)
            assert_same_gradients(model, reference, 1e-4)
    assert num_compiled == counter.num_compiled and counter.num_calls


def test_compiled_blocks_that_fill_a_cache_are_looked_into_with_a_warning(counter: Counter) -> None:
    model = tiny_llama()
    for block in model.model.layers:
        block.compile(backend=counter)
    ids = torch.randint(1, 64, (4, 8))
    layers = pytest.importorskip("transformers.modeling_layers")
    is_called_there = "__call__" in vars(layers.GradientCheckpointingLayer)
    file = "modeling_layers" if is_called_there else "modeling_llama"
    with pytest.warns(
        UserWarning, match=rf"torch has compiled model\.layers\.0.* stay whole.*{file}.*use_cache = False"
    ):
        pipe = roundpipe.compile(model, example_kwargs={"input_ids": ids}, devices=DEVICES)
    pipe.close()


def test_compiled_blocks_are_not_taken_apart_for_tiles(counter: Counter) -> None:
    """Torch would compile the pieces, for each kind of tile, and give up on the block."""
    model = nn.Sequential(nn.Linear(6, 8), *(Gated() for _ in range(12)), nn.Linear(8, 2)).double()
    reference = copy.deepcopy(model)
    for index, block in enumerate(model[1:-1], 1):
        if index % 2:
            block.compile(backend=counter)
        else:
            model[index] = torch.compile(block, backend=counter)
    x = torch.randn(6, 16, 6).double()
    config = RoundPipeRunConfig(tiles=4)
    with roundpipe.compile(model, example_args=(x,), devices=DEVICES[:1], model_run_config=config) as pipe:
        for _ in range(2):
            num_compiled = counter.num_compiled
            assert_a_step_is_eager(pipe, model, reference, x, name="input")
    assert 0 < num_compiled == counter.num_compiled <= 2


def test_torch_compiles_as_often_per_worker_as_for_one() -> None:
    """Else it would run what more workers than that call as written: each device is another variant."""
    kept, seen = torch._dynamo.config.recompile_limit, set()
    before = torch._dynamo.config.recompile_limit = 7  # before torch 2.12, other tests may have left a larger one

    def loss(output: torch.Tensor, label: None) -> torch.Tensor:
        seen.add(torch._dynamo.config.recompile_limit)
        return squared(output)

    with roundpipe.compile(Model().double(), devices=["cpu"] * 4) as pipe:
        pipe.forward_backward((torch.randn(8, 6).double(),), loss_fn=loss)
        pipe.synchronize()
    assert seen == {4 * before}
    try:
        assert torch._dynamo.config.recompile_limit in (before, 4 * before)  # the latter before torch 2.12
    finally:
        torch._dynamo.config.recompile_limit = kept


def test_what_is_known_of_a_compiled_function() -> None:
    """If this fails, torch marks functions that it has compiled in another way than compiled_modules.py says."""
    counter, block, other = Counter(), Block(), Block()
    block.compile(backend=counter)
    function: Any = getattr(block, COMPILED_CALL)
    assert is_made_by_torch(function) and not is_made_by_torch(Block.forward) and not is_made_by_torch(block.forward)
    assert as_written(function) == block._call_impl
    assert as_written(torch.compile(block).forward) is block
    linear = torch.compile(nn.Linear(2, 2), backend=counter)
    assert isinstance(as_written(linear.forward), nn.Linear)
    x = torch.randn(2, 8)
    assert torch.equal(compiled_like(function, other._call_impl)(x), other(x))
    assert torch.equal(compiled_like(linear.forward, other)(x), other(x))
    assert (counter.num_compiled, counter.num_calls) == (2, 2)


@pytest.mark.parametrize(("dynamic", "num_compiled"), [(False, 4), (True, 1), (None, 2)])
def test_copies_are_compiled_with_the_options_of_the_original(
    dynamic: bool | None, num_compiled: int, counter: Counter
) -> None:
    block = Block()
    block.compile(backend=counter, dynamic=dynamic)
    copied = compiled_like(getattr(block, COMPILED_CALL), Block()._call_impl)
    for length in (3, 4, 5, 6):
        copied(torch.randn(length, 8))
    assert counter.num_compiled == num_compiled


def test_threads_that_begin_together_compile_once(counter: Counter) -> None:
    block, x, num_threads = Block(), torch.randn(2, 8), 4
    block.compile(backend=counter)
    function: Any = getattr(block, COMPILED_CALL)
    meeting = threading.Barrier(num_threads)

    def run(other: Block) -> None:
        copied = compiled_like(function, other._call_impl)
        meeting.wait(60)
        copied(x)

    threads = [threading.Thread(target=run, args=(Block(),)) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counter.num_compiled, counter.num_calls) == (1, num_threads)
    block(x)
    assert counter.num_compiled == 1 + HAS_REGIONS  # if not, torch names regions in another way than we do


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compile_blocks", SPELLINGS[:2])
def test_compiled_blocks_on_a_gpu(compile_blocks: Callable[..., None]) -> None:
    model = Model()
    reference = copy.deepcopy(model).cuda()
    compile_blocks(model)
    compile_blocks(reference)
    x = torch.randn(6, 6)
    with roundpipe.compile(model, example_args=(x,), devices=["cuda:0"] * 2) as pipe:
        for _ in range(2):
            loss = pipe.forward_backward((x,), loss_fn=squared)
            pipe.synchronize()
            expected = eager_forward_backward(reference, {"x": x.cuda()}, squared, num_microbatches=3)
            torch.testing.assert_close(loss, expected.cpu(), rtol=1e-4, atol=1e-4)
            for one, two in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one.grad, two.grad.cpu(), rtol=1e-4, atol=1e-4)
