"""The command line: ``python -m roundpipe plan | explain | doctor``.

To add a command, name it in `COMMANDS`. This is the only file of the package that prints.

Invariant: exit code 0 for an answer, 1 for the answer that it doesn't fit or can't be cut, 2 with one line for
arguments that can't be used. With ``--json``, codes 0 and 1 come with JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn, get_args

import torch

from roundpipe.core.errors import ConfigError, DeviceMemoryError, RoundPipeError
from roundpipe.reports.tables import format_share
from roundpipe.reports.timeline import check_path
from roundpipe.runtime.config import Replicas, Residency
from roundpipe.runtime.weights.master_weights import copy_dtype
from roundpipe.tools.comparison import compare_schedules, comparison_json, comparison_text
from roundpipe.tools.cost_file import plan_costs, read_costs
from roundpipe.tools.device_data import DEVICES, EFFICIENCY, DeviceSpec, find_device
from roundpipe.tools.doctor import diagnose, diagnosis_text
from roundpipe.tools.explain import explain
from roundpipe.tools.forecast import forecast, simulated_timeline
from roundpipe.tools.forecast_report import forecast_json, forecast_text, title_of
from roundpipe.tools.graph_report import check_format
from roundpipe.tools.hosts import Network, hosts_json, hosts_text, ways_of
from roundpipe.tools.largest import largest
from roundpipe.tools.machine_file import MeasuredMachine, default_path, measure_machine, measured_text
from roundpipe.tools.option_types import checked, count, file_name, file_to_read, quantity, share
from roundpipe.tools.problem import Machine, Training
from roundpipe.tools.sweep import AXES, parse_axes, sweep, sweep_json, sweep_text
from roundpipe.tools.target import DEFAULT_SEQ, EXPLAINED_SEQ, Target, check_target, load_target

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EXPLAINED_SAMPLES = 2
"""One is not like others: dimensions of one are broadcast."""
HOST_BYTES_PER_S = 100e9
"""Four to eight channels of server memory, as far as copies reach."""
FLOPS_PER_BYTE = 150.0
"""Peak compute per memory bandwidth, for a device of which only the compute is given."""

MOST_SAMPLES, MOST_TOKENS, MOST_RANK = 10**9, 10**7, 65536
MOST_DEVICES, MOST_MICROBATCHES, MOST_HOSTS = 256, 4096, 256
"""More of any than one machine has use for; planning for as many still takes seconds, not minutes."""

_TARGET_HELP = (
    "a Hugging Face config.json, a folder that has one, the name of a model in the local Hugging Face cache such as "
    "Qwen/Qwen3-8B, or package.module:factory (returns a model, or model and "
    "keyword arguments of an example call; under torch.device('meta') it needs no memory)"
)
_WITH_COSTS = {"command", "json", "costs", "devices", "microbatches", "recompute", "compare", "replicas"}
"""Options of ``plan`` that mean something with ``--costs``."""

_Answer = tuple[str | dict[str, Any] | list[dict[str, Any]], int]
"""Text, or with ``--json`` a value; and the exit code."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the command line; every one has the option ``--json``."""

    summary: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], _Answer]
    epilog: str | None = None


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help shows the options)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, None: that of the process; returns the exit code."""
    parser = _Parser(prog="python -m roundpipe", description="Plan training runs, look into models and the machine.")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = parsers.add_parser(name, help=command.summary, description=command.description, epilog=command.epilog)
        added.add_argument("--json", action="store_true", help="print JSON")
        command.add_options(added)
    options = parser.parse_args(argv)
    if empty := [name for name, value in vars(options).items() if value == []]:  # as argparse reads `--seq=--`
        parser.error(f"argument {_option(empty[0])}: expected one argument")
    try:
        output, exit_code = COMMANDS[options.command].run(options)
    except RoundPipeError as error:
        message = " ".join(str(error).split())
        if isinstance(error, DeviceMemoryError) and options.json:
            print(json.dumps({"error": message}))
        print(f"{parser.prog} {options.command}: error: {message}", file=sys.stderr)
        return 1 if isinstance(error, DeviceMemoryError) else 2
    print(output if isinstance(output, str) else json.dumps(output))
    return exit_code


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help=_TARGET_HELP)
    add("--costs", type=checked(file_name), metavar="FILE", help="plan for layers given as numbers, in JSON")
    add("--devices", type=count(MOST_DEVICES), default=1, metavar="N", help="devices in the rotation (default: 1)")
    add("--microbatches", type=count(MOST_MICROBATCHES), metavar="M", help="default: devices + 1, at most the batch")
    add("--recompute", choices=("stage", "layer"), default="stage", help="layer: less device memory")
    lives = "whether trained weights live on the device, as RoundPipeRunConfig has it; default: auto"
    add("--residency", choices=get_args(Residency), help=lives)
    axes = ",".join(AXES)
    add("--sweep", type=checked(parse_axes), metavar="NAMES", help=f"a table over some of {axes}: devices,batch,lora")
    add("--compare", action="store_true", help="the same on other schedules: GPipe, 1F1B, ...")
    shown = "write the simulated run: .json for ui.perfetto.dev, .png"
    add("--timeline", type=checked(check_path), metavar="FILE", help=shown)
    shares = "whether devices may share a stage; default: auto with --costs, else off, as in a run"
    add("--replicas", choices=get_args(Replicas), help=shares)
    profiles = ", ".join(device.name for device in DEVICES)
    add = parser.add_argument_group("devices, with TARGET", f"profiles: {profiles}").add_argument
    measured = "a machine as doctor --bench measured it; options override it"
    add("--machine", type=checked(file_to_read), metavar="FILE", help=measured)
    known = "figures of a known device; options override them"
    add("--device-profile", type=checked(find_device), metavar="NAME", help=known)
    add("--flops", type=quantity, metavar="RATE", help="dense peak in the model's dtype, such as 165T")
    add("--memory", type=quantity, metavar="SIZE", help="of one device, such as 24GiB")
    add("--link", type=quantity, metavar="RATE", help="host to device, one direction, such as 31GB/s")
    add("--bandwidth", type=quantity, metavar="RATE", help=f"device memory; default: flops / {FLOPS_PER_BYTE:.0f}")
    add("--efficiency", type=share, metavar="SHARE", help=f"of the FLOPs, sustained; default: {EFFICIENCY.compute}")
    add("--host-memory", type=quantity, metavar="SIZE", help="it fits only within this; default: no limit")
    add("--host-bandwidth", type=quantity, metavar="RATE", help="host memory; default: 100GB/s")
    add("--hosts", type=count(MOST_HOSTS), metavar="N", help="hosts like this one, with --network: ways to use them")
    add("--network", type=quantity, metavar="RATE", help="of each host, one direction, such as 25GB/s")
    add = parser.add_argument_group("training, with TARGET").add_argument
    add("--batch", type=count(MOST_SAMPLES), metavar="N", help="samples per step; default: one per microbatch")
    add("--seq", type=count(MOST_TOKENS), metavar="N", help=f"tokens per sample; default: {DEFAULT_SEQ}")
    add("--max-length", action="store_true", help="find the longest sequence that fits, and what limits it")
    add("--max-batch", action="store_true", help="find the largest batch that fits in as many microbatches")
    add("--dtype", choices=DTYPES, help="of the weights; default: bfloat16")
    add("--optimizer", choices=("adamw", "sgd"), help="default: adamw")
    add("--optim-dtype", choices=DTYPES, help="of the optimizer's copies; default: float32, or wider weights' own")
    add("--lora", type=count(MOST_RANK), metavar="RANK", help="train adapters of this rank, not the weights")


def _default_optim_dtype(model: torch.nn.Module) -> torch.dtype:
    """The widest of the copies that a compiled model has."""
    dtypes = {copy_dtype(parameter.dtype, None) for parameter in model.parameters() if parameter.requires_grad}
    return max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _plan(options: argparse.Namespace) -> _Answer:
    if (options.target is None) == (options.costs is None):
        mistake = "neither was" if options.costs is None else "both were"
        raise ConfigError(f"give TARGET or --costs FILE, one of them; {mistake} given")
    if options.costs is not None:
        given = {name for name, value in vars(options).items() if value not in (None, False)}
        wrong = sorted(given - _WITH_COSTS)
        if wrong:
            raise ConfigError(f"{_option(wrong[0])} has no meaning with --costs; the file says it all")
        return _plan_costs(options)
    return _plan_target(options)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plan_costs(options: argparse.Namespace) -> _Answer:
    setting = read_costs(
        options.costs,
        num_workers=options.devices,
        num_microbatches=options.microbatches or options.devices + 1,
        recompute_grain=options.recompute,
    )
    document = plan_costs(setting, replicate=options.replicas != "off")
    rows = compare_schedules(setting, setting.fastest_plan()) if options.compare else []
    if options.compare:
        document["schedules"] = comparison_json(rows)
    if options.json:
        return document, 0
    lines = [f"{key:<14}{json.dumps(document[key])}" for key in ("forward", "fused", "backward", "replicas")]
    lines.append(f"{'round':<14}{document['round_s']:.6g} s, no plan below {document['lower_bound_s']:.6g} s")
    lines.append(f"{'idle':<14}{format_share(document['idle'])}")
    if rows:
        lines += ["", comparison_text(rows)]
    return "\n".join(lines), 0


def _plan_target(options: argparse.Namespace) -> _Answer:
    check_target(options.target)
    is_search = options.max_length or options.max_batch
    for search, given in (("max_length", "seq"), ("max_batch", "batch"), ("max_length", "max_batch")):
        if getattr(options, search) and getattr(options, given):
            raise ConfigError(f"{_option(search)} finds the largest; leave {_option(given)} out")
    axes = options.sweep or ()
    if axes and is_search:
        raise ConfigError("--sweep makes a table, --max-length and --max-batch search; give one of them")
    if (options.hosts is None) != (options.network is None) or (options.hosts and axes):
        raise ConfigError("--hosts N and --network RATE go together, and without --sweep")
    measured = _measured(options)
    host_memory = options.host_memory or (measured and measured.host_memory_bytes)
    machine = Machine(
        device=DEVICES[0] if "cards" in axes else _device(options, measured),
        num_devices=options.devices,
        efficiency=dataclasses.replace(EFFICIENCY, compute=options.efficiency or EFFICIENCY.compute),
        host_bytes_per_s=options.host_bandwidth or (measured.host_bytes_per_s if measured else HOST_BYTES_PER_S),
        host_memory_bytes=int(host_memory) if host_memory else None,
        update_bytes_per_s=measured.update_bytes_per_s if measured else inf,
        conversion_bytes_per_s=measured.conversion_bytes_per_s if measured else inf,
        visit_s=measured.visit_s if measured else 0.0,
    )
    if axes:
        swept = sweep(
            axes, partial(_target, options, DEFAULT_SEQ), options.lora, machine, partial(training_of, options)
        )
        exit_code = 0 if any(row.result.fits for row in swept) else 1
        return sweep_json(swept) if options.json else sweep_text(swept), exit_code
    target = _target(options, DEFAULT_SEQ, options.lora)
    training = training_of(options, target, options.devices)
    found = largest("length" if options.max_length else "batch", target, machine, training) if is_search else None
    result = forecast(target, machine, training) if found is None else found.forecast
    training, target = result.training, result.layers.target
    if options.timeline is not None and result.plan is not None:
        timeline = simulated_timeline(result)
        timeline.name = f"{title_of(result)}, simulated"
        timeline.save(options.timeline)
    rows = compare_schedules(result.setting, result.plan) if options.compare else []
    tokens = target.tokens_per_sample
    per_step, exit_code = training.batch * (tokens or 1), 0 if result.fits else 1
    network = Network(options.hosts or 1, options.network or inf)
    ways, of_all = ways_of(result, network) if options.hosts else [], network.num_hosts * per_step
    exit_code = 0 if any(way.fits for way in ways) else exit_code
    if options.json:
        compared = {"schedules": comparison_json(rows, per_step)} if options.compare else {}
        searched = {} if found is None else {f"max_{found.what}": found.size, "limit": found.limit}
        hosts = {"hosts": hosts_json(ways, network, of_all)} if ways else {}
        return forecast_json(result) | compared | searched | hosts, exit_code
    parts = [forecast_text(result)]
    if found is not None:
        parts.append(f"longest sequence: {found}" if found.what == "length" else f"largest batch: {found}")
    unit = "samples" if tokens is None else "tokens"
    if options.compare:
        parts.append(comparison_text(rows, per_step, unit))
    if ways:
        parts.append(hosts_text(ways, network, of_all, unit))
    return "\n\n".join(parts), exit_code


def training_of(options: argparse.Namespace, target: Target, num_devices: int, times: int = 1) -> Training:
    """What the options say for a number of devices; with several times the batch, microbatches keep their size."""
    first = options.microbatches or options.devices + 1
    batch = options.batch or target.batch or first
    number = max(times * min(first, batch) if times > 1 else 1, num_devices + 1)
    return Training(
        batch=times * batch,
        num_microbatches=times * options.microbatches if options.microbatches else min(number, times * batch),
        optimizer=options.optimizer or "adamw",
        optim_dtype=DTYPES[options.optim_dtype] if options.optim_dtype else _default_optim_dtype(target.model),
        recompute_grain=options.recompute,
        residency=options.residency or "auto",
        replicas=options.replicas or "off",
    )


def _measured(options: argparse.Namespace) -> MeasuredMachine | None:
    """The machine that is planned for, if it was measured; this one if the options name no device."""
    if options.machine is not None:
        if options.device_profile is not None:
            raise ConfigError("--machine and --device-profile both name a device; give one of them")
        return MeasuredMachine.read(options.machine)
    names_device = any((options.device_profile, options.flops, options.memory, options.link))
    return MeasuredMachine.read(default_path()) if not names_device and default_path().exists() else None


def _device(options: argparse.Namespace, measured: MeasuredMachine | None) -> DeviceSpec:
    """The profile, or what was measured, with what the options say in its place."""
    figures: dict[str, Any] = {
        "flops_per_s": options.flops,
        "memory_bytes": None if options.memory is None else int(options.memory),
        "link_bytes_per_s": options.link,
        "bytes_per_s": options.bandwidth,
    }
    figures = {name: value for name, value in figures.items() if value is not None}
    if measured is not None or options.device_profile is not None:
        profile = measured.spec if measured is not None else options.device_profile
        if not figures:
            return profile
        checked = {name: where for name, where in profile.checked.items() if name not in figures}
        source = f"{profile.source}; options"
        return dataclasses.replace(profile, name=f"{profile.name} (changed)", source=source, checked=checked, **figures)
    missing = [_option(name) for name in ("flops", "memory", "link") if getattr(options, name) is None]
    if missing:
        raise ConfigError(
            f"which device? {', '.join(missing)} not given; give them, or --device-profile with one of "
            f"{', '.join(device.name for device in DEVICES)}; or measure this machine with doctor --bench"
        )
    figures.setdefault("bytes_per_s", options.flops / FLOPS_PER_BYTE)
    return DeviceSpec(name="device", source="options", **figures)


def _target(options: argparse.Namespace, default_seq: int, lora_rank: int | None) -> Target:
    dtype = DTYPES[options.dtype or "bfloat16"]
    return load_target(options.target, dtype=dtype, seq=options.seq, lora_rank=lora_rank, default_seq=default_seq)


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="TARGET", help=_TARGET_HELP)
    add("--batch", type=count(MOST_SAMPLES), metavar="N", help=f"samples of the example; default: {EXPLAINED_SAMPLES}")
    add("--seq", type=count(MOST_TOKENS), metavar="N", help=f"tokens per sample; default: {EXPLAINED_SEQ}")
    add("--dtype", choices=DTYPES, help="of the weights; default: bfloat16")
    add("--lora", type=count(MOST_RANK), metavar="RANK", help="with adapters of this rank")
    add("--eval", action="store_true", help="the model in evaluation mode; default: in training mode")
    add("--graph", type=checked(check_format), metavar="FILE", help="write the graph to FILE.dot or FILE.png")


def _explain(options: argparse.Namespace) -> _Answer:
    check_target(options.target)
    target = _target(options, EXPLAINED_SEQ, options.lora)
    target.model.train(not options.eval)
    kwargs = target.kwargs_for(options.batch or target.batch or EXPLAINED_SAMPLES)
    explanation = explain(target.model, example_kwargs=kwargs, graph=options.graph)
    exit_code = 0 if explanation.error is None else 1
    if options.json:
        return {**explanation.as_json(), "notes": list(target.notes)}, exit_code
    return "\n".join((str(explanation), *(f"Note: {note}." for note in target.notes))), exit_code


def _add_doctor_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--bench", action="store_true", help="measure more, and write a file that plan reads")
    add("--machine", type=checked(file_name), metavar="FILE", help=f"the file; default: {_shown(default_path())}")


def _shown(path: Path) -> str:
    return str(path).replace(str(Path.home()), "~")


def _doctor(options: argparse.Namespace) -> _Answer:
    if options.machine is not None and not options.bench:
        raise ConfigError("--machine is the file that --bench writes; give --bench, too")
    diagnosis = diagnose()
    if not options.bench:
        return dataclasses.asdict(diagnosis) if options.json else diagnosis_text(diagnosis), 0
    path, machine = options.machine or default_path(), measure_machine(diagnosis)
    machine.write(path)
    figures = dataclasses.asdict(machine)
    if options.json:
        return dataclasses.asdict(diagnosis) | {"machine": figures, "file": str(path)}, 0
    return f"{diagnosis_text(diagnosis)}\n\n{measured_text(machine)}\n\nplan reads this from {path}", 0


COMMANDS = {
    "plan": Command(
        summary="what training a model on given devices will take",
        description="What training a model on given devices will take; no weights and no devices are needed. Exit "
        "code 1: it doesn't fit.",
        add_options=_add_plan_options,
        run=_plan,
        epilog="Example: python -m roundpipe plan Qwen3-8B/config.json --device-profile RTX-4090 --devices 2",
    ),
    "explain": Command(
        summary="what is traced and cut of a model",
        description="The graph of a model, the layers it is cut into, what stays whole and why, what is carried over "
        "each cut, and when a call traces again; no weights are needed. Exit code 1: it can't be cut.",
        add_options=_add_explain_options,
        run=_explain,
    ),
    "doctor": Command(
        summary="what this machine offers: versions, devices, memory, copies",
        description="Versions, devices, memory, whether memory can be pinned, and how fast copies are.",
        add_options=_add_doctor_options,
        run=_doctor,
    ),
}
