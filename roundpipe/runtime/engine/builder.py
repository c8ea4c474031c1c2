"""From one call's microbatches to a round that the engine can run, and from a finished round to results.

Everything that a call decides is decided here, in the caller's thread: which plan (`PlanChooser`), which values flow
where, which gradients are wanted, the seed, the surroundings.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from roundpipe.core import trees
from roundpipe.core.layers import LayerChain, is_differentiable
from roundpipe.core.modes import caller_autocast
from roundpipe.core.schedule import ExecutePlan, Phase, Schedule, ScheduleKind, make_schedule
from roundpipe.runtime.config import microbatch_count
from roundpipe.runtime.engine.engine import Engine
from roundpipe.runtime.engine.flow import flow, names_with_gradient, reads_of_backward
from roundpipe.runtime.engine.plan_choice import Call, PlanChooser
from roundpipe.runtime.engine.recompute import BufferHistory, SavedData, draw_base_seed
from roundpipe.runtime.engine.stage import LossFunction, Surroundings
from roundpipe.runtime.engine.step import LABEL, HostValue, Round
from roundpipe.runtime.profiling.meter import link_speeds

MicrobatchValues = list[dict[str, HostValue]]


class StepBuilder:
    """Makes rounds for one engine.

    Args:
        engine: its workers' number and budgets decide the plan.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.plans = PlanChooser(
            engine.num_workers,
            (one.memory_budget_bytes for one in engine.backends),
            lambda: link_speeds(engine.read_meters()),
            accelerators=engine.has_accelerators,
        )
        self.last_plan: ExecutePlan | None = None
        """The plan of the latest round, for the partition table."""
        self._shared: weakref.WeakKeyDictionary[LayerChain, list[frozenset[int]]] = weakref.WeakKeyDictionary()

    def _shared_with(self, chain: LayerChain) -> list[frozenset[int]]:
        """Per layer, other layers that have one of its parameters."""
        found = self._shared.get(chain)
        if found is None:
            holders: dict[int, set[int]] = {}
            for index, layer in enumerate(chain):
                for parameter in layer.parameters():
                    holders.setdefault(id(parameter), set()).add(index)
            shared: list[set[int]] = [set() for _ in chain]
            for indices in holders.values():
                for index in indices:
                    shared[index] |= indices - {index}
            found = self._shared[chain] = [frozenset(one) for one in shared]
        return found

    def enter_values(self, call: Call) -> MicrobatchValues:
        """The first carry of each microbatch."""
        for tensor in trees.tensors([call.args, call.kwargs, call.labels]):
            if tensor.device.type not in ("cpu", "meta"):  # made on the caller's stream
                torch.accelerator.current_stream(tensor.device).synchronize()
        return [
            {name: HostValue(value) for name, value in call.chain.entry(args, kwargs).items()}
            for args, kwargs in zip(call.args, call.kwargs, strict=True)
        ]

    def train_round(self, call: Call, loss_fn: LossFunction, return_outputs: bool) -> Round:
        """The round of a ``forward_backward``."""
        plan = self.plans.plan(call)
        values = self.enter_values(call)
        made = self._round(call, plan, "train", values, self._around(call, values, keep_history=True))
        made.spare_bytes = self.plans.spare_bytes(call, plan)
        made.loss_fn = loss_fn
        made.labels = call.labels
        made.return_outputs = return_outputs
        made.output_device = call.config.output_device
        made.losses = [None] * call.num_microbatches
        made.outputs = [None] * call.num_microbatches
        made.microbatch_context = functools.partial(microbatch_count, call.total_microbatches)
        self.plans.measure(made, call)
        return made

    def forward_round(self, call: Call, *, with_backward: bool) -> Round:
        """The round of a ``forward``; with what a later `backward_round` needs kept on the host."""
        plan = self.plans.plan(call)
        values = self.enter_values(call)
        around = self._around(call, values, keep_history=with_backward)
        kept: Iterable[str] = ()
        if with_backward:
            later = make_schedule(plan, self._engine.num_workers, call.num_microbatches, kind="backward")
            kept = reads_of_backward(later, call.chain.specs, call.config.recompute_grain)
        return self._round(call, plan, "forward", values, around, kept)

    def backward_round(self, forward: Round, call: Call, plan: ExecutePlan) -> Round:
        """The round of the backward of a ``forward``; takes over the forward's values."""
        made = self._round(call, plan, "backward", forward.values, forward.around)
        made.weights = forward.weights
        return made

    def _round(
        self,
        call: Call,
        plan: ExecutePlan,
        kind: ScheduleKind,
        values: MicrobatchValues,
        around: Surroundings,
        kept: Iterable[str] = (),
    ) -> Round:
        chain = call.chain
        self.last_plan = plan
        schedule = make_schedule(
            plan,
            self._engine.num_workers,
            call.num_microbatches,
            first_job=self._engine.next_job,
            kind=kind,
        )
        flows = flow(schedule, chain.specs, grain=call.config.recompute_grain, exit_reads=chain.exit.reads, kept=kept)
        return Round(
            chain=chain,
            schedule=schedule,
            flows=flows,
            around=around,
            values=values,
            gradients=[{} for _ in values],
            given=frozenset(name for one in values for name in one),
            tied_after=self._tied(chain, schedule),
        )

    def _around(self, call: Call, values: MicrobatchValues, keep_history: bool) -> Surroundings:
        chain, config = call.chain, call.config
        draws = config.preserve_rng_state and any(spec.draws_random for spec in chain.specs)
        trainable = [any(p.requires_grad for p in layer.parameters()) for layer in chain]
        inputs = {name for one in values for name, held in one.items() if _requires_grad(held.value)}
        plain = {
            (microbatch, name): frozenset(i for i, t in enumerate(trees.tensors(held.value)) if not t.requires_grad)
            for microbatch, one in enumerate(values)
            for name, held in one.items()
            if name in inputs
        }
        return Surroundings(
            base_seed=draw_base_seed() if draws else 0,
            preserve_rng_state=draws,
            with_gradient=names_with_gradient(chain.specs, trainable, inputs),
            plain=plain,
            buffers=BufferHistory(),
            saved=SavedData(),
            keep_history=keep_history,
            ambient=caller_autocast(),
        )

    def _tied(self, chain: LayerChain, schedule: Schedule) -> dict[int, list[int]]:
        """Per job, the earlier jobs that bring gradients of the same parameters."""
        shared = self._shared_with(chain)
        if not any(shared):
            return {}
        backward = [job for job in schedule.jobs if job.phase is not Phase.FORWARD]
        return {
            job.index: [
                earlier.index
                for earlier in backward
                if earlier.index < job.index and any(shared[i] & set(earlier.layers) for i in job.layers)
            ]
            for job in backward
        }


def _requires_grad(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in trees.tensors(value))


def input_tensors(values: MicrobatchValues) -> list[tuple[int, str, int, torch.Tensor]]:
    """Argument tensors that require grad: microbatch, name, position within the value, tensor."""
    return [
        (microbatch, name, position, tensor)
        for microbatch, one in enumerate(values)
        for name, held in one.items()
        for position, tensor in enumerate(trees.tensors(held.value))
        if tensor.requires_grad and is_differentiable(tensor)
    ]


def label_tensors(labels: Sequence[Any]) -> list[tuple[int, str, int, torch.Tensor]]:
    """The same of the labels of microbatches."""
    return [
        (microbatch, LABEL, position, tensor)
        for microbatch, label in enumerate(labels)
        for position, tensor in enumerate(trees.tensors(label))
        if tensor.requires_grad
    ]


def input_gradients(made: Round, inputs: Sequence[tuple[int, str, int, torch.Tensor]]) -> list[torch.Tensor | None]:
    """Gradients that a finished round left for argument tensors, on the tensors' own devices."""
    found: list[torch.Tensor | None] = []
    for microbatch, name, position, tensor in inputs:
        total: torch.Tensor | None = None
        for gradients, event in made.gradients[microbatch].get(name, ()):
            part = gradients[position]
            if part is None:
                continue
            if event is not None:
                event.synchronize()
            total = part if total is None else total + part
        found.append(None if total is None else total.to(tensor.device))
    return found


def sum_losses(losses: Sequence[Any]) -> Any:
    """The sum over microbatches, in their order; of a list of losses, the sums by position."""
    if isinstance(losses[0], torch.Tensor):
        total = losses[0]
        for one in losses[1:]:
            total = total + one
        return total
    return [sum_losses(position) for position in zip(*losses, strict=True)]


def finished(values: Iterable[HostValue | None]) -> list[Any]:
    """Values whose copies are done."""
    return [None if held is None else held.synchronize() for held in values]
