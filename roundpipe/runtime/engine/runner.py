"""Runs a stage with one microbatch: values up, compute, values or gradients down.

Carried values and their gradients wait on the host for the next stage. Each direction has a stream of its own, ordered
against COMPUTE by events, and nothing here waits for the device: a run waits only until another worker has given what
it reads to its own device. What a stream still reads must live until it has: `InFlight` keeps it, so that no memory is
marked as used by a stream.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch

from roundpipe.core import trees
from roundpipe.core.layers import Carry
from roundpipe.core.schedule import Job, Phase
from roundpipe.core.storages import bytes_of
from roundpipe.runtime.device.backend import Backend, Event, Lane
from roundpipe.runtime.engine.host_values import Gradients, HostValue, sum_gradients
from roundpipe.runtime.engine.pace import InFlight, Pace
from roundpipe.runtime.engine.spec import LABEL, Segment, by_layer
from roundpipe.runtime.engine.stage import Stage
from roundpipe.runtime.engine.step import StepState
from roundpipe.runtime.engine.values_ahead import ValuesAhead
from roundpipe.runtime.profiling.meter import Meter
from roundpipe.runtime.weights.residency import Visit


class MicrobatchRunner:
    """Runs the stages of one worker, of which it has the name."""

    def __init__(self, backend: Backend, name: str, meter: Meter, in_flight: InFlight, pace: Pace) -> None:
        self._backend = backend
        self._name = name
        self._meter = meter
        self._in_flight = in_flight
        self._pace = pace
        self._ahead = ValuesAhead(backend, meter, pace)

    def run(self, step: StepState, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        """Run a stage with one microbatch, once what it takes is there, and leave its results on the host."""
        flow = step.spec.flow_of(job)
        self._ahead.begin_run(job, microbatch)
        if job.phase is Phase.BACKWARD:
            self._run_backward(step, job, stage, visit, microbatch)
        else:
            self._wait_before(step, job, stage, microbatch)
            if job.phase is Phase.FORWARD:
                self._run_forward(step, job, stage, visit, microbatch)
            else:
                self._run_fused(step, job, stage, visit, microbatch)
        self._ahead.end_run()
        self._end_microbatch(stage)
        for name in flow.drops:
            step.values[microbatch].pop(name, None)

    def run_again(self, step: StepState, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        """Run a backward stage from its first microbatch on, of which an attempt ran out of memory in this one.

        It runs layer by layer, and nothing that it can let go of stays on the device. Gradients of weights are made
        for all of these microbatches; those of values, which the others have left, for this one.
        """
        for kept in step.kept.of(job):
            step.forward.put_back(kept.record)
            gradients = {name: [*each] for name, each in (kept.gradients or {}).items()}
            if kept.microbatch == microbatch:
                if kept.gradients is not None:  # some were taken, and parts of the stage may have left theirs
                    step.gradients[microbatch].clear()
                    step.gradients[microbatch].update(gradients)
                self.run(step, job, stage, visit, microbatch)
            else:
                segments, values = self._by_layer(step, job, stage, visit, kept.values, kept.microbatch)
                nothing = lambda: None  # noqa: E731
                self._run_segments(step, stage, visit, kept.microbatch, segments, values, gradients, nothing, nothing)
                self._end_microbatch(stage)
            self._backend.synchronize()
            self._pace.abandon()

    def _end_microbatch(self, stage: Stage) -> None:
        if shared := stage.end_microbatch():
            self._in_flight.add(self._backend.record(Lane.COMPUTE), shared)

    def _wait_before(self, step: StepState, job: Job, stage: Stage, microbatch: int) -> None:
        """Until another worker has given a microbatch of the stage before to its device."""
        self._wait_done(step, step.spec.schedule.before(job, microbatch), stage, microbatch)

    def _wait_done(self, step: StepState, job_index: int | None, stage: Stage, microbatch: int) -> None:
        while not step.is_done(job_index, microbatch) and stage.layers.bind_next():
            pass
        self._meter.until("overhead")
        step.wait_done(job_index, microbatch, self._name)
        self._meter.until("no_work")

    def _run_forward(self, step: StepState, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        backend, flow = self._backend, step.spec.flow_of(job)
        (segment,) = flow.segments
        values = step.values[microbatch]
        carry, tensors, own_bytes = self._upload_values(step, stage, segment.takes, values)
        is_copying = False
        memory = backend.activations(visit.memory, tensors)
        with backend.hold(own_bytes, "carried values"):
            del tensors
            self._ahead.give(step, job, stage, microbatch)
            with self._meter.computing("forward", segment.layers), torch.no_grad(), step.spec.autocast():
                for index in segment.layers:
                    if is_copying and step.spec.chain.specs[index].may_write_reads:  # what is copied must not change
                        backend.wait(Lane.COMPUTE, backend.record(Lane.DOWNLOAD))
                    with memory:
                        outputs = stage.forward(segment, index, carry, microbatch)
                    read_later = [name for name in outputs if name in flow.gives]
                    for name in read_later:
                        values[name] = self._download(outputs[name], "values of", is_inner=step.spec.is_inner(name))
                    is_copying = bool(read_later)
                    if read_later:
                        num_bytes = sum(
                            bytes_of(tensor) for name in read_later for tensor in trees.tensors(outputs[name])
                        )
                        self._pace.end_layer(backend.record(Lane.DOWNLOAD), num_bytes)
                    del outputs
                    self._in_flight.release()
            if step.spec.loss_fn is not None and step.spec.schedule.is_of_last_stage(job):
                self._run_loss(step, job, stage, memory, carry, microbatch)

    def _run_loss(
        self,
        step: StepState,
        job: Job,
        stage: Stage,
        memory: AbstractContextManager[Any],
        carry: Carry,
        microbatch: int,
    ) -> None:
        """The loss of a step without a backward, behind its last layer."""
        spec = step.spec
        label, label_bytes, _ = self._upload_label(stage, spec.labels[microbatch])
        held = self._backend.hold(label_bytes, "carried values")
        with held, spec.microbatch_context(), self._meter.computing("forward", tuple(job.layers)), memory:
            with torch.no_grad(), spec.autocast():
                outputs, losses = stage.loss(carry, microbatch, label)
        self._leave_loss(step, microbatch, losses.detached(), outputs)

    def _leave_loss(self, step: StepState, microbatch: int, loss: Any, outputs: Any) -> None:
        step.losses[microbatch] = self._download(loss, "loss of")
        if step.spec.return_outputs:
            step.outputs[microbatch] = self._download_outputs(outputs, step.spec.output_device)
        step.add_loss()

    def _run_fused(self, step: StepState, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        spec = step.spec
        (segment,) = spec.flow_of(job).segments
        if spec.counted is not None and spec.counted.share is not None:
            self._meter.until("overhead")
            spec.counted.share.totals()
            self._meter.until("no_work")
        carry, tensors, own_bytes = self._upload_values(step, stage, segment.takes, step.values[microbatch])
        label, label_bytes, collects_gradients = self._upload_label(stage, spec.labels[microbatch])
        memory = self._backend.activations(visit.memory, [*tensors, *trees.tensors(label)])
        with self._backend.hold(own_bytes + label_bytes, "carried values"), spec.microbatch_context():
            del tensors
            self._ahead.give(step, job, stage, microbatch)
            with self._meter.computing("fused", segment.layers):
                with memory:
                    recorded = stage.forward_to_loss(segment, carry, microbatch, label)
                assert recorded.losses is not None
                self._leave_loss(step, microbatch, recorded.losses.detached(), recorded.outputs)
                with memory:
                    gradients = stage.backward(recorded, {}, microbatch)
        if collects_gradients:
            gradients = {**gradients, LABEL: [tensor.grad for tensor in trees.tensors(label)]}
        self._download_gradients(step, step.gradients[microbatch], gradients)

    def _run_backward(self, step: StepState, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        flow = step.spec.flow_of(job)
        if flow.last_source is not None:  # recomputation waits for its inputs, not for the incoming gradient
            self._wait_done(step, step.spec.schedule.sharer(flow.last_source, microbatch), stage, microbatch)
        kept = step.kept.keep(job, microbatch)
        gradients = step.gradients[microbatch]

        def wait() -> None:
            self._wait_before(step, job, stage, microbatch)
            if kept is not None:
                kept.gradients = {name: [*each] for name, each in gradients.items()}

        segments: Sequence[Segment] = flow.segments
        values: Mapping[str, HostValue] = step.values[microbatch]
        if step.kept.shortage:
            segments, values = self._by_layer(step, job, stage, visit, values, microbatch)
        give = partial(self._ahead.give, step, job, stage, microbatch)
        self._run_segments(step, stage, visit, microbatch, segments, values, gradients, wait, give)

    def _run_segments(
        self,
        step: StepState,
        stage: Stage,
        visit: Visit,
        microbatch: int,
        segments: Iterable[Segment],
        values: Mapping[str, HostValue],
        on_host: dict[str, list[HostValue]],
        wait: Callable[[], None],
        give_ahead: Callable[[], None],
    ) -> None:
        """The backward of a microbatch, from gradients on the host to others; ``wait`` until the first are there.

        What the next one takes is given to the link behind what the first segment takes.
        """
        has_waited = False
        for number, segment in enumerate(filter(stage.has_backward, segments)):
            if number:
                self._pace.begin_part()
            carry, tensors, own_bytes = self._upload_values(step, stage, segment.takes, values)
            memory = self._backend.activations(visit.memory, tensors)
            with self._backend.hold(own_bytes, "carried values"):
                del tensors
                if not number:
                    give_ahead()
                with self._meter.computing("recompute", segment.layers), memory:
                    recorded = stage.recompute(segment, carry, microbatch)
                carry.clear()
                if not has_waited:
                    wait()
                    has_waited = True
                incoming = self._upload_gradients(segment, on_host)
                with (
                    self._backend.hold(sum(map(bytes_of, trees.tensors(incoming))), "carried gradients"),
                    self._meter.computing("backward", segment.layers),
                    memory,
                ):
                    gradients = stage.backward(recorded, incoming, microbatch)
                incoming.clear()
            self._download_gradients(step, on_host, gradients)
            self._in_flight.release()
        if not has_waited:
            wait()

    def _by_layer(
        self,
        step: StepState,
        job: Job,
        stage: Stage,
        visit: Visit,
        values: Mapping[str, HostValue],
        microbatch: int,
    ) -> tuple[list[Segment], Mapping[str, HostValue]]:
        """A backward stage's layers as segments of their own, and the values that they take, on the host.

        What the stage itself makes is made again, also if it is on the host: the stages that it was brought there for
        may be through with it at any time.
        """
        segments = by_layer(job, step.spec.chain.specs)
        read = {name for segment in segments for name in segment.takes}
        if read <= step.spec.flow_of(job).takes:
            return segments, values
        record = step.forward.entries(job.layers, microbatch)
        made: dict[str, HostValue] = {}
        known = ChainMap(made, cast(dict[str, HostValue], values))
        for segment in segments[:0:-1]:
            carry, tensors, own_bytes = self._upload_values(step, stage, segment.takes, known)
            memory = self._backend.activations(visit.memory, tensors)
            with self._backend.hold(own_bytes, "carried values"):
                del tensors
                with self._meter.computing("recompute", segment.layers), memory:
                    recorded = stage.recompute(segment, carry, microbatch)
                carry.clear()
                for name in read.intersection(segment.makes):
                    made[name] = self._download(recorded.outputs[name], "values of", is_inner=step.spec.is_inner(name))
                del recorded
            self._pace.begin_part()
        step.forward.put_back(record)
        return segments, known

    # Transfers

    def _upload_values(
        self, step: StepState, stage: Stage, names: Iterable[str], values: Mapping[str, HostValue]
    ) -> tuple[Carry, list[torch.Tensor], int]:
        """Values of a microbatch on the device, ready for COMPUTE; the tensors in them, and bytes of its own ones."""
        carry: Carry = {}
        total_bytes, is_late = 0, False
        own: list[torch.Tensor] = []
        for name in names:
            if (came := self._ahead.take(name)) is not None:
                carry[name], own_bytes = came
                total_bytes += own_bytes
                own += trees.tensors(carry[name])
                continue
            is_late = True
            value, is_lent = step.begin_read(values, name)
            for event in value.events:
                self._backend.wait(Lane.UPLOAD, event)
            with self._meter.copying(Lane.UPLOAD, "values for"):
                carry[name], own_bytes = stage.shared.upload(name, value.value)
            total_bytes += own_bytes
            own += _own(carry[name], own_bytes)
            if is_lent:
                step.end_read(self._backend.record(Lane.UPLOAD))
        tensors = self._uploaded(carry, is_late=is_late)
        self._pace.came_up(own, sum(map(bytes_of, tensors)))
        return carry, tensors, total_bytes

    def _upload_label(self, stage: Stage, label: Any) -> tuple[Any, int, bool]:
        """A label on the device, ready for COMPUTE; bytes of its own tensors; whether it collects gradients.

        It does if it was to require some.
        """
        if is_late := (came := self._ahead.take(LABEL)) is None:
            with self._meter.copying(Lane.UPLOAD, "labels of"):
                came = stage.shared.upload(LABEL, label)
        uploaded, own_bytes = came
        self._pace.came_up(_own(uploaded, own_bytes), own_bytes)
        pairs = zip(trees.tensors(label), self._uploaded(uploaded, is_late=is_late), strict=True)
        leaves = [tensor.requires_grad_() for original, tensor in pairs if original.requires_grad]
        return uploaded, own_bytes, bool(leaves)

    def _upload_gradients(self, segment: Segment, on_host: dict[str, list[HostValue]]) -> dict[str, Gradients]:
        """Gradients of values that a segment made, summed over their readers, on the device."""
        backend = self._backend
        by_reader: dict[str, list[Gradients]] = {}
        is_late = False
        for name in segment.makes:
            each = on_host.pop(name, ())
            if (came := self._ahead.take_gradients(name)) is not None:
                by_reader[name] = came
                continue
            is_late |= bool(each)
            for value in each:
                for event in value.events:
                    backend.wait(Lane.UPLOAD, event)
                with self._meter.copying(Lane.UPLOAD, "gradients for"):
                    uploaded = [None if gradient is None else backend.upload(gradient) for gradient in value.value]
                by_reader.setdefault(name, []).append(uploaded)
        tensors = self._uploaded(by_reader, is_late=is_late)
        self._pace.came_up(tensors, sum(map(bytes_of, tensors)))
        return {name: [sum_gradients(parts) for parts in zip(*each, strict=True)] for name, each in by_reader.items()}

    def _uploaded(self, value: Any, *, is_late: bool) -> list[torch.Tensor]:
        """The tensors of what was given to UPLOAD, ready for COMPUTE; ``is_late``: not all of it ahead."""
        backend = self._backend
        if is_late:
            backend.wait(Lane.COMPUTE, backend.record(Lane.UPLOAD))
        tensors = trees.tensors(value)
        backend.check_ready(tensors)
        return tensors

    def _download(self, value: Any, what: str, *, is_inner: bool = False) -> HostValue:
        """A device value on the host, with the event of its copy."""
        tensors = trees.tensors(value)
        if not tensors:
            return HostValue(value)
        with self._downloading(what):
            copies = trees.map_tensors(value, partial(self._backend.download, is_inner=is_inner))
        return HostValue(copies, self._downloaded(tensors))

    def _download_outputs(self, outputs: Any, device: torch.device | None) -> HostValue:
        """The model's outputs, detached, on the device that the caller wants them on."""
        outputs = trees.map_tensors(outputs, torch.Tensor.detach)
        if device is None or device.type == "cpu":
            return self._download(outputs, "values of")
        copies = trees.map_tensors(outputs, lambda tensor: tensor.to(device))
        return HostValue(copies, (self._backend.record(Lane.COMPUTE),))

    def _download_gradients(
        self, step: StepState, on_host: dict[str, list[HostValue]], gradients: dict[str, Gradients]
    ) -> None:
        """Leave gradients of values that a segment took on the host, for the stages that made them."""
        if not gradients:
            return
        download = self._backend.download
        with self._downloading("gradients of"):
            copies = []
            for name, each in gradients.items():
                is_inner = step.spec.is_inner(name)
                copies.append([None if tensor is None else download(tensor, is_inner=is_inner) for tensor in each])
        copied = self._downloaded(gradients)
        for name, each in zip(gradients, copies, strict=True):
            on_host.setdefault(name, []).append(HostValue(each, copied))

    def _downloading(self, what: str) -> AbstractContextManager[Any]:
        """Around copies of what COMPUTE has made."""
        self._backend.wait(Lane.DOWNLOAD, self._backend.record(Lane.COMPUTE))
        return self._meter.copying(Lane.DOWNLOAD, what)

    def _downloaded(self, sources: Any) -> tuple[Event]:
        """When what was given to DOWNLOAD is done; its sources live until then."""
        copied = self._backend.record(Lane.DOWNLOAD)
        self._pace.keep_downloads(copied, sources)
        return (copied,)


def _own(value: Any, own_bytes: int) -> list[torch.Tensor]:
    """The tensors of a value on the device, if it shares none of them."""
    tensors = trees.tensors(value)
    return tensors if own_bytes == sum(map(bytes_of, tensors)) else []
