"""Finds what a ``step_fn`` does with the model's own parameters, which has no effect there.

An update is made of the optimizer's copies, with their gradients, and then takes the place of the model's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from roundpipe.core.errors import enumerated
from roundpipe.runtime.weights.fingerprint import Fingerprint
from roundpipe.runtime.weights.parameter_pair import ParameterPair

_WATCHED_STEPS = 3
"""Of so many it is looked whether they write the model's parameters, by a sample of values, too."""


ABOUT_HOOKS = (
    "model.optim_parameters() have hooks, which never run: gradients come there without a backward. Register hooks on "
    "the model's own parameters"
)


def have_hooks(pairs: Iterable[ParameterPair]) -> bool:
    """Whether any of the optimizer's copies has hooks on its gradient."""
    copies = (pair.copy for pair in pairs if pair.copy is not None)
    return any(copy._backward_hooks or copy._post_accumulate_grad_hooks for copy in copies)


class WrongParameters:
    """Looks at the ``step_fn`` of one model; what it finds is told of once each."""

    def __init__(self) -> None:
        self._text = ""
        self._num_begun = 0
        self._told: set[str] = set()
        self._first: frozenset[int] | None = None
        """The copies that the first update had, by id."""
        self._stepped: set[int] = set()
        """Parameters that some optimizer has stepped, by id."""
        self._before: list[tuple[ParameterPair, Fingerprint | None, Fingerprint]] = []
        """What was known of the model's own, and what they are, before it runs."""
        self._late: list[tuple[ParameterPair, Fingerprint]] = []
        self._pairs: Sequence[ParameterPair] = ()
        self._steps_now: set[int] = set()
        """Parameters that an optimizer steps in the ``step_fn`` that runs, by id."""
        self._left: list[ParameterPair] = []
        """Those whose gradients an optimizer has taken, and ``step_fn`` has left."""

    def begin(self, pairs: Sequence[ParameterPair]) -> None:
        """A ``step_fn`` is about to run."""
        self._before, self._pairs, self._steps_now = [], pairs, set()
        if kept := sum(pair.adds_up for pair in self._left):
            self._tell(
                "kept",
                f"gradients that the last step had taken were still in {kept} of the optimizer's copies, and those of "
                "this step were added to them, as if zero_grad() were left out. Setting .grad of the model's own "
                "parameters to None does not clear them: call optimizer.zero_grad() in step_fn",
            )
        self._num_begun += 1
        if self._num_begun <= _WATCHED_STEPS:
            own = [pair for pair in pairs if pair.copy is not None and pair.twin is None]
            self._before = [(pair, pair.fingerprint, Fingerprint.of(pair.parameter)) for pair in own]
            if have_hooks(own):
                self._tell("hooks", ABOUT_HOOKS)
        copies = {id(pair.copy): pair for pair in pairs if pair.copy is not None}
        self._first = self._first or frozenset(copies)
        late = [pair for key, pair in copies.items() if key not in self._first and key not in self._stepped]
        with_gradient = ((pair, pair.copy) for pair in late if pair.copy is not None and pair.has_gradient)
        self._late = [(pair, Fingerprint.of(copy)) for pair, copy in with_gradient]

    def found(self) -> str:
        """What to warn of, now that it has run; empty: nothing."""
        not_handed_over = [(pair, mark) for pair, known, mark in self._before if pair.fingerprint is known]
        if written := [pair for pair, mark in not_handed_over if mark.is_marked or mark.has_other_values]:
            self._tell(
                "writes",
                f"step_fn wrote {_names(written)}, the model's own parameters, which the update then overwrites: the "
                "write is lost. Write model.optim_parameters() there, or the model after the step",
            )
        late = [pair for pair, mark in self._late if id(pair.copy) not in self._stepped]
        if (
            late
            and "optimizer" not in self._told
            and not any(mark.is_marked or mark.has_other_values for _, mark in self._late)
        ):
            self._tell(
                "late",
                f"{_names(late)}: unfrozen or resized after the first step, and no optimizer in step_fn has the copy, "
                "so that nothing changes it. model.optim_parameters() has parameters that require gradients when it is "
                "asked: add a group of the new ones, or ask for it before any are frozen",
            )
        self._left = [pair for pair in self._pairs if pair.has_gradient and id(pair.copy) in self._steps_now]
        self._before, self._late, self._pairs = [], [], ()
        text, self._text = self._text, ""
        return text

    def note_optimizer(self, parameters: frozenset[int], *, has_closure: bool) -> None:
        """An optimizer that has these, by id, steps; with a closure, which may clear gradients, or without."""
        if not has_closure:
            self._steps_now |= parameters
        if parameters <= self._stepped:
            return
        self._stepped |= parameters
        if own := sum(id(pair.parameter) in parameters for pair in self._pairs if pair.copy is not None):
            self._tell(
                "optimizer",
                f"{own} of the {len(parameters)} parameters of the optimizer in step_fn are the model's own, and it "
                "has model.optim_parameters() of them, too: the model's own get no gradients there. Leave them out",
            )

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._text = text


def _names(pairs: Sequence[ParameterPair]) -> str:
    return enumerated([pair.names[0] for pair in pairs])
