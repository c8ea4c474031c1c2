"""The command line: ``python -m roundpipe plan | explain | doctor``.

    plan TARGET      what training a model will take: roundpipe.tools.target -> forecast -> forecast_report
    plan --costs     a plan for layers given as numbers: roundpipe.tools.cost_file
    explain TARGET   what is traced and cut of a model: roundpipe.tools.target -> explain
    doctor           what this machine offers: roundpipe.tools.doctor

A command is a function that adds its parser (`COMMANDS`) and sets the function that runs it. This is the only file
of the package that prints.

Invariant: exit code 0 for an answer, 1 for the answer that it doesn't fit or can't be cut, 2 with one line for
arguments that can't be used. With ``--json``, codes 0 and 1 come with JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from roundpipe.core.errors import ConfigError, DeviceMemoryError, RoundPipeError
from roundpipe.reports.timeline import check_path
from roundpipe.tools.comparison import comparison_json, comparison_text
from roundpipe.tools.cost_file import compare_costs, plan_costs, read_costs
from roundpipe.tools.device_data import DEVICES, EFFICIENCY, DeviceSpec, find_device
from roundpipe.tools.doctor import diagnose, diagnosis_text
from roundpipe.tools.explain import explain
from roundpipe.tools.forecast import Machine, Training, compared, forecast, simulated_timeline
from roundpipe.tools.forecast_report import forecast_json, forecast_text
from roundpipe.tools.target import DEFAULT_SEQ, EXPLAINED_SEQ, check_target, load_target

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HOST_BYTES_PER_S = 100e9
"""Four to eight channels of server memory, as far as copies reach."""
FLOPS_PER_BYTE = 150.0
"""Peak compute per memory bandwidth, for a device of which only the compute is given."""

MOST_DEVICES = 256
MOST_MICROBATCHES = 4096
"""More of either than one machine has use for; planning for as many still takes seconds, not minutes."""
MOST_SAMPLES = 10**9
MOST_TOKENS = 10**7
MOST_RANK = 65536
LARGEST_QUANTITY = 1e24

EXPLAINED_SAMPLES = 2
"""One is not like others: dimensions of one are broadcast."""

Run = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help shows the options)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        argv: the arguments; None: those of the process.

    Returns:
        The exit code.
    """
    parser = _Parser(prog="python -m roundpipe", description="Plan training runs, look into models and the machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    options = parser.parse_args(argv)
    run: Run = options.run
    try:
        return run(options)
    except RoundPipeError as error:
        message = " ".join(str(error).split())
        if isinstance(error, DeviceMemoryError) and options.json:
            print(json.dumps({"error": message}))
        print(f"{parser.prog} {options.command}: error: {message}", file=sys.stderr)
        return 1 if isinstance(error, DeviceMemoryError) else 2


# Quantities

_UNITS = {"": 1.0} | {unit: 1000.0 ** (1 + power) for power, unit in enumerate("KMGTP")}
_UNITS |= {f"{unit}i": 1024.0 ** (1 + power) for power, unit in enumerate("KMGTP")}


def quantity(text: str) -> float:
    """A number with a unit, such as ``24GiB``, ``25GB/s``, ``165T`` or ``1.65e14``: from 1 to `LARGEST_QUANTITY`."""
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([KMGTP]?i?)(?:B|FLOPS?)?(?:/s)?", text.strip(), re.IGNORECASE)
    unit = found[2].upper().replace("I", "i") if found else ""
    try:
        value = float(found[1]) * _UNITS[unit] if found else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if not 1 <= value <= LARGEST_QUANTITY:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no quantity from 1 to {LARGEST_QUANTITY:.0e}, such as 24GiB, 25GB/s or 165T"
        )
    return value


def count(most: int) -> Callable[[str], int]:
    """The type of a number of things: from 1 to ``most``."""

    def checked(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = 0
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {most:,}")
        return value

    return checked


def share(text: str) -> float:
    """A share above 0 and up to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share above 0 and up to 1, such as 0.5")
    return value


# plan

_TARGET_HELP = (
    "a Hugging Face config.json, a folder that has one, or package.module:factory (returns a model, or model and "
    "keyword arguments of an example call; under torch.device('meta') it needs no memory)"
)


def add_plan(commands: Any) -> None:
    """The parser of ``plan``."""
    parser = commands.add_parser(
        "plan",
        help="what training a model on given devices will take",
        description="What training a model on given devices will take; no weights and no devices are needed. Exit code "
        "1: it doesn't fit.",
        epilog="Example: python -m roundpipe plan Qwen3-8B/config.json --device-profile RTX-4090 --devices 2",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help=_TARGET_HELP,
    )
    parser.add_argument("--costs", type=Path, metavar="FILE", help="plan for layers given as numbers, in JSON")
    parser.add_argument(
        "--devices", type=count(MOST_DEVICES), default=1, metavar="N", help="devices in the rotation (default: 1)"
    )
    parser.add_argument(
        "--microbatches", type=count(MOST_MICROBATCHES), metavar="M", help="default: devices + 1, at most the batch"
    )
    parser.add_argument("--recompute", choices=("stage", "layer"), default="stage", help="layer: less device memory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--compare", action="store_true", help="the same on other schedules: GPipe, 1F1B, ...")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write the simulated run: .json for ui.perfetto.dev, .png"
    )
    parser.add_argument("--no-replicas", action="store_true", help="with --costs: no stage takes several slots")
    profiles = ", ".join(device.name for device in DEVICES)
    device = parser.add_argument_group("devices, with TARGET", f"profiles: {profiles}")
    device.add_argument("--device-profile", metavar="NAME", help="figures of a known device; options override them")
    device.add_argument("--flops", type=quantity, metavar="RATE", help="dense peak in the model's dtype, such as 165T")
    device.add_argument("--memory", type=quantity, metavar="SIZE", help="of one device, such as 24GiB")
    device.add_argument("--link", type=quantity, metavar="RATE", help="host to device, one direction, such as 31GB/s")
    device.add_argument(
        "--bandwidth", type=quantity, metavar="RATE", help=f"device memory; default: flops / {FLOPS_PER_BYTE:.0f}"
    )
    device.add_argument(
        "--efficiency", type=share, metavar="SHARE", help=f"of the FLOPs, sustained; default: {EFFICIENCY.compute}"
    )
    device.add_argument(
        "--host-memory", type=quantity, metavar="SIZE", help="it fits only within this; default: no limit"
    )
    device.add_argument("--host-bandwidth", type=quantity, metavar="RATE", help="host memory; default: 100GB/s")
    training = parser.add_argument_group("training, with TARGET")
    training.add_argument(
        "--batch", type=count(MOST_SAMPLES), metavar="N", help="samples per step; default: one per microbatch"
    )
    training.add_argument(
        "--seq", type=count(MOST_TOKENS), metavar="N", help=f"tokens per sample; default: {DEFAULT_SEQ}"
    )
    training.add_argument("--dtype", choices=DTYPES, help="of the weights; default: bfloat16")
    training.add_argument("--optimizer", choices=("adamw", "sgd"), help="default: adamw")
    training.add_argument("--optim-dtype", choices=DTYPES, help="of the optimizer's copies; default: float32")
    training.add_argument(
        "--lora", type=count(MOST_RANK), metavar="RANK", help="train adapters of this rank, not the weights"
    )
    parser.set_defaults(run=run_plan)


_WITH_TARGET = (
    *("device_profile", "flops", "memory", "link", "bandwidth", "efficiency", "host_memory", "host_bandwidth"),
    *("timeline", "batch", "seq", "dtype", "optimizer", "optim_dtype", "lora"),
)


def run_plan(options: argparse.Namespace) -> int:
    """``plan``."""
    if (options.target is None) == (options.costs is None):
        given = "neither was" if options.costs is None else "both were"
        raise ConfigError(f"give TARGET or --costs FILE, one of them; {given} given")
    if options.costs is not None:
        wrong = [name for name in _WITH_TARGET if getattr(options, name) is not None]
        if wrong:
            raise ConfigError(f"{_option(wrong[0])} has no meaning with --costs; the file says it all")
        return _plan_costs(options)
    if options.no_replicas:
        raise ConfigError("--no-replicas is for --costs; the runtime gives every stage one slot")
    return _plan_target(options)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plan_costs(options: argparse.Namespace) -> int:
    given = read_costs(options.costs)
    found = plan_costs(
        given,
        num_workers=options.devices,
        num_microbatches=options.microbatches or options.devices + 1,
        replicate=not options.no_replicas,
        recompute_grain=options.recompute,
    )
    rows = []
    if options.compare:
        rows = compare_costs(
            given,
            num_workers=options.devices,
            num_microbatches=options.microbatches or options.devices + 1,
            recompute_grain=options.recompute,
        )
        found["schedules"] = comparison_json(rows)
    if options.json:
        print(json.dumps(found))
        return 0
    for key in ("forward", "fused", "backward", "replicas"):
        print(f"{key:<14}{json.dumps(found[key])}")
    print(f"{'round':<14}{found['round_s']:.6g} s, no plan below {found['lower_bound_s']:.6g} s")
    print(f"{'idle':<14}{found['idle']:.1%}")
    if rows:
        print(f"\n{comparison_text(rows)}")
    return 0


def _plan_target(options: argparse.Namespace) -> int:
    check_target(options.target)
    if options.timeline is not None:
        check_path(options.timeline)
    machine = Machine(
        device=_device(options),
        num_devices=options.devices,
        efficiency=dataclasses.replace(EFFICIENCY, compute=options.efficiency or EFFICIENCY.compute),
        host_bytes_per_s=options.host_bandwidth or HOST_BYTES_PER_S,
        host_memory_bytes=None if options.host_memory is None else int(options.host_memory),
    )
    dtype = DTYPES[options.dtype or "bfloat16"]
    target = load_target(options.target, dtype=dtype, seq=options.seq, lora_rank=options.lora)
    num_microbatches = options.microbatches or options.devices + 1
    batch = options.batch or target.batch or num_microbatches
    if options.microbatches is None:
        num_microbatches = min(num_microbatches, batch)
    training = Training(
        batch=batch,
        num_microbatches=num_microbatches,
        optimizer=options.optimizer or "adamw",
        optim_dtype=DTYPES[options.optim_dtype or "float32"],
        recompute_grain=options.recompute,
    )
    found = forecast(target, machine, training)
    if options.timeline is not None and found.plan is not None:
        simulated_timeline(found).save(options.timeline)
    text, document = "", forecast_json(found) if options.json else {}
    if options.compare:
        tokens = target.tokens_per_sample
        rows, per_round = compared(found), batch * (tokens or 1)
        if options.json:
            document["schedules"] = comparison_json(rows, per_round)
        else:
            text = "\n\n" + comparison_text(rows, per_round, "samples" if tokens is None else "tokens")
    print(json.dumps(document) if options.json else forecast_text(found) + text)
    return 0 if found.fits else 1


def _device(options: argparse.Namespace) -> DeviceSpec:
    """The profile with what was given in its place."""
    given: dict[str, Any] = {
        "flops_per_s": options.flops,
        "memory_bytes": None if options.memory is None else int(options.memory),
        "link_bytes_per_s": options.link,
        "bytes_per_s": options.bandwidth,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if options.device_profile is not None:
        known = find_device(options.device_profile)
        if not given:
            return known
        checked = {name: where for name, where in known.checked.items() if name not in given}
        source = f"{known.source}; options"
        return dataclasses.replace(known, name=f"{known.name} (changed)", source=source, checked=checked, **given)
    missing = [_option(name) for name in ("flops", "memory", "link") if getattr(options, name) is None]
    if missing:
        raise ConfigError(
            f"which device? {', '.join(missing)} not given; give them, or --device-profile with one of "
            f"{', '.join(device.name for device in DEVICES)}"
        )
    given.setdefault("bytes_per_s", options.flops / FLOPS_PER_BYTE)
    return DeviceSpec(name="device", source="options", **given)


# explain


def add_explain(commands: Any) -> None:
    """The parser of ``explain``."""
    parser = commands.add_parser(
        "explain",
        help="what is traced and cut of a model",
        description="The graph of a model, the layers it is cut into, what stays whole and why, what is carried over "
        "each cut, and when a call traces again; no weights are needed. Exit code 1: it can't be cut.",
    )
    parser.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    parser.add_argument(
        "--batch", type=count(MOST_SAMPLES), metavar="N", help=f"samples of the example; default: {EXPLAINED_SAMPLES}"
    )
    parser.add_argument(
        "--seq", type=count(MOST_TOKENS), metavar="N", help=f"tokens per sample; default: {EXPLAINED_SEQ}"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: bfloat16")
    parser.add_argument("--lora", type=count(MOST_RANK), metavar="RANK", help="with adapters of this rank")
    parser.add_argument("--eval", action="store_true", help="the model in evaluation mode; default: in training mode")
    parser.add_argument("--graph", type=Path, metavar="FILE", help="write the graph to FILE.dot or FILE.png")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_explain)


def run_explain(options: argparse.Namespace) -> int:
    """``explain``."""
    dtype = DTYPES[options.dtype or "bfloat16"]
    target = load_target(
        options.target, dtype=dtype, seq=options.seq, lora_rank=options.lora, default_seq=EXPLAINED_SEQ
    )
    target.model.train(not options.eval)
    kwargs = target.kwargs_for(options.batch or target.batch or EXPLAINED_SAMPLES)
    found = explain(target.model, example_kwargs=kwargs, graph=options.graph)
    if options.json:
        print(json.dumps({**found.as_json(), "notes": list(target.notes)}))
    else:
        print(found, *(f"Note: {note}." for note in target.notes), sep="\n")
    return 0 if found.error is None else 1


# doctor


def add_doctor(commands: Any) -> None:
    """The parser of ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine offers: versions, devices, memory, copies",
        description="Versions, devices, memory, whether memory can be pinned, and how fast copies are.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """``doctor``."""
    found = diagnose()
    print(json.dumps(dataclasses.asdict(found)) if options.json else diagnosis_text(found))
    return 0


COMMANDS = (add_plan, add_explain, add_doctor)
