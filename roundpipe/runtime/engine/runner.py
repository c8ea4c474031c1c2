"""Runs a stage with one microbatch: values up, compute, values or gradients down.

Nothing here waits for the device: work is given to its streams, which are ordered by events. A run waits only until
another worker has given what it reads to its own device.
"""

from __future__ import annotations

import torch

from roundpipe.core import trees
from roundpipe.core.schedule import Job, Phase
from roundpipe.runtime.device.backend import Backend, Lane
from roundpipe.runtime.device.host_memory import bytes_of
from roundpipe.runtime.engine.offload import InFlight, Offload
from roundpipe.runtime.engine.stage import Stage
from roundpipe.runtime.engine.step import LABEL, StepState
from roundpipe.runtime.profiling.meter import Meter
from roundpipe.runtime.weights.residency import Visit


class MicrobatchRunner:
    """Runs the stages of one worker, of which it has the name."""

    def __init__(self, backend: Backend, name: str, meter: Meter, in_flight: InFlight) -> None:
        self._backend = backend
        self._name = name
        self._meter = meter
        self._offload = Offload(backend, meter, in_flight)

    def run(self, step: StepState, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        """Run a stage with one microbatch, once what it takes is there, and leave its results on the host."""
        if job.phase is Phase.BACKWARD:
            self._run_backward(step, job, stage, visit, microbatch)
        else:
            self._wait_done(step, job.index - 1, microbatch)
            if job.phase is Phase.FORWARD:
                self._run_forward(step, job, stage, microbatch)
            else:
                self._run_fused(step, job, stage, visit, microbatch)
        for name in step.spec.flow_of(job).drops:
            step.values[microbatch].pop(name, None)

    def _wait_done(self, step: StepState, job_index: int, microbatch: int) -> None:
        """Until another worker has given a microbatch of a job to its device."""
        step.wait_done(job_index, microbatch, self._name)
        self._meter.until("no_work")

    def _run_forward(self, step: StepState, job: Job, stage: Stage, microbatch: int) -> None:
        backend, flow = self._backend, step.spec.flow_of(job)
        (segment,) = flow.segments
        carry, tensors = self._offload.upload_values(step, segment.takes, microbatch)
        values = step.values[microbatch]
        is_copying = False
        with backend.hold(sum(map(bytes_of, tensors)), "carried values"):
            del tensors
            with self._meter.computing("forward", segment.layers), torch.no_grad(), step.spec.autocast():
                for index in segment.layers:
                    if is_copying and step.spec.chain.specs[index].may_write_reads:  # what is copied must not change
                        backend.wait(Lane.COMPUTE, backend.record(Lane.DOWNLOAD))
                    outputs = stage.forward(segment, index, carry, microbatch)
                    read_later = [name for name in outputs if name in flow.gives]
                    for name in read_later:
                        values[name] = self._offload.download(outputs[name])
                    is_copying = bool(read_later)
                    del outputs

    def _run_fused(self, step: StepState, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        spec, offload = step.spec, self._offload
        (segment,) = spec.flow_of(job).segments
        carry, tensors = offload.upload_values(step, segment.takes, microbatch)
        label, collects_gradients = offload.upload_label(spec.labels[microbatch])
        with (
            self._backend.hold(sum(map(bytes_of, tensors)), "carried values"),
            self._backend.activations([visit.weights_memory, *tensors]),
            spec.microbatch_context(),
        ):
            del tensors
            with self._meter.computing("fused", segment.layers):
                result = stage.forward_to_loss(segment, carry, microbatch, label)
                step.losses[microbatch] = offload.download(result.loss, "loss of")
                if spec.return_outputs:
                    step.outputs[microbatch] = offload.download_outputs(result.outputs, spec.output_device)
                step.add_loss()
                gradients = stage.backward_of_loss(result, microbatch)
        if collects_gradients:
            gradients = {**gradients, LABEL: [tensor.grad for tensor in trees.tensors(label)]}
        offload.download_gradients(step, gradients, microbatch)

    def _run_backward(self, step: StepState, job: Job, stage: Stage, visit: Visit, microbatch: int) -> None:
        offload, flow = self._offload, step.spec.flow_of(job)
        if flow.last_source is not None:  # recomputation waits for its inputs, not for the incoming gradient
            self._wait_done(step, step.spec.schedule.first_job + flow.last_source, microbatch)
        has_waited = False
        for segment in flow.segments:
            if not stage.has_backward(segment):
                continue
            carry, tensors = offload.upload_values(step, segment.takes, microbatch)
            with (
                self._backend.hold(sum(map(bytes_of, tensors)), "carried values"),
                self._backend.activations([visit.weights_memory, *tensors]),
            ):
                del tensors
                with self._meter.computing("recompute", segment.layers):
                    recorded = stage.recompute(segment, carry, microbatch)
                carry.clear()
                if not has_waited:
                    self._wait_done(step, job.index - 1, microbatch)
                    has_waited = True
                incoming = offload.upload_gradients(step, segment.makes, microbatch)
                with self._meter.computing("backward", segment.layers):
                    gradients = stage.backward(recorded, incoming, microbatch)
                incoming.clear()
            offload.download_gradients(step, gradients, microbatch)
        if not has_waited:
            self._wait_done(step, job.index - 1, microbatch)
