"""Runs a case on both sides, compares after each action, and shrinks what differs."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from roundpipe import RoundPipeError
from tests.actions import changes, steps  # noqa: F401 - register actions
from tests.actions.calls import ACTIONS
from tests.actions.models import Setup
from tests.actions.sides import Eager, Piped, Side
from tests.faults.deadline import watched

KINDS = ("equal", "refused", "invalid", "different", "unclear")
SAYS_SO = (
    "differ from eager",
    "the caller's own stays as it was",
    "runs as if it had not",
    "not seen by the others",
)
"""Of warnings that announce a difference."""
EXACT_TOLERANCE = 1e-9
"""Of what is float64 from the beginning to the end, where float32 would be used too."""
MOST_ROUNDING = 10
"""Times the tolerance: what differs by more is no rounding."""


@dataclass(frozen=True)
class Case:
    """A model in a wrapper and a sequence of actions, each with the seed of its choices."""

    setup: Setup
    actions: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"[{self.setup}] " + ", ".join(f"{name}({seed})" for name, seed in self.actions)


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    kind: str
    detail: str = ""
    num_actions: int = 0
    """Made before it showed."""
    may_be_rounding: bool = False
    """Whether it is a difference in float32, and not a large one."""


def draw_case(seed: int, index: int) -> Case:
    """Case ``index`` of a campaign."""
    choose = random.Random(f"actions {seed} {index}")
    names, weights = list(ACTIONS), [weight for _, weight in ACTIONS.values()]
    drawn = choose.choices(names, weights, k=choose.randint(5, 15))
    return Case(Setup.draw(choose.randrange(2**31)), tuple((name, choose.randrange(10**6)) for name in drawn))


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"

    def __enter__(self) -> _Log:
        self._logger = logging.getLogger("roundpipe")
        self._was = self._logger.level
        self._logger.addHandler(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._logger.removeHandler(self)


def run(case: Case) -> Outcome:
    """Both sides, compared after each action; ends the process if one action takes longer than the deadline.

    A difference in float32 is rounding if it comes up again to the bit, and not in float64: of summands that cancel,
    such as those of a bias in front of a norm, the sum's own scale says nothing.
    """
    outcome = _run_watched(case)
    if outcome.may_be_rounding and outcome == _run_watched(case):
        exact = _run_watched(replace(case, setup=case.setup.exact()))
        if exact.kind == "equal":
            return Outcome("equal", f"rounding: {outcome.detail}")
    return outcome


def _run_watched(case: Case) -> Outcome:
    with warnings.catch_warnings(record=True) as warned, _Log() as log:
        warnings.simplefilter("always")
        outcome = _run(case)
    said = log.text + "\n".join(str(warning.message) for warning in warned)
    if outcome.kind == "different" and (words := next((words for words in SAYS_SO if words in said), None)):
        return Outcome("refused", f"a warning says {words!r}: {outcome.detail}")
    return outcome


def _run(case: Case) -> Outcome:
    eager: Side = Eager(case.setup, case.setup.make_model())
    try:
        piped: Side = Piped(case.setup, case.setup.make_model())
    except RoundPipeError as error:
        return Outcome("refused", f"{type(error).__name__}: {error}")
    position = 0

    def ended(kind: str, detail: str) -> Outcome:
        return Outcome(kind, f"action {position}, {name}: {detail}", position + 1)

    try:
        for position, (name, seed) in enumerate((*case.actions, ("synchronize", 0))):
            if name == "duplicate":
                eager = eager.copy()
                try:
                    piped = piped.copy()
                except RoundPipeError as error:
                    return ended("refused", f"{type(error).__name__}: {error}")
                continue
            function, _ = ACTIONS[name]
            expected, failure = _outcome_of(function, eager, seed)
            with watched(f"action {position} of {case}"):
                found, error = _outcome_of(function, piped, seed)
            if isinstance(error, RoundPipeError):
                return ended("refused", f"{type(error).__name__}: {error}")
            if failure is not None and type(failure) is type(error):
                return Outcome("equal")
            if failure is not None:
                return ended("invalid" if error is None else "unclear", f"eager raises {failure!r}, {error!r}")
            if error is not None:
                return ended("unclear", f"{type(error).__name__}: {error}")
            if not all(_is_finite(value) for value in expected):
                return ended("invalid", "not finite")
            if problem := _difference(expected, found, _tolerance(eager)):
                may_be_rounding = not _difference(expected, found, _most_rounding(eager))
                if name == "synchronize":
                    problem = _state_difference(eager, piped)
                return replace(ended("different", problem), may_be_rounding=may_be_rounding)
    finally:
        piped.close()
    return Outcome("equal")


def _outcome_of(function: Any, side: Side, seed: int) -> tuple[list[Any], BaseException | None]:
    try:
        return function(side, random.Random(seed)), None
    except Exception as error:
        return [], error


def _is_finite(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or bool(value.isfinite().all())


def _tolerance(side: Side) -> float:
    if side.kept.get("is coarse"):
        return 0.1
    if side.setup.is_exact:
        return EXACT_TOLERANCE
    return 3e-3 if _is_single(side) else 1e-7


def _is_single(side: Side) -> bool:
    return side.setup.dtype is torch.float32 or bool(side.kept.get("is single"))


def _most_rounding(side: Side) -> float:
    """What a difference may be at most to be rounding; 0 if its numbers are not float32."""
    return MOST_ROUNDING * _tolerance(side) if _is_single(side) and not side.kept.get("is coarse") else 0.0


def _gap(was: Any, now: Any) -> float:
    if not isinstance(was, torch.Tensor) and not isinstance(now, torch.Tensor):
        return 0.0 if was == now else float("inf")
    if was is None or now is None:
        other = now if was is None else was
        return float(other.detach().abs().max()) if other.numel() else 0.0
    if was.shape != now.shape or was.dtype != now.dtype:
        return float("inf")
    was, now = was.detach().double(), now.detach().double()
    scale = max(float(was.abs().max()), 1e-2)
    gap = float((was - now).abs().max()) / scale
    return gap if gap == gap else float("inf")


def _difference(expected: list[Any], found: list[Any], tolerance: float) -> str:
    if len(expected) != len(found):
        return f"{len(found)} values, eager gives {len(expected)}"
    for index, (was, now) in enumerate(zip(expected, found, strict=True)):
        if not _gap(was, now) <= tolerance:
            return f"value {index} is {_words(now)}, eager's {_words(was)}"
    return ""


def _state_difference(eager: Side, piped: Side) -> str:
    was, now = eager.observe(), piped.observe()
    if was.keys() != now.keys():
        return f"there is {sorted(was.keys() ^ now.keys())} on one side only"
    for name, value in was.items():
        if not _gap(value, now[name]) <= _tolerance(eager):
            return f"{name} is {_words(now[name])}, eager's {_words(value)}"
    return "other values"


def _words(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {list(value.shape)} {value.flatten()[:3].tolist()}"


def shrink(case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
    """The case without the actions that are not needed for the same kind of outcome, and what becomes of it."""

    def fails(actions: Sequence[tuple[str, int]]) -> bool:
        return run(Case(case.setup, tuple(actions))).kind == outcome.kind

    actions = list(case.actions[: outcome.num_actions])
    if not fails(actions):
        actions = list(case.actions)
    position = len(actions) - 1
    while position >= 0:
        fewer = actions[:position] + actions[position + 1 :]
        if fails(fewer):
            actions = fewer
        position -= 1
    case = Case(case.setup, tuple(actions))
    return case, run(case)
