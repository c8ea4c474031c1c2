"""What becomes of a case: both sides compared call by call."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from roundpipe import RoundPipeError
from tests.fx.fuzz.cases import Case, build
from tests.fx.fuzz.sides import Compiled, Observed, run_compiled, run_eager

KINDS = ["traced", "opaque", "retraced", "fell back", "refused", "invalid", "crashed", "different"]


def difference(was: Observed, now: Observed, tolerance: float, logged: str) -> str:
    """The first thing that differs, in words; nothing if all is equal."""
    if _gap(was.loss, now.loss) > tolerance:
        return f"loss is {now.loss}, eager's {was.loss}"
    if sorted(was.outputs) != sorted(now.outputs):
        return f"microbatches start at {sorted(now.outputs)}, eager's at {sorted(was.outputs)}"
    for first, outputs in was.outputs.items():
        if len(outputs) != len(now.outputs[first]):
            return f"{len(now.outputs[first])} outputs, eager gives {len(outputs)}"
        for index, (a, b) in enumerate(zip(outputs, now.outputs[first], strict=True)):
            if _gap(a, b) > tolerance:
                return f"output {index} of microbatch {first} is off by {_gap(a, b):.2e}"
    scale = max([1e-3] + [float(g.abs().max()) for g in was.gradients.values() if g is not None and g.numel()])
    for name, gradient in was.gradients.items():
        gap = _gap(gradient, now.gradients[name], 1e-3 * scale)
        if gap > tolerance:
            return f"gradient of {name} is off by {gap:.2e}"
    for name, buffer in was.state.items():
        if _gap(buffer, now.state.get(name)) > tolerance:
            return f"buffer {name} is {now.state.get(name)}, eager's {buffer}"
    said = [words for line in logged.splitlines() for words in _SAID_TO_STAY.findall(line)]
    stays = {name.rpartition(".")[2] for words in said for name in re.split(r"[, ]+", words)}
    for name, value in was.attributes.items():
        if not _same(value, now.attributes[name], tolerance) and name.rpartition(".")[2] not in stays:
            return f"attribute {name} is {now.attributes[name]}, eager's {value}"
    return ""


_SAID_TO_STAY = re.compile("its forward sets (.*); the compiled model runs as if it had not")


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _gap(a, b) <= tolerance
    return bool(a == b)


def _gap(a: Any, b: Any, least: float = 1e-6) -> float:
    """The largest relative difference; infinite for another kind of value; None is zero."""
    if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
        if isinstance(a, float) and isinstance(b, float):
            return abs(a - b) / max(abs(a), 1e-6)
        return 0.0 if a == b else float("inf")
    if a is None or b is None:
        other = b if a is None else a
        return float(other.abs().max()) if other.numel() else 0.0
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    gap = float((a - b).abs().max()) / max(float(a.abs().max()), least)
    return gap if gap == gap else float("inf")


@dataclass
class Outcome:
    """What became of a case."""

    kind: str
    detail: str = ""
    num_layers: int = 0


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"

    def __enter__(self) -> _Log:
        logging.getLogger("roundpipe").addHandler(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        logging.getLogger("roundpipe").removeHandler(self)


TOLERANCE = 1e-6
"""Of float64, with room for what passes through float32."""
COARSE_TOLERANCE = 3e-2
ROUNDING = 1e-15
ROUNDED_RUNS = 8
_AUTOCAST = "torch.autocast('cpu', dtype=torch.bfloat16)"


def run(case: Case) -> Outcome:
    """Both sides of a case, compared call by call; one that rounds to bfloat16 once more without if it is close.

    A case in which rounding alone changes what eager computes (a branch on the sum of what a norm gave) is invalid.
    """
    outcome = _run(case, TOLERANCE)
    if outcome.kind == "different" and _turns_on_rounding(case):
        return Outcome("invalid", f"rounding decides: {outcome.detail}")
    if outcome.kind == "different" and _AUTOCAST in case.source:
        close = _run(case, COARSE_TOLERANCE)
        exact = replace(case, source=case.source.replace(_AUTOCAST, _AUTOCAST[:-1] + ", enabled=False)"))
        if close.kind not in ("different", "crashed") and _run(exact, TOLERANCE).kind not in ("different", "crashed"):
            return close
    return outcome


def _turns_on_rounding(case: Case) -> bool:
    """Whether eager differs from itself when its parameters are off by rounding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = list(run_eager(build(case.source), case))
        for seed in range(ROUNDED_RUNS):
            model = build(case.source)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 1 + ROUNDING * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            found = run_eager(model, case)
            if any(difference(was, now, TOLERANCE, "") for was, now in zip(expected, found, strict=True)):
                return True
    return False


def _run(case: Case, tolerance: float) -> Outcome:
    with warnings.catch_warnings(), _Log() as log:
        warnings.simplefilter("ignore")
        try:
            expected = list(run_eager(build(case.source), case))
        except Exception as error:
            return Outcome("invalid", f"{type(error).__name__}: {error}")
        if not all(one.loss is not None and one.loss.isfinite() for one in expected):
            return Outcome("invalid", "the loss is not finite")
        if not all(g is None or g.isfinite().all() for one in expected for g in one.gradients.values()):
            return Outcome("invalid", "a gradient is not finite")
        info = Compiled()
        try:
            with contextlib.closing(run_compiled(build(case.source), case, info)) as found:  # type: ignore[type-var]
                for index, (was, now) in enumerate(zip(expected, found, strict=True)):
                    problem = difference(was, now, tolerance, log.text)
                    if problem:
                        return Outcome("different", f"call {index}: {problem}", info.num_layers)
        except RoundPipeError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return Outcome("crashed", f"{type(error).__name__}: {error}")
    kind = "traced"
    if info.fell_back:
        kind = "fell back"
    elif info.trace_count > 2:
        kind = "retraced"
    elif info.opaque:
        kind = "opaque"
    return Outcome(kind, num_layers=info.num_layers)
