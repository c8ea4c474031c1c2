"""Run options: as the user gives them, as they are resolved for one call, and what a running call can ask for.

Invariant: a `RoundPipeRunConfig` that exists is valid on its own; in a `ResolvedConfig` None is an answer (automatic
splitting, no fixed plan).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NoReturn, get_args

import torch

from roundpipe.core.contexts import contextmanager
from roundpipe.core.errors import ConfigError, MicrobatchError, quoted
from roundpipe.core.execute_plan import ExecutePlan
from roundpipe.core.field_docs import with_field_docs
from roundpipe.core.options import with_options

RecomputeGrain = Literal["stage", "layer"]
RECOMPUTE_GRAINS: tuple[RecomputeGrain, ...] = ("stage", "layer")

LossReduction = Literal["sum", "mean"]
LossScope = Literal["microbatch", "batch"]
Replicas = Literal["auto", "off"]
Residency = Literal["auto", "full", "off"]

AUTO: Literal["auto"] = "auto"
"""Leaves an option to choice: the fastest setting that is predicted to fit."""

SplitInput = tuple[Any, Any] | Callable[[tuple[Any, ...], dict[str, Any], int], tuple[list[Any], list[Any]]]
"""A pair of specs, or ``f(args, kwargs, num_microbatch) -> (args_list, kwargs_list)``."""


@with_options("model_run_config=RoundPipeRunConfig({0}=...), or run_config=RoundPipeRunConfig({0}=...) of one call")
@with_field_docs
@dataclass(frozen=True, slots=True)
class RoundPipeRunConfig:
    """Options of a run; a field left at None is not given.

    Raises:
        ConfigError: a field holds something it can't be; also a `ValueError`.
    """

    num_microbatch: int | Literal["auto"] | None = None
    """Number of pieces a batch is split into; built-in: number of devices + 1. More pieces need less
    device memory; fewer than the number of devices + 1 leave devices idle. ``"auto"``: the fastest number that is
    predicted to fit, chosen once per size of batch; before the layers are known, the built-in one."""

    recompute_grain: RecomputeGrain | Literal["auto"] | None = None
    """What a backward stage recomputes at once: ``"stage"`` (built-in; all its layers, fewest transfers) or
    ``"layer"`` (one layer at a time, lowest peak of device memory). The numbers are the same. ``"auto"``: the faster
    one that is predicted to fit."""

    output_device: torch.device | str | None = None
    """Device that outputs are brought to; built-in: the CPU."""

    split_input: SplitInput | None = None
    """How inputs are split: ``(args_spec, kwargs_spec)``, either of them None for the automatic rule, made of
    ``TensorChunkSpec`` and ``_Replicate`` from ``torch.distributed.pipelining.microbatch``; or
    ``f(args, kwargs, num_microbatch) -> (args_list, kwargs_list)``. Built-in: automatic, on dim 0."""

    split_label: Any = None
    """How labels are split: a spec of the label's own structure, or ``f(label, num_microbatch) -> list``.
    Built-in: automatic, with the batch size of the inputs."""

    merge_output: Any = None
    """How outputs are merged: True (built-in; tensors concatenated on dim 0, scalar tensors averaged,
    everything else equal), False (kept apart, as `RoundPipePackedData`), a spec of ``TensorChunkSpec`` and
    ``_CustomReducer``, or ``f(list of outputs) -> output``."""

    requires_grad: bool | None = None
    """Whether what backward needs is kept; built-in: the caller's grad mode."""

    preserve_rng_state: bool | None = None
    """Whether recomputation repeats the random draws of the forward; built-in: True. False is for models
    that draw nothing."""

    execute_plan: ExecutePlan | None = None
    """Which layers form a stage, in forward and in backward; built-in: chosen by the planner."""

    replicas: Replicas | None = None
    """Whether several workers may run a stage at the same time, each with a share of the microbatches: ``"auto"``,
    where that is predicted to be faster by enough, or ``"off"`` (built-in). A stage's gradients are then sums of the
    workers' sums, the same in every run of the same plan; with other numbers of devices they are rounded otherwise."""

    tiles: int | Literal["auto", "off"] | None = None
    """Number of tiles in which what is computed for each token from itself alone runs, forward and backward, such as
    the logits with their loss and an MLP. The numbers are the same; more tiles need less device memory, and a backward
    then repeats the forward of what is tiled. Built-in: ``"auto"``, as many as are needed to fit, none where there is
    room; ``"off"``: none."""

    residency: Residency | None = None
    """What stays on the devices between visits and rounds: ``"auto"`` (built-in), weights that are not trained, as far
    as there is room beside what the plan needs, and on one accelerator all of a model with gradients and the
    optimizer's side, or as many layers as there is room for, if that is faster and no code notices; ``"off"``: nothing,
    each round uploads weights again; ``"full"``: the same from the second step on, on a CPU worker too, noticed or not;
    see docs/tuning.md."""

    loss_reduction: LossReduction | None = None
    """How the microbatches' losses make up the batch's: ``"sum"`` (built-in) or ``"mean"``; see
    `RoundPipe.forward_backward`."""

    loss_scope: LossScope | None = None
    """What ``loss_fn`` sees: one ``"microbatch"`` at a time (built-in), or the outputs and labels of the whole
    ``"batch"``; see `RoundPipe.forward_backward`."""

    check_finite: bool | None = None
    """Whether to look at each layer's outputs, the losses and all gradients on their way, and raise `NonFiniteError`
    where the first NaN or Inf arises; built-in: False, which costs nothing. True makes accelerators wait after each
    layer. A loss scaler meets Inf on purpose."""

    def __post_init__(self) -> None:
        if self.num_microbatch not in (None, AUTO) and not _is_count(self.num_microbatch):
            self._refuse("num_microbatch", 'an int of at least 1, "auto", or None for the number of devices + 1')
        if self.recompute_grain not in (None, *RECOMPUTE_GRAINS, AUTO):
            self._refuse("recompute_grain", '"stage", "layer" or "auto"')
        if not _names_device(self.output_device):
            self._refuse("output_device", 'a torch.device, or its name such as "cuda:0"; None for the CPU')
        if not _splits_input(self.split_input):
            self._refuse(
                "split_input",
                "a pair (args_spec, kwargs_spec) of a tuple and a dict, either of them None for the automatic "
                "rule, or a function f(args, kwargs, num_microbatch)",
            )
        if self.residency not in (None, *get_args(Residency)):
            self._refuse("residency", '"auto", "full" or "off"')
        if self.loss_reduction not in (None, *get_args(LossReduction)):
            self._refuse("loss_reduction", '"sum" or "mean"')
        if self.replicas not in (None, *get_args(Replicas)):
            self._refuse("replicas", '"auto" or "off"')
        if self.loss_scope not in (None, *get_args(LossScope)):
            self._refuse("loss_scope", '"microbatch" or "batch"')
        for name in ("requires_grad", "preserve_rng_state", "check_finite"):
            if not isinstance(getattr(self, name), bool | None):
                self._refuse(name, "True, False or None (not given)")
        if not isinstance(self.execute_plan, ExecutePlan | None):
            self._refuse("execute_plan", "an ExecutePlan, or None to let the planner choose")
        if self.tiles not in (None, AUTO, "off") and not _is_count(self.tiles):
            self._refuse("tiles", 'an int of at least 1, "auto", "off", or None for "auto"')

    def _refuse(self, name: str, allowed: str) -> NoReturn:
        raise ConfigError(f"RoundPipeRunConfig.{name}: got {quoted(getattr(self, name))}; allowed: {allowed}")


OPTIONS = frozenset(field.name for field in fields(RoundPipeRunConfig)) | {"run_config", "model_run_config"}
"""Names that arguments for a user's code may have by mistake."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _names_device(device: Any) -> bool:
    if device is None or isinstance(device, torch.device):
        return True
    try:
        torch.device(device if isinstance(device, str) else "")
    except RuntimeError:
        return False
    return True


def _splits_input(rule: Any) -> bool:
    if rule is None or callable(rule):
        return True
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        return False
    return isinstance(rule[0], tuple | list | None) and isinstance(rule[1], Mapping | None)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The options of one call, as in `RoundPipeRunConfig`; rules at None are automatic."""

    num_microbatch: int
    """Asked for; a call with fewer samples has fewer."""
    recompute_grain: RecomputeGrain
    output_device: torch.device
    split_input: SplitInput | None
    split_label: Any
    merge_output: Any
    """True is the automatic rule."""
    requires_grad: bool
    preserve_rng_state: bool
    execute_plan: ExecutePlan | None
    """None leaves the choice to the planner."""
    replicas: Replicas | None
    """None: ``"auto"`` where each worker has an accelerator of its own."""
    tiles: int | None
    """None leaves the choice to the planner; 1: none."""

    residency: Residency
    loss_reduction: LossReduction
    loss_scope: LossScope
    check_finite: bool
    auto: frozenset[str] = frozenset()
    """Fields that were left to choice; they hold what is built in."""
    is_number_given: bool = True
    """Whether somebody said into how many microbatches a batch is cut."""

    @property
    def leaves_cut_open(self) -> bool:
        """Whether nobody has said how batches are cut, or into how many microbatches."""
        return self.split_input is None and not self.is_number_given

    def in_one_piece(self) -> ResolvedConfig:
        """The same for a call that cuts nothing."""
        return replace(self, num_microbatch=1, auto=frozenset())


def resolve(call: RoundPipeRunConfig | None, model: RoundPipeRunConfig | None, *, num_devices: int) -> ResolvedConfig:
    """The options of one call: given for the call, else for the model, else built in for ``num_devices`` workers."""
    built_in: dict[str, Any] = {
        "num_microbatch": num_devices + 1,
        "recompute_grain": "stage",
        "output_device": "cpu",
        "merge_output": True,
        "requires_grad": torch.is_grad_enabled(),
        "preserve_rng_state": True,
        "residency": AUTO,
        "loss_reduction": "sum",
        "loss_scope": "microbatch",
        "check_finite": False,
    }
    names = [field.name for field in fields(RoundPipeRunConfig)]
    options = {**dict.fromkeys(names), **built_in}
    for name, config in (("model_run_config", model), ("run_config", call)):
        if not isinstance(config, RoundPipeRunConfig | None):
            raise ConfigError(f"{name}: got {quoted(config)}; pass a RoundPipeRunConfig")
        if config is not None:
            options.update((name, value) for name in names if (value := getattr(config, name)) is not None)
    auto = frozenset(name for name in ("num_microbatch", "recompute_grain") if options[name] == AUTO)
    options.update((name, built_in[name]) for name in auto)
    options["tiles"] = {AUTO: None, "off": 1}.get(options["tiles"], options["tiles"])
    device = options["output_device"] = torch.device(options["output_device"])
    if device.type not in ("cpu", "meta") and not torch.get_device_module(device).is_available():
        raise ConfigError(f"output_device={str(device)!r}: torch sees no such device; None keeps outputs on the CPU")
    numbers = (config.num_microbatch for config in (call, model) if config is not None)
    is_given = next((number for number in numbers if number is not None), AUTO) != AUTO
    return ResolvedConfig(**options, auto=auto, is_number_given=is_given)


_RUNNING_MICROBATCHES: ContextVar[int] = ContextVar("roundpipe_num_microbatches")


@contextmanager
def microbatch_count(num_microbatches: int) -> Iterator[None]:
    """While open, `num_microbatches()` gives this number in the thread that opened it."""
    token = _RUNNING_MICROBATCHES.set(num_microbatches)
    try:
        yield
    finally:
        _RUNNING_MICROBATCHES.reset(token)


def num_microbatches() -> int:
    """The actual number of microbatches of the running call, for use inside ``loss_fn``.

    Raises:
        MicrobatchError: called outside ``loss_fn``.
    """
    try:
        return _RUNNING_MICROBATCHES.get()
    except LookupError:
        raise MicrobatchError(
            "num_microbatches() was called where no microbatch is running; it is known only inside loss_fn"
        ) from None
