"""What a worker's next run takes goes to the link before the layers of the present run, and before the next weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import Device, ExecutePlan, RoundPipeRunConfig
from roundpipe.core.schedule import Phase
from roundpipe.runtime.device.backend import Lane
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.engine import pace
from roundpipe.runtime.engine.runner import MicrobatchRunner
from roundpipe.runtime.engine.stage import Stage
from roundpipe.runtime.engine.values_ahead import ValuesAhead
from tests.runtime.cases_engine import backends_of, grains, workers
from tests.runtime.cases_shortage import skips
from tests.runtime.models import DTYPE, assert_equal_bits, assert_same, batch, gradients, mlp, square_loss
from tests.runtime.test_memory import assert_only_the_arenas_are_counted

NUM = 4
SINGLES = [(i, i + 1) for i in range(6)]
PLAN = ExecutePlan(SINGLES[:-1], SINGLES[-1], SINGLES[:-1][::-1])
COARSE = ExecutePlan([(0, 2), (2, 4)], (4, 6), [(2, 4), (0, 2)])
LINKED = Device("cpu", memory_bytes=10**9, upload_bytes_per_s=1e9, download_bytes_per_s=1e9)


def config(grain: Any = "stage", plan: ExecutePlan = PLAN, **options: Any) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=NUM, recompute_grain=grain, execute_plan=plan, residency="off", **options)


class Log:
    """What a worker does, in order: values, labels and gradients that it gives the link, weights, and its runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[tuple[str, int, int]] = []
        """What, of which run of the step: its job and microbatch."""
        self._local = threading.local()
        upload, run, recompute = CpuBackend.upload, MicrobatchRunner.run, Stage.recompute
        copied = ValuesAhead._copy  # the order within a run is told to nobody else
        own_gradients = MicrobatchRunner._upload_gradients  # as above

        def noted_upload(backend: Any, source: Any, target: Any = None, lane: Lane = Lane.UPLOAD) -> torch.Tensor:
            what = getattr(self._local, "what", "values")
            self._note("weights" if lane is Lane.WEIGHTS else what)
            return upload(backend, source, target, lane)

        def noted_run(runner: Any, step: Any, job: Any, *args: Any) -> None:
            self._local.run = job.index, args[-1]
            run(runner, step, job, *args)

        def noted_copy(ahead: Any, run: Any, values: Any, num_bytes: int, what: str, *args: Any) -> Any:
            before, self._local.run = self._local.run, (run[0].index, run[1])
            self._local.what = "gradients" if what.startswith("gradients") else "values"
            found = copied(ahead, run, values, num_bytes, what, *args)
            self._local.run, self._local.what = before, "values"
            return found

        def noted_gradients(runner: Any, *args: Any) -> Any:
            self._local.what = "gradients"
            found = own_gradients(runner, *args)
            self._local.what = "values"
            return found

        def noted_recompute(stage: Any, *args: Any) -> Any:
            self._note("layers")
            return recompute(stage, *args)

        def noted_layers(name: str) -> Any:
            real = getattr(Stage, name)

            def layers(stage: Any, *args: Any) -> Any:
                self._note("layers")
                return real(stage, *args)

            return layers

        monkeypatch.setattr(CpuBackend, "upload", noted_upload)
        monkeypatch.setattr(MicrobatchRunner, "run", noted_run)
        monkeypatch.setattr(MicrobatchRunner, "_upload_gradients", noted_gradients)  # as above
        monkeypatch.setattr(ValuesAhead, "_copy", noted_copy)  # as above
        monkeypatch.setattr(Stage, "recompute", noted_recompute)
        for name in ("forward", "forward_to_loss"):
            monkeypatch.setattr(Stage, name, noted_layers(name))

    def _note(self, what: str) -> None:
        self.entries.append((what, *getattr(self._local, "run", (-1, -1))))

    def positions(self, what: str) -> dict[tuple[int, int], int]:
        """By run, the first such entry."""
        found: dict[tuple[int, int], int] = {}
        for position, (kind, job, microbatch) in enumerate(self.entries):
            if kind == what:
                found.setdefault((job, microbatch), position)
        return found


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    yield Log(monkeypatch)


@pytest.mark.parametrize("is_accelerator", [False, True])
def test_values_go_before_the_layers_of_the_run_before(
    log: Log, monkeypatch: pytest.MonkeyPatch, is_accelerator: bool
) -> None:
    if is_accelerator:  # whose worker gives the link a visit's weights behind some runs of the visit before
        monkeypatch.setattr(pace.Pace, "has_lanes", True)
    model = mlp()
    depth, plan = 4, ExecutePlan(SINGLES[:3], SINGLES[3], SINGLES[:3][::-1])
    with roundpipe.RoundPipe(model, devices=[LINKED]) as piped:
        piped.forward_backward((batch(8),), loss_fn=square_loss, run_config=config(plan=plan))
        piped.synchronize()
    layers, values, gradients_of = log.positions("layers"), log.positions("values"), log.positions("gradients")
    runs = sorted(layers)
    assert len(runs) == NUM * (2 * depth - 1)
    assert all(values[following] < layers[run] for run, following in pairwise(runs))
    behind = [(run, following) for run, following in pairwise(runs) if following[0] > depth]
    assert all(gradients_of[following] < layers[run] for run, following in behind)  # as soon as there is room for both
    for position, (what, job, microbatch) in enumerate(log.entries):
        if what == "weights" and job >= 0 and microbatch + 1 < NUM:
            assert values[job, microbatch + 1] < position


@workers
@grains
@pytest.mark.parametrize("plan", [PLAN, COARSE], ids=["fine", "coarse"])
@pytest.mark.parametrize("build", [lambda: mlp(6), skips], ids=["mlp", "skips"])
def test_numbers_and_bytes_are_those_without(workers: int, grain: Any, plan: ExecutePlan, build: Any) -> None:
    found = []
    for device in ("cpu", LINKED):
        torch.manual_seed(0)
        model, results = build(), {}
        with roundpipe.RoundPipe(model, devices=[device] * workers) as piped:
            run = config(grain, plan)
            for number in range(2):
                loss = piped.forward_backward(
                    (batch(11),), label=batch(11, seed=5), loss_fn=square_loss, run_config=run
                )
                results[f"loss {number}"] = loss
            with torch.no_grad():
                results["outputs"] = piped(batch(11), roundpipe_run_config=run)
            piped.synchronize()
            if device is LINKED:
                assert_only_the_arenas_are_counted(piped)
            moved = sum(backend.moved_bytes[Lane.UPLOAD] for backend in backends_of(piped))
        found.append((results, gradients(model), moved))
    assert_equal_bits(found[1][0], found[0][0])
    assert_equal_bits(found[1][1], found[0][1])
    assert found[1][2] == found[0][2], "something came up twice"


@pytest.mark.parametrize("at", range(0, 30, 3))
def test_what_finds_no_memory_comes_up_in_its_turn(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    copied, number = ValuesAhead._copy, 0  # nobody else may fail here

    def short(*args: Any) -> Any:
        nonlocal number
        number += 1
        if number == at + 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return copied(*args)

    monkeypatch.setattr(ValuesAhead, "_copy", short)  # as above
    model = mlp(6)
    reference = copy.deepcopy(model)
    with roundpipe.RoundPipe(model, devices=[LINKED]) as piped:
        for _ in range(2):
            piped.forward_backward((batch(8),), loss_fn=square_loss, run_config=config())
            square_loss(reference(batch(8)), None).backward()
        piped.synchronize()
        assert_only_the_arenas_are_counted(piped)
    assert number > at
    assert_same(gradients(model), gradients(reference))


@grains
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_nothing_is_left_after_an_error(grain: Any, phase: Phase) -> None:
    class Fails(nn.Module):
        fails = True

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if self.fails and roundpipe.doing_recompute() == (phase is Phase.BACKWARD):
                raise ValueError("in a layer")
            return value * 2

    layers = [nn.Linear(6, 6, dtype=DTYPE) for _ in range(5)]
    failing = Fails()
    with roundpipe.RoundPipe(nn.Sequential(*layers[:3], failing, *layers[3:]), devices=[LINKED]) as piped:
        for _ in range(2):
            with pytest.raises(ValueError, match="in a layer"):
                piped.forward_backward((batch(8),), loss_fn=square_loss, run_config=config(grain))
                piped.synchronize()
            assert_only_the_arenas_are_counted(piped)
        failing.fails = False
        piped.forward_backward((batch(8),), loss_fn=square_loss, run_config=config(grain))
        piped.synchronize()
        assert_only_the_arenas_are_counted(piped)


def test_the_only_microbatch_has_nothing_ahead(log: Log) -> None:
    run = RoundPipeRunConfig(num_microbatch=1, execute_plan=PLAN, residency="off")
    with roundpipe.RoundPipe(mlp(6), devices=[LINKED]) as piped:
        piped.forward_backward((batch(8),), loss_fn=square_loss, run_config=run)
        piped.synchronize()
    layers, values = log.positions("layers"), log.positions("values")
    runs = sorted(layers)
    assert all(values[following] > layers[run] for run, following in zip(runs, runs[1:], strict=False))
