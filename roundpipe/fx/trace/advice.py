"""What a user should change about code that can't be traced: the smallest change that helps, by what stands in the way.

Only words: nothing here decides anything.
"""

from __future__ import annotations

import inspect
import re

from torch import nn

from roundpipe.core.errors import TraceCause, TraceFacts

_STAYS_WHOLE = (
    "ove this code into a submodule with a forward of its own, which then stays whole, as one layer, while the "
    "rest is cut."
)
_PADDED = (
    "Run so, it gives the right numbers. To have it cut into layers, give a recurrent module that goes forward only "
    "the padded batch, and take its outputs where sequences end: outputs[torch.arange(len(x)), lengths - 1]."
)
_ONLY_OBSERVED = "If it is only looked at, keep activation.detach()."

_NUMPY = (
    "Use torch's function in place of NumPy's (torch.tanh for np.tanh): no .numpy(), np.asarray or "
    "torch.from_numpy on activations"
)
_ASSERTION = "Take the assertion out of forward: check inputs before the call and outputs in the loss function"

_BY_LINE: dict[TraceCause, tuple[tuple[str, str, str], ...]] = {
    # the function that needs data, the line of code, what to write instead; the first for which both are found
    TraceCause.ACTIVATION_DATA: (
        (r"numpy|__array__", r"", _NUMPY),
        (r"", r"^assert\b", _ASSERTION),
        (
            r"tolist|__iter__|unbind",
            r"",
            "Work on the tensor as a whole in place of looping over its values: indexing, masks, torch.gather or "
            "torch.scatter_add",
        ),
        (
            r"",
            r"\blen\(.*\[|\bnonzero\(|\bargwhere\(|\bunique\(|masked_select\(|\w\[\w+ ?[<>]",
            "How many elements are selected depends on data: keep all of them and use the mask as a factor, as in "
            "torch.where(mask, x, 0); a count is mask.sum(), left a tensor",
        ),
        (
            r"",
            r"^(while|for)\b",
            "Run a fixed number of rounds and keep what is finished as it is: x = torch.where(done, x, step(x))",
        ),
        (
            r"__bool__",
            r"^(if|elif)\b|\bif\b.*\belse\b",
            "Compute both sides and choose by data, torch.where(condition, a, b), in place of the if",
        ),
        (
            r"__index__",
            r"",
            "Choose with a tensor: stack the candidates and use torch.index_select, or torch.where for two of them",
        ),
        (
            r"^$|item|__int__|__float__",
            r"\bif\b.*(\.item\(|\bint\(|\bfloat\()|(\.item\(|\bint\(|\bfloat\().*\bif\b",
            "Drop .item(), int() and float(), and choose with torch.where(condition, a, b) in place of the if",
        ),
        (
            r"^$|item|__int__|__float__",
            r"\.item\(|\bint\(|\bfloat\(",
            "Drop .item(), int() and float(): a tensor of one element works in arithmetic, indexing and torch.where",
        ),
        (
            r"__bool__|is_nonzero|equal|allclose|__contains__",
            r"",
            "Choose by data with torch.where(condition, a, b) in place of a decision in Python",
        ),
        (r"", r"", "Write it with tensor operations whose results have sizes that don't depend on data"),
    ),
    TraceCause.FORWARD_RAISES: ((r"^(numpy|__array__)$", r"", _NUMPY), (r"", r"^assert ", _ASSERTION)),
    TraceCause.RANDOM: (
        (r"^torch\.manual_seed$", r"", ""),
        (
            r"",
            r"",
            "Draw with torch and decide with tensors: torch.where(torch.rand(()) < p, a, b) in place of "
            "if random.random() < p; or draw outside and pass the number as a tensor argument",
        ),
    ),
}
_BY_CAUSE: dict[TraceCause, str] = {
    TraceCause.ACTIVATION_LEFT: "Return the value and take it as an argument of the next call, or keep it in a buffer: "
    "self.register_buffer({0!r}, ...) in __init__, self.{0}.copy_(value.detach()) in forward",
    TraceCause.BUFFER_CREATED: "Create the buffer in __init__ with its shape, so that forward only changes it",
    TraceCause.BUFFER_DATA: "Compute with the buffer as a tensor: self.queue.index_copy_(1, index, keys) in place of "
    "slices between numbers, torch.where(condition, a, b) in place of an if",
    TraceCause.PARAMETER_REPLACED: "Keep a tensor that forward changes in a buffer, "
    "self.register_buffer('codebook', ...) in __init__, and write it with self.codebook.copy_(value)",
    TraceCause.ARGUMENT_CHANGED: "Return the value beside the output, and have the loss function take it from there",
    TraceCause.OPAQUE_STATE: "Count in a buffer (self.register_buffer('steps', torch.zeros(())) and "
    "self.steps.add_(1)), or take the next value outside and pass it as a tensor argument",
    TraceCause.STATE: "Keep what changes from call to call in a buffer (self.register_buffer('steps', "
    "torch.zeros(())) and self.steps.add_(1)), or compute it outside and pass it as a tensor argument",
}


def advice(cause: TraceCause, facts: TraceFacts) -> str:
    """What to write instead of what stands in the way, in a sentence or two."""
    if cause is TraceCause.ACTIVATION_HOOKED:
        return _ONLY_OBSERVED
    if cause is TraceCause.PACKED_SEQUENCE:
        return _PADDED
    words = _BY_CAUSE.get(cause, "")
    if cause is TraceCause.ACTIVATION_LEFT or cause is TraceCause.STATE and facts.attribute:
        words = _BY_CAUSE[TraceCause.ACTIVATION_LEFT].format(facts.attribute) if facts.attribute else ""
    for function, line, change in _BY_LINE.get(cause, ()):
        if re.search(function, facts.function) and re.search(line, facts.source):
            words = change
            break
    return f"{words}. Or m{_STAYS_WHOLE}" if words else f"M{_STAYS_WHOLE}"


def set_at(kind: type, attribute: str) -> str:
    """``file:line`` of the line in a class's forward that sets an attribute, else of the forward; empty if unknown."""
    try:
        lines, first = inspect.getsourcelines(kind.forward)  # type: ignore[attr-defined]
        file = inspect.getsourcefile(kind.forward) or ""  # type: ignore[attr-defined]
    except (OSError, TypeError, AttributeError):
        return ""
    sets = re.compile(rf"\.{re.escape(attribute)}\b\s*([-+*/|&]?=[^=]|\.(append|extend|add|update|insert|pop)\()")
    number = next((index for index, line in enumerate(lines) if sets.search(line)), 0)
    return f"{file}:{first + number}"


def where_set(model: nn.Module, dotted: str) -> str:
    """``file:line`` of the line that sets an attribute, given by its qualified name; else the model's forward."""
    owner, _, attribute = dotted.rpartition(".")
    try:
        kind = type(model.get_submodule(owner))
    except AttributeError:
        kind = type(model)
    return set_at(kind, attribute) or f"{type(model).__name__}.forward"
