"""Runs steps on the workers: deals them out and waits for them.

A step may outlive the call that made it (`StepSpec.may_outlive_call`): the call returns with the losses, or with the
last run of a layer that draws random numbers, and the next step's first jobs run beside its last ones. What it raises
then is raised at the next call.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe.core import inventory
from roundpipe.core.errors import ClosedError, ConfigError
from roundpipe.core.inventory import Inventory
from roundpipe.core.layers import LayerChain
from roundpipe.core.schedule import Phase
from roundpipe.runtime.device.backend import Backend, UnplannedMemory, are_peers
from roundpipe.runtime.device.host_threads import leave_cores
from roundpipe.runtime.engine.allocator_room import RetryCounter
from roundpipe.runtime.engine.host_values import HostGradients, HostValues
from roundpipe.runtime.engine.recompute import ForwardRecord
from roundpipe.runtime.engine.running import RunningSteps, raise_error
from roundpipe.runtime.engine.spec import StepSpec
from roundpipe.runtime.engine.step import Shortage, StepState
from roundpipe.runtime.engine.worker import Worker
from roundpipe.runtime.profiling.meter import MeterReading, Recorder
from roundpipe.runtime.profiling.start_log import StartLog
from roundpipe.runtime.weights.gate import Gates, Steps
from roundpipe.runtime.weights.host_weights import HostWeights
from roundpipe.runtime.weights.layer_weights import LayerWeights
from roundpipe.runtime.weights.twin_group import TwinGroup
from roundpipe.runtime.weights.twins import Twins


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The host's side of a chain, with what its layers held when it was looked at."""

    held: Inventory
    forms: list[Any]
    layers: list[LayerWeights]

    def is_current(self, held: Inventory, host: HostWeights) -> bool:
        """Whether nothing has changed since; where tensors are made of others it would not be seen."""
        is_same = held is self.held and host.has(self.layers) and held.forms() == self.forms
        return is_same and all(weights.is_plain for weights in self.layers)


class Engine(Steps):
    """The workers of one model, one per entry of ``devices=``.

    ``has_attention``: whether the model is likely to compute attention.
    """

    def __init__(self, backends: Sequence[Backend], name: str, gates: Gates, *, has_attention: bool = False) -> None:
        self.backends = tuple(backends)
        self.steps = RunningSteps(gates)
        self._gates = gates
        self.start = StartLog(name)
        self.retries = RetryCounter(backends)
        self.twins = TwinGroup([Twins(backend) for backend in backends])
        num_accelerators = sum(backend.device.type != "cpu" for backend in backends)
        self.begin_host_work = functools.partial(leave_cores, num_accelerators)
        """For threads that compute on the host."""
        self._workers = [
            Worker(
                i,
                backends,
                f"{name} worker {i}",
                gates,
                self.steps,
                self.twins.of_workers[i],
                self.begin_host_work,
                has_attention,
            )
            for i in range(len(backends))
        ]
        self._owners: list[tuple[weakref.ref[object], list[torch.nn.Module]]] = []
        """Chains and others that ran here, and their layers, which the workers and the host's side know of."""
        self._prepared: weakref.WeakKeyDictionary[LayerChain, _Prepared] = weakref.WeakKeyDictionary()
        self._closed = False
        self._callers: set[int] = set()
        """Threads that made a call."""
        self._recorder: Recorder | None = None
        self.next_job = 0
        self.before_packing: Callable[[], None] = lambda: None
        """Called before weights are moved."""

    @property
    def has_peers(self) -> bool:
        """Whether all devices read each other's memory."""
        return are_peers(self.backends)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def has_accelerators(self) -> bool:
        return any(backend.device.type != "cpu" for backend in self.backends)

    def prepare(
        self,
        chain: LayerChain,
        host: HostWeights,
        *,
        wants_gradients: bool,
        earlier: Sequence[LayerWeights] = (),
        held: Inventory | None = None,
    ) -> list[LayerWeights]:
        """The host's side of a chain's layers, packed; waits for running steps where that moves weights.

        A backward gives what its forward got as ``earlier``; ``held`` is what the layers hold, if the caller has just
        looked. Raises a `ConfigError` if the model was changed since, or if a hook can't run, where gradients are
        wanted in the step or in one that follows.
        """
        for weights in earlier:
            weights.check_structure()
        held, known = held or inventory.of_children(chain), self._prepared.get(chain)
        if known is None or not known.is_current(held, host) or self._ended():
            layers = self.lay_out(chain, [spec.name for spec in chain.specs], list(chain), host)
            known = self._prepared[chain] = _Prepared(held, held.forms(), layers)
        if wants_gradients:
            host.check_hooks(known.layers, itertools.chain.from_iterable(held.parameters))
        return known.layers

    def lay_out(
        self, owner: object, names: Sequence[str], layers: list[torch.nn.Module], host: HostWeights
    ) -> list[LayerWeights]:
        """The host's side of layers, packed; known for as long as their owner is there."""
        ended = self._ended()
        if ended or not all(map(host.is_prepared, layers)):
            self.before_packing()
            self.steps.wait_idle()  # packing moves the user's tensors, and so does a hand-over
            self._gates.weights.wait([tensor for each in layers for tensor in each.parameters()], "packing of weights")
            self._forget(ended, host)
            host.prepare(names, layers)
        if not any(reference() is owner for reference, _ in self._owners):
            self._owners.append((weakref.ref(owner), layers))
        return [host.layer(name, layer) for name, layer in zip(names, layers, strict=True)]

    def _ended(self) -> list[list[torch.nn.Module]]:
        """Layers of owners that are gone."""
        return [layers for reference, layers in self._owners if reference() is None]

    def _forget(self, ended: Sequence[Sequence[torch.nn.Module]], host: HostWeights) -> None:
        """Drop what is kept per layer of owners that are gone, such as traces that newer ones replaced."""
        self._owners = [entry for entry in self._owners if entry[0]() is not None]
        alive = {id(layer) for _, layers in self._owners for layer in layers}
        for layer in (layer for layers in ended for layer in layers if id(layer) not in alive):
            host.forget(layer)
            for worker in self._workers:
                worker.forget(layer)

    def run(
        self,
        spec: StepSpec,
        values: HostValues,
        gradients: HostGradients | None = None,
        forward: ForwardRecord | None = None,
        added: set[int] | None = None,
        when_short: Shortage | None = None,
    ) -> StepState:
        """Run a step to its end, or until its losses are known and all is drawn if it may outlive the call.

        A backward gets the gradients of the outputs, and what its forward left: values and a record. Values are used
        up. ``added`` are layers whose gradients an attempt before has added, and takes in those of this one. If workers
        run out of memory and this does not raise it, ``when_short`` is asked: see `RunningSteps`. The first error of a
        worker is raised as it was raised; the engine can run the next step then.
        """
        if self._closed:
            raise ClosedError("the model was closed; compile it again to go on")
        self.steps.board.check_here()
        self._callers.add(threading.get_ident())
        busy = [worker for worker in self._workers if spec.schedule.tasks(worker.index)]
        gradients = gradients or [{} for _ in values]
        forward = forward or ForwardRecord(dict(spec.plain))
        step = StepState(
            spec, self.steps.board, values, gradients, forward, set() if added is None else added, len(busy)
        )
        step.when_short = when_short
        try:
            self.steps.begin(step)
            self.next_job = spec.schedule.next_job
            with self.start.part("first round"):
                for worker in busy:
                    worker.submit(step)
                if spec.may_outlive_call:
                    step.wait_losses()
                    step.wait_runs()
                    step.detach()
                    self.steps.leave_alone(step)
                else:
                    step.wait_over()
        except BaseException as interrupt:
            step.cancel(interrupt)
            for worker in busy:
                worker.withdraw(step)
            step.wait_over()
            raise
        if step.failed and not step.is_unattended:
            step.wait_over()
            raise_error(step)
        if any(job.phase is not Phase.FORWARD for job in spec.schedule.jobs):
            self.start.end()
        return step

    @property
    def is_inside(self) -> bool:
        """Whether the calling code runs for a step: a layer, a loss function, a hook. It can't wait for that step."""
        thread = threading.current_thread()
        # Python did not start autograd's own threads, for accelerators
        of_autograd = isinstance(thread, threading._DummyThread) and thread.ident not in self._callers
        return any(worker.is_current for worker in self._workers) or (of_autograd and bool(self.running()))

    def refuse_inside(self, what: str) -> None:
        self.steps.board.check_here()
        if self.is_inside:
            raise ConfigError(
                f"{what} was called by a layer, a loss_fn or a hook of the same model, and would wait for the round "
                "that it is part of; call it after forward_backward. parameters() may be asked for anywhere"
            )

    def running(self) -> list[StepState]:
        return self.steps.now()

    def wait_idle(self) -> None:
        self.steps.wait_idle()

    def finish(self) -> None:
        self.wait_idle()
        self.raise_pending()

    def raise_pending(self) -> None:
        self.steps.raise_pending()

    def release_memory(self, kept_bytes: int = 0) -> None:
        """Give back what devices keep between steps, such as room for weights; while no step runs.

        ``kept_bytes`` on the first of them are the caller's own.
        """
        self.steps.wait_idle()
        for worker in self._workers:
            worker.backend.synchronize()
            worker.pace.let_go()
            worker.arena.free()
            worker.backend.release_cached()
            worker.backend.note_others(worker.arena.num_bytes + kept_bytes)
            kept_bytes = 0

    def begin_call(self) -> None:
        """Raise what is pending; devices warm up in the workers' threads, beside what the caller does until a step."""
        self.raise_pending()
        for worker in self._workers:
            worker.thread.start()

    def take_budgets(self) -> list[int | None]:
        """Per worker, the device memory to plan for now that it is warm; None: no limit."""
        for worker in self._workers:
            worker.thread.start()
        self._gates.board.wait(
            lambda: all(worker.thread.has_begun for worker in self._workers), "the caller", "the start of the workers"
        )
        return [backend.take_budget() for backend in self.backends]

    def start_recording(self) -> Recorder:
        """A recorder that is told what the workers do from now on."""
        if self._recorder is not None:
            raise ConfigError("a timeline of this model is being recorded already; leave that context first")
        recorder = self._recorder = Recorder({worker.device: worker.backend for worker in self._workers})
        for worker in self._workers:
            worker.record(recorder)
        return recorder

    def stop_recording(self) -> None:
        """Wait until what was recorded is done; errors of steps are left to the next call."""
        try:
            self.steps.wait_idle()
            if not self._closed:
                for backend in self.backends:
                    backend.synchronize()
        finally:
            self._recorder = None
            for worker in self._workers:
                worker.record(None)

    def read_meters(self) -> list[MeterReading]:
        """Per worker, where its time went since it began."""
        return [worker.meter.read() for worker in self._workers]

    @property
    def num_trained(self) -> int:
        return self.steps.num_trained

    def home_s(self) -> float:
        return sum(worker.home_s for worker in self._workers)

    def measure_next(self) -> None:
        """Have the next step measured, on accelerators too."""
        for worker in self._workers:
            worker.meter.measure_next()

    @property
    def devices(self) -> list[str]:
        """The workers' names in timelines and reports."""
        return [worker.device for worker in self._workers]

    def peak_bytes(self, reset: bool = False) -> list[int]:
        """Per worker, the largest number of bytes in use on its device at once."""
        return [backend.peak_bytes(reset) for backend in self.backends]

    def unplanned(self) -> list[UnplannedMemory]:
        """Per worker, what is in use on its device beside what is planned for."""
        return [backend.unplanned() for backend in self.backends]

    def resident_bytes(self) -> list[int]:
        """Per worker, bytes of weights that stay on its device."""
        return [worker.arena.resident_bytes for worker in self._workers]

    def close(self) -> None:
        """Cancel what is running, end the threads, give the devices' memory back, raise what is pending.

        Safe to call twice, also if interrupted.
        """
        self._closed = True
        for step in self.running():
            step.is_unattended &= step.failed  # what is cancelled here is nobody's error
            step.cancel(ClosedError("the model was closed while a round was running"))
        for worker in self._workers:
            worker.close()
        self.raise_pending()
