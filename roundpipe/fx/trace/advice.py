"""What a user should change about code that can't be traced: the smallest change that helps, by what stands in the way.

Only words: nothing here decides anything.
"""

from __future__ import annotations

import inspect
import linecache
import re

from torch import nn

_STAYS_WHOLE = (
    "Or move this code into a submodule with a forward of its own, which then stays whole, as one layer, while the "
    "rest is cut"
)

_RULES: tuple[tuple[str, str, str], ...] = (
    # pattern of the cause, pattern of the line, what to write instead; the first for which both are found
    (
        r"is set to an activation",
        r"",
        "Return the value and take it as an argument of the next call, or keep it in a buffer: "
        "self.register_buffer('{name}', ...) in __init__, self.{name}.copy_(value.detach()) in forward",
    ),
    (
        r"did not exist or was None, is set",
        r"",
        "Create the buffer in __init__ with its shape, so that forward only changes it",
    ),
    (
        r"another parameter in the place",
        r"",
        "Keep a tensor that forward changes in a buffer, self.register_buffer('codebook', ...) in __init__, and write "
        "it with self.codebook.copy_(value)",
    ),
    (
        r"puts something into its argument",
        r"",
        "Return the value beside the output, and have the loss function take it from there",
    ),
    (
        r"nothing tells how a call changes",
        r"",
        "Count in a buffer (self.register_buffer('steps', torch.zeros(())) and self.steps.add_(1)), or take the next "
        "value outside and pass it as a tensor argument",
    ),
    (
        r"\bit sets\b",
        r"",
        "Keep what changes from call to call in a buffer (self.register_buffer('steps', torch.zeros(())) and "
        "self.steps.add_(1)), or compute it outside and pass it as a tensor argument",
    ),
    (
        r"random\.|random numbers",
        r"",
        "Draw with torch and decide with tensors: torch.where(torch.rand(()) < p, a, b) in place of "
        "if random.random() < p; or draw outside and pass the number as a tensor argument",
    ),
    (
        r"numpy|__array__",
        r"",
        "Use torch's function in place of NumPy's (torch.tanh for np.tanh): no .numpy(), np.asarray or "
        "torch.from_numpy on activations",
    ),
    (
        r"",
        r"^assert\b",
        "Take the assertion out of forward: check inputs before the call and outputs in the loss function",
    ),
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
        r"item|__int__|__float__|an operator needs",
        r"\bif\b.*(\.item\(|\bint\(|\bfloat\()|(\.item\(|\bint\(|\bfloat\().*\bif\b",
        "Drop .item(), int() and float(), and choose with torch.where(condition, a, b) in place of the if",
    ),
    (
        r"item|__int__|__float__|an operator needs",
        r"\.item\(|\bint\(|\bfloat\(",
        "Drop .item(), int() and float(): a tensor of one element works in arithmetic, indexing and torch.where",
    ),
    (
        r"__bool__|is_nonzero|equal|allclose|__contains__",
        r"",
        "Choose by data with torch.where(condition, a, b) in place of a decision in Python",
    ),
    (
        r"data of an activation",
        r"",
        "Write it with tensor operations whose results have sizes that don't depend on data",
    ),
)


def advice(cause: str, line: str) -> str:
    """What to write instead, in a sentence or two.

    Args:
        cause: what tracing says.
        line: the line of the model's code, or nothing.
    """
    if "a forward hook keeps" in cause:
        return "If it is only looked at, keep activation.detach()."
    for in_cause, in_line, change in _RULES:
        if re.search(in_cause, cause) and re.search(in_line, line.strip()):
            name = re.search(r"\.(\w+) is set", cause)
            return f"{change.replace('{name}', name[1] if name else 'state')}. {_STAYS_WHOLE}."
    return _STAYS_WHOLE.replace("Or move", "Move") + "."


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
    """The line that sets an attribute, given by its qualified name, with the line's text; else the model's forward."""
    owner, _, attribute = dotted.rpartition(".")
    try:
        kind = type(model.get_submodule(owner))
    except AttributeError:
        kind = type(model)
    return with_source(set_at(kind, attribute)) or f"{type(model).__name__}.forward"


def with_source(location: str) -> str:
    """A location with the line's text behind it."""
    file, _, number = location.rpartition(":")
    source = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    return f"{location} ({source})" if source else location
