"""Whether the note at an exception names the place where it was raised: layer, stage, microbatch and phase."""

from __future__ import annotations

import re
from collections.abc import Iterable

from roundpipe import ExecutePlan
from roundpipe.core.errors import GRADIENTS_ADDED
from tests.faults.models import NUM_LAYERS, NUM_SAMPLES
from tests.faults.points import Visit

HOST_PHASES = ("split_input", "split_label", "merge_output")


def phase_of(visit: Visit) -> str:
    """The phase that a note must name."""
    if visit.place.startswith("forward of"):
        return "recomputation" if visit.is_recomputation else "forward"
    return "backward" if visit.place.startswith("backward of") else visit.place


def microbatch_of(sample: int, num_microbatches: int) -> int:
    """The microbatch that a sample is in."""
    size, num_larger = divmod(NUM_SAMPLES, num_microbatches)
    sizes = [size + (m < num_larger) for m in range(num_microbatches)]
    return next(m for m in range(num_microbatches) if sample < sum(sizes[: m + 1]))


def problems_of_notes(
    notes: Iterable[str],
    visit: Visit,
    kind: str,
    num_microbatches: int,
    plan: ExecutePlan | None,
    has_one_loss: bool = False,
) -> list[str]:
    """What is wrong with the notes of an exception that was raised at a visit."""
    places = [note for note in notes if note.startswith("roundpipe: raised in ")]
    if len(places) != 1:
        return [f"note: {len(places)} name a place: {places}"]
    (note,) = places
    phase = phase_of(visit)
    problems = [] if note.endswith(f", phase {phase}") else [f"note: not phase {phase}: {note}"]
    if phase in HOST_PHASES:
        return problems
    if phase == "loss_fn" and has_one_loss:
        return problems if "the loss of the whole batch" in note else [f"note: not the whole batch: {note}"]
    if phase == "backward" and has_one_loss and "the loss of the whole batch" in note:
        return problems if kind in ("fallback", "module by module") else [f"note: no microbatch: {note}"]
    assert visit.sample is not None
    microbatch = microbatch_of(visit.sample, num_microbatches)
    whole = kind in ("fallback", "module by module") and "on the host, the whole batch" in note
    if f", microbatch {microbatch}, " not in note and not whole:
        problems.append(f"note: not microbatch {microbatch}: {note}")
    if (found := re.search(r"stage ([FUB])\d*\[(\d+):(\d+)\]", note)) is None:
        if kind in ("traced", "by hand"):
            problems.append(f"note: no stage: {note}")
        return problems
    direction, first, end = found[1], int(found[2]), int(found[3])
    if direction not in {"forward": "FU", "recomputation": "B", "backward": "BU", "loss_fn": "FU"}[phase]:
        problems.append(f"note: another direction: {note}")
    if plan is not None and (first, end) not in _ranges(plan, direction):
        problems.append(f"note: no stage of the plan: {note}")
    if phase == "loss_fn":
        return problems
    layer = int(visit.place.rsplit(" ", 1)[1])
    if kind == "by hand" and not first <= layer < end:
        problems.append(f"note: not the stage of layer {layer}: {note}")
    if phase != "backward":
        name = {"by hand": f"layer {layer} ({layer}), module {layer},", "traced": "layer "}.get(
            kind, f"layer 0 (layers.{layer}), module layers.{layer}"
        )
        if name not in note:
            problems.append(f"note: not {name}: {note}")
    return problems


def _ranges(plan: ExecutePlan, direction: str) -> list[tuple[int, int]]:
    """The layers of a plan's stages; a step in one direction only has the tail among them."""
    forward, tail, backward = plan.forward, plan.fused, plan.backward
    assert tail is not None
    return {"F": [*forward, tail], "U": [tail], "B": [*backward, tail]}[direction]


def problem_of_gradient_note(notes: Iterable[str], visit: Visit, has_gradients: bool) -> list[str]:
    """Whether an exception says that gradients remain where some do; in a backward, it may say so where none do."""
    says_so = GRADIENTS_ADDED in notes
    if says_so == has_gradients or (says_so and phase_of(visit) in ("recomputation", "backward")):
        return []
    return [f"note: {'says' if says_so else 'does not say'} that gradients were added"]


assert NUM_LAYERS <= NUM_SAMPLES
