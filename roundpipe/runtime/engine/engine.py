"""Runs rounds on the workers: deals them out, waits for them, and keeps several apart that are under way at once.

    caller                       worker K mod N
    Engine.run(round) --------> PREFETCH: weights of the next job start coming up
          |                     RUN (K, m): wait for (K-1, m); values up; stage; values or gradients down
          |                     RELEASE: gradients down, memory given back
          <--- all done, or the losses known, or the first error ---

A round may outlive the call that made it (`Round.may_outlive_call`): the call returns with the losses, and the next
round's first jobs run beside its last ones. What it raises then is raised at the next call.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from roundpipe.core.errors import ClosedError, ConfigError
from roundpipe.core.layers import LayerChain
from roundpipe.core.schedule import ScheduleKind
from roundpipe.runtime.device.backend import Backend
from roundpipe.runtime.engine.step import Round
from roundpipe.runtime.engine.worker import Worker
from roundpipe.runtime.profiling.meter import MeterReading
from roundpipe.runtime.profiling.recorder import Recorder
from roundpipe.runtime.weights.gate import Gates
from roundpipe.runtime.weights.host_weights import HostWeights

KEPT_ROUNDS = 64
"""Rounds whose seconds are kept, for their median."""


class StepLog:
    """How many rounds ran, and how long the latest ones took."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.first_begun_s = 0.0
        """Of those since `reset`, by ``time.perf_counter``; 0: none."""
        self.last_over_s = 0.0
        self._begun_s: dict[int, float] = {}
        """By first job, of those that are running."""
        self._seconds: deque[tuple[ScheduleKind, float]] = deque(maxlen=KEPT_ROUNDS)

    def begin(self, round_: Round) -> None:
        """It is given to the workers."""
        now_s = time.perf_counter()
        self._begun_s[round_.schedule.first_job] = now_s
        self.num_begun += 1
        self.first_begun_s = self.first_begun_s or now_s

    def end(self, round_: Round) -> None:
        """Nobody works for it any more."""
        now_s = time.perf_counter()
        begun_s = self._begun_s.pop(round_.schedule.first_job, None)
        if begun_s is not None and not round_.progress.failed:
            self._seconds.append((round_.schedule.kind, now_s - max(begun_s, self.last_over_s)))
        self.last_over_s = now_s

    def reset(self) -> None:
        """Forget what was, for a report about what comes."""
        self.num_begun = 0
        self.first_begun_s = 0.0
        self._seconds.clear()

    def seconds_per_round(self, kind: ScheduleKind) -> float | None:
        """Median seconds from the end of the round before, or from the call if that was later; None: there was none."""
        found = sorted(seconds for one, seconds in list(self._seconds) if one == kind)
        return found[(len(found) - 1) // 2] if found else None


class Engine:
    """The workers of one model, one per device entry.

    Args:
        backends: one per entry of ``devices=``.
        name: the model's name, for threads.
        gates: which host weights may be read, and which gradients added to.
    """

    def __init__(self, backends: Sequence[Backend], name: str, gates: Gates) -> None:
        self.backends = tuple(backends)
        self._gates = gates
        self._workers = [Worker(i, backend, f"{name} worker {i}", gates) for i, backend in enumerate(backends)]
        self._chains: list[tuple[weakref.ref[LayerChain], list[torch.nn.Module]]] = []
        """Chains that ran here, and their layers, which the workers and the host's side know something about."""
        self._lock = threading.Lock()
        self._running: list[Round] = []
        self._unattended: list[Round] = []
        """Those whose call has returned and that failed since."""
        self._closed = False
        self._callers: set[int] = set()
        """Threads that made a call."""
        self._recorder: Recorder | None = None
        self.rounds = StepLog()
        self.next_job = 0

    @property
    def num_workers(self) -> int:
        """Workers in the rotation."""
        return len(self._workers)

    @property
    def has_accelerators(self) -> bool:
        """Whether some devices are not CPU workers."""
        return any(backend.device.type != "cpu" for backend in self.backends)

    def run(self, round_: Round, host: HostWeights) -> None:
        """Run a round to its end, or until its losses are known if it may outlive the call.

        Args:
            round_: what to run; its values, gradients, losses and outputs are filled in.
            host: the weights.

        Raises:
            Exception: the first error of a worker, as it was raised; the engine can run the next round.
        """
        if self._closed:
            raise ClosedError("the model was closed; compile it again to go on")
        self._callers.add(threading.get_ident())
        self._prepare(round_, host)
        self._submit(round_)
        progress = round_.progress
        try:
            if round_.may_outlive_call:
                round_.wait_losses()
                round_.freeze()
                self._leave_alone(round_)
            else:
                progress.wait_over()
        except BaseException as interrupt:
            progress.cancel(interrupt)
            progress.wait_over()
            raise
        if progress.failed and not round_.unattended:
            progress.wait_over()
            _raise_error(round_)

    @property
    def is_inside(self) -> bool:
        """Whether the calling code runs for a round: a layer, a loss function, a hook. It can't wait for that round."""
        thread = threading.current_thread()  # autograd's own, for accelerators, were not made by Python
        of_autograd = thread.name.startswith("Dummy-") and thread.ident not in self._callers
        return any(worker.is_current for worker in self._workers) or (of_autograd and bool(self.running()))

    def refuse_inside(self, what: str) -> None:
        """Raise a `ConfigError` if `is_inside`.

        Args:
            what: was called.
        """
        if self.is_inside:
            raise ConfigError(
                f"{what} was called by a layer, a loss_fn or a hook of the same model, and would wait for the round "
                "that it is part of; call it after forward_backward. parameters() may be asked for anywhere"
            )

    def running(self) -> list[Round]:
        """Rounds that are not over, in their order."""
        with self._lock:
            return list(self._running)

    def finish(self) -> None:
        """Wait until no round is running; raises what one of them raised that nobody has seen yet."""
        self._wait_idle()
        self.raise_pending()

    def raise_pending(self) -> None:
        """Raise, once, what a round raised after its call had returned; does not wait for it."""
        with self._lock:
            failed, self._unattended = self._unattended, []
        if failed:
            _raise_error(failed[0])

    def _wait_idle(self) -> None:
        for round_ in self.running():
            round_.progress.wait_over()

    def _prepare(self, round_: Round, host: HostWeights) -> None:
        """Everything that no running round may see: what ended is forgotten, weights are packed."""
        chain = round_.chain
        for weights in round_.weights:
            weights.check_structure()  # of a backward: as its forward found it
        ended = [layers for known, layers in self._chains if known() is None]
        if ended or not all(map(host.is_prepared, chain)):
            self._wait_idle()  # packing moves the user's tensors
            self._forget(ended, host)
            for spec, layer in zip(chain.specs, chain, strict=True):
                host.prepare(spec.name, layer)
        if not any(known() is chain for known, _ in self._chains):
            self._chains.append((weakref.ref(chain), list(chain)))
        round_.weights = [host.layer(spec.name, layer) for spec, layer in zip(chain.specs, chain, strict=True)]
        if round_.around.keep_history:  # gradients are wanted, now or in a round that follows
            host.check_hooks(round_.weights)

    def _forget(self, ended: Sequence[Sequence[torch.nn.Module]], host: HostWeights) -> None:
        """Drop what is kept per layer of chains that are gone, such as traces that newer ones replaced."""
        self._chains = [one for one in self._chains if one[0]() is not None]
        alive = {id(layer) for _, layers in self._chains for layer in layers}
        for layer in (layer for layers in ended for layer in layers if id(layer) not in alive):
            host.forget(layer)
            for worker in self._workers:
                worker.forget(layer)

    def _submit(self, round_: Round) -> None:
        progress = round_.progress
        with self._lock:
            round_.before = [earlier.progress for earlier in self._running]
            self._running.append(round_)
        round_.closings = self._gates.weights.closings, self._gates.gradients.closings
        progress.on_over = lambda: self._is_over(round_)
        busy = [worker for worker in self._workers if round_.schedule.tasks(worker.index)]
        progress.enter(len(busy))
        self.rounds.begin(round_)
        for worker in busy:
            worker.submit(round_)
        self.next_job = round_.schedule.next_job

    def _leave_alone(self, round_: Round) -> None:
        """The round's call returns, unless the round has failed; if it fails now, the next call says so."""
        with self._lock:
            round_.unattended = not round_.progress.failed

    def _is_over(self, round_: Round) -> None:
        progress = round_.progress
        with self._lock:
            self._running.remove(round_)
            self.rounds.end(round_)
            if progress.failed and round_.unattended:
                self._unattended.append(round_)
        round_.before = ()

    def start_recording(self) -> Recorder:
        """A recorder that is told what the workers do from now on.

        Raises:
            ConfigError: there is one already.
        """
        if self._recorder is not None:
            raise ConfigError("a timeline of this model is being recorded already; leave that context first")
        recorder = self._recorder = Recorder({one.device: one.backend for one in self._workers})
        for worker in self._workers:
            worker.record(recorder)
        return recorder

    def stop_recording(self) -> None:
        """Wait until what was recorded is done; errors of rounds are left to the next call."""
        try:
            self._wait_idle()
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
    def devices(self) -> list[str]:
        """The workers' names in timelines and reports."""
        return [worker.device for worker in self._workers]

    def peak_bytes(self, reset: bool = False) -> list[int]:
        """Per worker, the largest number of bytes in use on its device at once."""
        return [backend.peak_bytes(reset) for backend in self.backends]

    def close(self) -> None:
        """Cancel what is running, end the threads and give the devices' memory back; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for round_ in self.running():
            round_.progress.cancel(ClosedError("the model was closed while a round was running"))
        for worker in self._workers:
            worker.close()


def _raise_error(round_: Round) -> None:
    """Raise a failed round's error, and forget it, or the traceback, this frame and the error keep each other alive."""
    error, round_.progress.error = round_.progress.error, None
    assert error is not None
    try:
        raise error
    finally:
        del error, round_
