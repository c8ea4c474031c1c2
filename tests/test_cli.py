"""The command line: answers checked against arithmetic and against a run, refusals against one line and exit code 2."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.tools import command_line as cli
from roundpipe.tools.arguments import quantity
from roundpipe.tools.cost_file import lower_bound_s, parse_costs, plan_costs
from roundpipe.tools.device_data import DEVICES, EFFICIENCY, FIGURES, find_device
from roundpipe.tools.forecast import forecast
from roundpipe.tools.forecast_setting import Forecast, Machine, Training
from roundpipe.tools.target import EXPLAINED_SEQ, Target, load_target

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"
QWEN = DATA / "qwen3_8b_config.json"

Output = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Output:
    """Runs a command line in this process: exit code, what it printed, what it complained of."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = int(exit.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def json_of(result: tuple[int, str, str]) -> Any:
    assert result[0] == 0, result
    return json.loads(result[1])


# plan --costs


def even_layers(number: int, **changes: Any) -> dict[str, Any]:
    """A chain of like layers."""
    layer = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "weight_bytes": 100,
        "activation_bytes": 10,
        "carry_bytes": 1,
        **changes,
    }
    return {"layers": [{"name": f"block{index}", **layer} for index in range(number)], "device_memory_bytes": 10**6}


def published(name: str) -> dict[str, Any]:
    """A published model: an embedding, its blocks and its head, on cards of 24 GB."""
    data = json.loads((DATA / "published_layer_times.json").read_text())
    model, tokens = data["models"][name], data["tokens"]
    hidden, head_dim, inner = model["hidden"], model["head_dim"], model["intermediate"]
    heads = 2 * model["heads"] + 2 * model["kv_heads"]
    vocabulary_bytes = 2 * model["vocab"] * hidden
    carried = {"carry_bytes": 2 * tokens * hidden}
    embedding = {"forward_s": 3e-4, "backward_s": 3e-4, "weight_bytes": vocabulary_bytes, **carried}
    block = {
        "forward_s": model["forward_ms"] / 1e3,
        "backward_s": model["backward_ms"] / 1e3,
        "weight_bytes": 2 * hidden * (head_dim * heads + 3 * inner),
        "activation_bytes": 2 * tokens * (5 * hidden + head_dim * heads + 3 * inner),
        **carried,
    }
    head = {
        "forward_s": model["head_forward_ms"] / 1e3,
        "backward_s": model["head_backward_ms"] / 1e3,
        "weight_bytes": vocabulary_bytes,
        "activation_bytes": 4 * tokens * hidden,
        **carried,
    }
    layers = [{**embedding, "activation_bytes": 0}, *[block] * model["num_layers"], head]
    return {"layers": layers, "device_memory_bytes": data["device_memory_bytes"]}


def written(folder: Path, costs: Any) -> Path:
    path = folder / "costs.json"
    path.write_text(json.dumps(costs))
    return path


@pytest.mark.parametrize(
    ("name", "limit_s", "replicated_limit_s"),
    [("qwen3-1.7b", 1.05, 1.02), ("llama3.1-8b", 2.97, 2.89), ("qwen3-32b", 12.77, 12.60)],
)
def test_published_models(run: Output, tmp_path: Path, name: str, limit_s: float, replicated_limit_s: float) -> None:
    costs = published(name)
    command = ("plan", "--costs", written(tmp_path, costs), "--devices", 8, "--microbatches", 9, "--json")
    plain, replicated = json_of(run(*command, "--no-replicas")), json_of(run(*command))
    assert set(plain) == {
        *("forward", "fused", "backward", "replicas", "round_s", "idle", "lower_bound_s", "planning_s"),
    }
    assert plain["round_s"] <= limit_s
    assert replicated["round_s"] <= replicated_limit_s
    for found in (plain, replicated):
        start, stop = found["fused"]
        assert [layer for one in found["forward"] for layer in range(*one)] == list(range(start))
        assert [layer for one in reversed(found["backward"]) for layer in range(*one)] == list(range(start))
        assert stop == len(costs["layers"])
        assert len(found["replicas"]) == len(found["forward"]) + 1 + len(found["backward"])
        assert found["lower_bound_s"] <= found["round_s"]
        times = [(layer["forward_s"], layer["backward_s"]) for layer in costs["layers"]]
        work_s = 9 / 8 * (sum(map(sum, times)) + sum(forward_s for forward_s, _ in times[:start]))
        assert found["idle"] == pytest.approx(1 - work_s / found["round_s"])
    assert set(plain["replicas"]) == {1}
    assert max(replicated["replicas"]) > 1


def test_one_device_does_all_work() -> None:
    found = plan_costs(parse_costs(even_layers(4)), num_workers=1, num_microbatches=2)
    assert found["fused"] == [0, 4]
    assert found["round_s"] == found["lower_bound_s"] == pytest.approx(2 * 4 * 3.0)
    assert found["idle"] == pytest.approx(0.0)


def test_the_lower_bound_knows_the_way_to_the_losses() -> None:
    costs = parse_costs(even_layers(2, activation_bytes=600_000))  # two layers don't fit in one fused stage
    work_s, to_losses_s = 3 * (6.0 + 1.0) / 8, 1.0 + 3 * 3.0
    assert work_s < to_losses_s
    assert lower_bound_s(costs, 8, 3, replicate=False) == pytest.approx(to_losses_s)


def test_a_slow_link_makes_the_round_longer() -> None:
    free = plan_costs(parse_costs(even_layers(8)), num_workers=2, num_microbatches=4)
    slow = plan_costs(parse_costs({**even_layers(8), "link_bytes_per_s": 20}), num_workers=2, num_microbatches=4)
    assert set(slow["replicas"]) == {1}
    # All weights at least once, and their gradients the other way, by two links.
    assert slow["round_s"] >= max(free["round_s"], 8 * 100 / 20 / 2)


def test_gradients_weigh_as_much_as_weights_unless_given() -> None:
    assert [one.gradient_bytes for one in parse_costs(even_layers(1)).costs] == [100]
    assert [one.gradient_bytes for one in parse_costs(even_layers(1, gradient_bytes=7)).costs] == [7]


def test_costs_that_do_not_fit(run: Output, tmp_path: Path) -> None:
    costs = {**even_layers(3), "device_memory_bytes": 50}
    code, out, err = run("plan", "--costs", written(tmp_path, costs))
    assert (code, out) == (1, "")
    assert "block" in err
    assert "50 bytes" in err


def test_costs_that_do_not_fit_as_json(run: Output, tmp_path: Path) -> None:
    costs = {**even_layers(3), "device_memory_bytes": 50}
    code, out, err = run("plan", "--costs", written(tmp_path, costs), "--json")
    error = json.loads(out)["error"]
    assert code == 1
    assert error in err and "block" in error and "50 bytes" in error


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_replicas_are_at_most_as_many_as_devices(run: Output, tmp_path: Path, num_devices: int) -> None:
    costs = even_layers(4)
    costs["layers"][-1].update(forward_s=3.0, backward_s=6.0)
    command = ("plan", "--costs", written(tmp_path, costs), "--devices", num_devices, "--compare", "--json")
    found = json_of(run(*command))
    assert max(found["replicas"]) <= num_devices
    assert all(0 <= row["idle"] <= 1 for row in found["schedules"] if row["idle"] is not None)


def test_costs_of_no_time(run: Output, tmp_path: Path) -> None:
    costs = {"layers": even_layers(2)["layers"] + even_layers(9, forward_s=0, backward_s=0)["layers"]}
    for number in (1, 4):
        found = json_of(run("plan", "--costs", written(tmp_path, costs), "--devices", number, "--compare", "--json"))
        assert found["round_s"] > 0
    nothing = even_layers(9, forward_s=0, backward_s=0)
    assert json_of(run("plan", "--costs", written(tmp_path, nothing), "--devices", 2, "--json"))["round_s"] == 0


def test_the_greedy_plan_of_single_layers_is_compared_where_no_other_fits(run: Output, tmp_path: Path) -> None:
    sizes = [(10, 5, 0), (869, 0, 0), (26, 64, 0), (0, 473, 1), (100, 5, 1)]
    layers = [
        {"forward_s": 1, "backward_s": 1, "weight_bytes": weights, "activation_bytes": kept, "carry_bytes": carried}
        for weights, kept, carried in sizes
    ]
    costs = {"layers": layers, "device_memory_bytes": 2557, "link_bytes_per_s": 100}
    command = ("plan", "--costs", written(tmp_path, costs), "--devices", 3, "--microbatches", 3, "--compare", "--json")
    rows = {row["name"]: row for row in json_of(run(*command))["schedules"]}
    assert rows["rotation"]["fits"] and rows["rotation, greedy"]["fits"]
    assert rows["rotation"]["seconds_per_round"] <= rows["rotation, greedy"]["seconds_per_round"] * 1.001


def test_costs_as_text(run: Output, tmp_path: Path) -> None:
    code, out, _ = run("plan", "--costs", written(tmp_path, even_layers(3)), "--devices", 2)
    assert code == 0
    assert re.search(r"^fused +\[\d, 3\]$", out, re.MULTILINE)


# Wrong arguments

NO_LAYERS: Any = {"layers": []}
NO_TIME = {"layers": [{"name": "a", "forward_s": 1}]}
NEGATIVE = even_layers(1, weight_bytes=-1)
TEXT = even_layers(1, carry_bytes="many")
HUGE = even_layers(1, weight_bytes=10**400)


@pytest.mark.parametrize(
    ("costs", "named"),
    [
        (NO_LAYERS, "layers"),
        (HUGE, "give a number from 0 to 1e+24"),
        (even_layers(1, forward_s=1e308), "1e+308; give a number"),
        ({**even_layers(1), "device_memory_bytes": 10**400}, "device_memory_bytes"),
        (NO_TIME, "layer 0 (a)"),
        (NEGATIVE, "weight_bytes"),
        (TEXT, "'many'"),
        ([], "layers"),
    ],
)
def test_wrong_costs(run: Output, tmp_path: Path, costs: Any, named: str) -> None:
    code, out, err = run("plan", "--costs", written(tmp_path, costs), "--json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert named in err
    assert "costs.json" in err


H100 = ("--device-profile", "H100")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "COMMAND"),
        (("fly",), "fly"),
        (("plan",), "TARGET or --costs"),
        (("plan", QWEN, "--costs", "x.json"), "both"),
        (("plan", "--costs", "missing.json"), "missing.json"),
        (("plan", "--costs", QWEN, "--seq", 3), "--seq"),
        (("plan", QWEN, "--no-replicas", *H100), "--no-replicas"),
        (("plan", QWEN), "--flops, --memory, --link"),
        (("plan", "no/such/folder"), "no/such/folder: there is no such file"),
        (("plan", QWEN, "--flops", "1T", "--memory", "1GiB"), "--link"),
        (("plan", QWEN, "--device-profile", "TPU"), "RTX-4090"),
        (("plan", QWEN, "--device-profile", "H100", "--memory", "lots"), "'lots'"),
        (("plan", QWEN, "--devices", 0, *H100), "--devices"),
        (("plan", QWEN, "--devices", 10**6, *H100), "from 1 to 256"),
        (("plan", QWEN, "--microbatches", 10**9, *H100), "from 1 to 4,096"),
        (("plan", QWEN, "--batch", 10**20, *H100), "--batch"),
        (("plan", QWEN, "--batch", 10**9, *H100), "500,000,000 samples"),
        (("plan", QWEN, "--lora", 10**12, *H100), "--lora"),
        (("plan", QWEN, "--flops", "1e400", *H100), "--flops"),
        (("plan", QWEN, "--link", "nan", *H100), "--link"),
        (("plan", QWEN, "--bandwidth", "1e-300", *H100), "--bandwidth"),
        (("plan", QWEN, "--efficiency", "nan", *H100), "--efficiency"),
        (("plan", QWEN, "--efficiency", 2, *H100), "--efficiency"),
        (("plan", QWEN, "--seq", 10**6, *H100), "40960"),
        (("plan", QWEN, "--batch", 2, "--microbatches", 3, *H100), "--microbatches"),
        (("plan", "no/such/folder", *H100), "no/such/folder"),
        (("plan", DATA, *H100), "config.json"),
        (("plan", DATA / "published_layer_times.json", *H100), "published_layer_times.json"),
        (("plan", "no_such_package:factory", *H100), "no_such_package"),
        (("plan", "json:no_such_function", *H100), "no_such_function"),
        (("plan", "json:JSONDecoder", *H100), "nn.Module"),
        (("plan", ":factory", *H100), "package.module:factory"),
        (("plan", "json:", *H100), "package.module:factory"),
        (("plan", "../json:load", *H100), "can't be imported"),
        (("plan", "json:load", *H100), "called without arguments"),
        (("plan", "torch.nn:Identity", *H100), "return (model, kwargs)"),
        (("explain",), "TARGET"),
        (("explain", "no/such/folder"), "no/such/folder"),
        (("explain", QWEN, "--graph", "graph.svg"), ".dot or .png"),
        (("explain", QWEN, "--graph", "no/such/folder/graph.dot"), "no folder"),
        (("explain", QWEN, "--batch", 0), "--batch"),
        (("doctor", "--fix"), "--fix"),
    ],
)
def test_wrong_arguments(run: Output, arguments: tuple[object, ...], named: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert named in err


@pytest.mark.parametrize(
    ("text", "value"),
    [("24GiB", 24 * 2**30), ("25GB/s", 25e9), ("165T", 165e12), ("165TFLOPS", 165e12), ("1.5e12", 1.5e12), ("7", 7)],
)
def test_quantities(text: str, value: float) -> None:
    assert quantity(text) == pytest.approx(value)


NAMES = ["rotation", "rotation, replicas", "rotation, greedy", "GPipe", "1F1B", "interleaved 1F1B"]


def test_schedules_side_by_side_for_costs(tmp_path, run):
    path = written(tmp_path, even_layers(16))
    command = ("plan", "--costs", path, "--devices", 4, "--microbatches", 8)
    found = json_of(run(*command, "--compare", "--json"))
    rows = {row["name"]: row for row in found["schedules"]}
    assert list(rows) == NAMES
    for name in ("GPipe", "1F1B"):
        assert rows[name]["idle"] == pytest.approx(3 / 11, abs=2e-4)
    assert rows["interleaved 1F1B"]["idle"] == pytest.approx(3 / 19, abs=2e-4)
    assert rows["rotation"]["idle"] < 0.05
    assert "schedules" not in json_of(run(*command, "--json"))
    code, out, _ = run(*command, "--compare")
    assert code == 0
    assert all(f"\n{name} " in out for name in NAMES)


# plan TARGET

TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SMALL = ("--flops", "1T", "--memory", "1GiB", "--link", "1GB/s")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def num_tiny_parameters() -> int:
    attention = 32 * 8 * (4 + 2 + 2) + 4 * 8 * 32 + 2 * 8
    return 2 * 97 * 32 + 32 + 6 * (attention + 3 * 32 * 64 + 2 * 32)


def test_a_config(run: Output, tiny: Path) -> None:
    found = json_of(run("plan", tiny, *SMALL, "--devices", 2, "--batch", 6, "--seq", 16, "--json"))
    size = num_tiny_parameters()
    assert found["fits"] is True
    assert (found["model"], found["microbatches"], found["reasons"]) == ("tiny", 3, [])
    assert sum(layer["num_parameters"] for layer in found["layers"]) == size
    assert found["plan"]["fused"][1] == len(found["layers"])
    assert found["step"]["tokens_per_s"] == pytest.approx(6 * 16 / found["step"]["seconds"])
    idle = found["step"]["idle"]
    assert idle["total"] == pytest.approx(sum(share for cause, share in idle.items() if cause != "total"))
    assert found["step"]["compute_s"] <= found["step"]["seconds"]
    host = found["host_memory"]
    assert host["gradients"] == 2 * size
    assert (host["optimizer_copies"], host["optimizer_states"]) == (4 * size, 8 * size)
    assert 0 <= host["weights"] - 2 * size < 1024  # with buffers
    assert "not measured" in found["basis"] or "nothing was measured" in found["basis"]


def test_what_of_a_config_is_not_followed_is_said(run: Output, tiny: Path) -> None:
    assert json_of(run("explain", tiny, "--seq", 8, "--json"))["notes"] == []
    changes = {"architectures": ["FastForCausalLM"], "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tiny / "config.json").write_text(json.dumps({**TINY, **changes}))
    expected = (
        "transformers has no FastForCausalLM, which the config names: this is Qwen3ForCausalLM",
        "the config's quantization_config is left out: weights count as bfloat16",
    )
    for command in (("plan", tiny, *SMALL), ("explain", tiny)):
        code, out, _ = run(*command, "--seq", 8)
        assert code == 0
        assert all(note in out for note in expected)
        assert set(expected) <= set(json_of(run(*command, "--seq", 8, "--json"))["notes"])


def test_one_of_each_is_singular(run: Output, tiny: Path) -> None:
    code, out, _ = run("plan", tiny, *SMALL, "--seq", 1, "--batch", 1)
    assert code == 0
    assert re.search(r"^step .*: 1 sample of 1 token in 1 microbatch$", out, re.MULTILINE)


def test_fewer_devices_are_advised_where_they_are_faster(run: Output, tiny: Path) -> None:
    """Where a slow link binds: fewer stages move fewer weights."""
    slow = ("--flops", "10T", "--memory", "1GiB", "--link", "10MB/s", "--optimizer", "sgd", "--seq", 16)
    command = ("plan", tiny, *slow, "--microbatches", 1, "--recompute", "layer", "--json")
    found = json_of(run(*command, "--devices", 3))
    (change,) = [change for change in found["changes"] if "--devices" in change]
    options, _, promise = change.partition(": +")
    assert options.startswith("--devices 1 ")
    other = json_of(run(*command, *options.split()))
    gain = found["step"]["seconds"] / other["step"]["seconds"] - 1
    assert f"{gain:.0%} throughput" == promise
    for one in (found, other):
        step, idle = one["step"], one["step"]["idle"]
        assert 0 <= idle["total"] <= 1 and step["compute_s"] > 0
        assert step["compute_s"] == pytest.approx(step["seconds"] * (1 - idle["total"]))


def test_options_change_what_they_say(run: Output, tiny: Path) -> None:
    def of(*options: object) -> Any:
        return json_of(run("plan", tiny, *SMALL, "--batch", 8, "--seq", 16, "--json", *options))

    plain, size = of(), num_tiny_parameters()
    assert of("--optimizer", "sgd")["host_memory"]["optimizer_states"] == 0
    assert of("--optim-dtype", "bfloat16")["host_memory"]["optimizer_copies"] == 2 * size
    assert of("--dtype", "float32")["host_memory"]["gradients"] == 4 * size
    adapters = of("--lora", 2)
    per_block = 2 * (32 + 32 + 32 + 16 + 32 + 16 + 32 + 32 + 2 * (32 + 64) + 64 + 32)  # q, k, v, o, gate, up, down
    assert adapters["host_memory"]["gradients"] == 2 * 6 * per_block
    slower = of("--efficiency", 0.1)
    assert slower["layers"][1]["forward_s"] >= plain["layers"][1]["forward_s"]
    assert of("--host-memory", "1GiB")["fits"] is True


def test_what_does_not_fit(run: Output, tiny: Path) -> None:
    code, out, _ = run("plan", tiny, *SMALL, "--memory", "400K", "--batch", 16, "--seq", 64)
    assert code == 1
    assert "doesn't fit, because layer" in out
    assert re.search(r"^to change +\S", out, re.MULTILINE)
    code, out, _ = run("plan", tiny, *SMALL, "--seq", 16, "--host-memory", "100K", "--json")
    found = json.loads(out)
    assert (code, found["fits"]) == (1, False)
    assert "the host needs" in found["reasons"][0]


def test_a_suggested_change_holds(run: Output, tiny: Path) -> None:
    command = ("plan", tiny, *SMALL, "--memory", "1300K", "--devices", 1, "--batch", 64, "--seq", 64)
    code, out, _ = run(*command, "--json")
    assert code == 1
    found = json.loads(out)
    (change,) = found["changes"]
    options, _, promise = change.partition(":")
    assert promise == " fits the devices"
    assert run(*command, *options.split())[0] == 0


def machine(num_devices: int, memory_bytes: int) -> Machine:
    device = dataclasses.replace(find_device("H100"), memory_bytes=memory_bytes)
    return Machine(device, num_devices, EFFICIENCY, 100e9)


def forecast_of(target: Target, on: Machine, training: Training) -> Forecast:
    found = forecast(target, on, training)
    assert found.plan is not None
    return found


def test_a_timeline_is_written(run: Output, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    command = ("plan", tiny, *SMALL, "--devices", 2, "--batch", 6, "--seq", 16, "--json", "--timeline", path)
    found = json_of(run(*command))
    events = json.loads(path.read_text())["traceEvents"]
    computed = [event for event in events if event.get("cat") == "compute"]
    assert {event["pid"] for event in computed} == {1, 2}
    fused = [event for event in computed if event["args"]["part"] == "fused"]
    assert len(fused) == 3 * found["microbatches"]
    starts = sorted({event["args"]["job"]: event["ts"] for event in reversed(fused)}.values())
    assert (starts[2] - starts[0]) / 2e6 == pytest.approx(found["step"]["seconds"], rel=0.02)
    assert any(event["name"].startswith("optimizer step") for event in events)


def test_a_timeline_that_cannot_be_written(run: Output, tiny: Path, tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(even_layers(3)))
    for given, message in (
        ((tiny, *SMALL, "--timeline", tmp_path / "run.txt"), "json or .png"),
        (("--costs", costs, "--timeline", tmp_path / "run.json"), "--timeline has no meaning with --costs"),
    ):
        code, out, err = run("plan", *given)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_the_plan_is_the_one_that_runs(tiny: Path) -> None:
    target = load_target(str(tiny), dtype=torch.float32, seq=16, lora_rank=None)
    on = machine(2, 1_000_000)
    found = forecast_of(target, on, Training(batch=6, num_microbatches=3))
    real = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(str(tiny)))
    real.config.use_cache = False
    devices = [roundpipe.Device("cpu", memory_bytes=on.budget_bytes)] * 2
    inputs = target.kwargs_for(6)
    with roundpipe.compile(real, example_kwargs=inputs, devices=devices) as pipe:
        pipe._runner.builder.plans = PlanChooser(2, [on.budget_bytes], accelerators=True)  # forecasts are for those
        table = pipe.partition_table()
        pipe.forward_backward(input_kwargs=inputs, loss_fn=lambda out, _: out.loss)
        assert pipe._runner.builder.last_plan == found.plan
        assert pipe.partition_table() == table
        assert pipe._runner.last_chain.specs == found.chain.specs


FACTORY = """
import torch
from torch import nn

def with_example():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), {"input": torch.zeros(4, 64)}

def alone():
    return nn.Linear(2, 2)

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, input):
        hidden = self.inner(input)
        return hidden + 1 if hidden.sum() > 0 else hidden

def untraceable():
    return Branches(), {"input": torch.zeros(4, 64)}

def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 4), nn.ReLU()), {"input": torch.zeros(4, 64, device="cpu")}

def misnamed():
    return nn.Linear(64, 4), {"inputs": torch.zeros(4, 64)}

def raises():
    raise ValueError("no such\\nweights")

def exits():
    raise SystemExit("enough")
"""


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("misnamed", "Linear can't be called with these arguments: missing a required argument: 'input'"),
        ("raises", "ValueError: no such (wrong_factories.py:"),
        ("exits", "SystemExit: enough (wrong_factories.py:"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "explain"])
def test_wrong_factories(
    run: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, named: str
) -> None:
    (tmp_path / "wrong_factories.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = run(command, f"wrong_factories:{name}", *(H100 if command == "plan" else ()))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert named in err


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("def broken(:\n", "SyntaxError: invalid syntax"),
        ("raise RuntimeError('too early')\n", "RuntimeError: too early (bad_code_1.py:1)"),
    ],
)
def test_code_that_cannot_be_imported(
    run: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, named: str
) -> None:
    name = f"bad_code_{int('early' in source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, err = run("explain", f"{name}:factory")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert named in err


def test_a_config_that_is_refused_says_why(run: Output, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": "big"}))
    code, out, err = run("plan", path, *H100)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert re.search(r"hidden_size.*: .*\bint\b.*'?big", err), err


def test_a_factory(run: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_factories.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = json_of(run("plan", "cli_factories:with_example", *SMALL, "--batch", 12, "--json"))
    assert (found["batch"], found["microbatches"], found["tokens_per_sample"]) == (12, 2, None)
    assert sum(layer["forward_flops"] for layer in found["layers"]) == 2 * 6 * 8 * 64 * 64  # one microbatch
    assert any("loss" in note for note in found["notes"])
    code, out, _ = run("plan", "cli_factories:on_meta", *SMALL)
    assert code == 0
    assert re.search(r"^step +.* samples/s: 4 samples in 2 microbatches$", out, re.MULTILINE)
    code, _, err = run("plan", "cli_factories:alone", *SMALL)
    assert (code, err.count("\n")) == (2, 1)
    assert "(model, kwargs)" in err
    code, out, err = run("plan", "cli_factories:untraceable", *SMALL)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no forecast" in err


def test_seconds_of_a_block_are_near_published_ones(tmp_path: Path) -> None:
    data = json.loads((DATA / "published_layer_times.json").read_text())
    shape = data["models"]["llama3.1-8b"]
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=16,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=2048,
    )
    config.save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype=torch.bfloat16, seq=2048, lora_rank=None)
    # The published times are with 16-bit accumulation, which is twice as fast on this card.
    device = dataclasses.replace(find_device("4090"), flops_per_s=2 * find_device("4090").flops_per_s)
    found = forecast_of(target, Machine(device, 1, EFFICIENCY, 100e9), Training(4, 1, "sgd"))
    block = next(cost for cost, spec in zip(found.costs, found.chain.specs, strict=True) if "layers.1" in spec.name)
    assert 0.9 < block.forward_s * 1e3 / shape["forward_ms"] < 1.3
    assert 0.9 < block.backward_s * 1e3 / shape["backward_ms"] < 1.3


# explain


def test_explain_a_config(run: Output, tiny: Path, tmp_path: Path) -> None:
    code, out, err = run("explain", tiny, "--seq", 16, "--batch", 3, "--graph", tmp_path / "tiny.dot")
    assert (code, err) == (0, "")
    assert out.startswith("Qwen3ForCausalLM, traced for 96 input elements\n")
    assert "inputs input_ids: i64[3, 16], labels: i64[3, 16]" in out
    assert "6 times, the first of them:\n    model.layers.0 (Qwen3DecoderLayer) -> bf16[3, 16, 32]" in out
    hidden = 2 * 3 * 16 * 32 / 1024
    assert f"model_layers_0 {hidden:.2f} KiB" in out  # carried over the cut behind it
    assert "A call traces again unless" in out
    assert (tmp_path / "tiny.dot").read_text().startswith("digraph model {")
    config = {**TINY, "max_position_embeddings": 4096}
    (tiny / "config.json").write_text(json.dumps(config))
    assert json_of(run("explain", tiny, "--json"))["example_elements"] == 2 * 2 * EXPLAINED_SEQ


def as_in_readme(run: Output, command: str) -> tuple[str, str]:
    """What the README's one example of a command prints, and what the README says it prints."""
    pattern = rf"^```text\n\$ python -m roundpipe ({command} .*?)\n(.*?)^```$"
    ((line, shown),) = re.findall(pattern, (ROOT / "README.md").read_text(), re.M | re.S)
    arguments = [str(QWEN) if word.endswith("config.json") else word for word in line.split("|")[0].split()]
    code, out, _ = run(*arguments)
    assert code == 0
    return out, shown


def test_the_readme_shows_what_explain_prints(run: Output) -> None:
    out, shown = as_in_readme(run, "explain")
    assert [line for line in out.splitlines() if "asked at" not in line] == shown.splitlines()


def test_explain_as_json(run: Output, tiny: Path) -> None:
    found = json_of(run("explain", tiny, "--seq", 16, "--dtype", "float32", "--json"))
    assert found["traced"] is True and found["example_elements"] == 2 * 2 * 16
    assert sum(layer["num_parameters"] for layer in found["layers"]) == num_tiny_parameters()
    assert len(found["cuts"]) == len(found["layers"]) - 1
    for cut, layer in zip(found["cuts"], found["layers"], strict=False):
        assert cut["bytes"] == sum(cut["values"].values()) == layer["carry_bytes"]
    names = [node["name"] for node in found["graph"]]
    assert len(set(names)) == len(names) and set(found["outputs"]) <= set(names)
    assert all(source in names for node in found["graph"] for source in node["inputs"])
    blocks = [node for node in found["graph"] if node["target"] == "model.layers.3"]
    assert [(node["op"], node["value"], node["bytes"]) for node in blocks] == [
        ("call_module", "f32[2, 16, 32]", 4 * 2 * 16 * 32)
    ]
    assert found["opaque"] == {} and any("input_ids" in guard for guard in found["guards"])


def test_explain_in_evaluation_mode_and_with_adapters(run: Output, tiny: Path) -> None:
    trained = json_of(run("explain", tiny, "--seq", 16, "--json"))
    frozen = json_of(run("explain", tiny, "--seq", 16, "--lora", 2, "--eval", "--json"))

    def gradient_bytes(found: Any) -> int:
        return sum(layer["gradient_bytes"] for layer in found["layers"])

    assert 0 < gradient_bytes(frozen) < gradient_bytes(trained) / 2


def test_explain_a_factory(run: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explained.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run("explain", "explained:on_meta", "--batch", 7)
    assert code == 0
    assert "f32[7, 64]" in out and "traced for 448 input elements" in out
    code, out, _ = run("explain", "explained:untraceable", "--graph", tmp_path / "none.dot")
    assert code == 1
    assert out.startswith("Branches can't be cut into layers.")
    assert "explained.py:" in out and "torch.where(condition, a, b)" in out
    assert not (tmp_path / "none.dot").exists()
    code, out, _ = run("explain", "explained:untraceable", "--json")
    found = json.loads(out)
    assert (code, found["traced"]) == (1, False)
    assert "explained.py:" in found["error"]


# Devices, doctor, the process


def test_device_profiles() -> None:
    assert {device.name for device in DEVICES} == {
        *("RTX-3090", "RTX-4090", "RTX-5090", "A6000", "A100-80G", "H100", "H200", "MI300X"),
    }
    for device in DEVICES:
        assert "https://" in device.source
        assert set(device.checked) == set(FIGURES)
        for name, where in device.checked.items():
            assert re.search(r"\S, https?://\S+\.\S+$", where), f"{device.name}, {name}: {where!r} names no page"
        assert 10e12 < device.flops_per_s < 3e15
        assert device.link_bytes_per_s < device.bytes_per_s < inf
        assert find_device(device.name.lower().replace("-", " ")) is device
    assert find_device("4090") is find_device("RTX4090")
    with pytest.raises(ConfigError, match="MI300X"):
        find_device("abacus")


@pytest.mark.parametrize(
    ("name", "num_units", "clock_hz", "flops_per_clock", "num_bits", "bits_per_s"),
    [  # of a tensor core (AMD: a compute unit), dense, float32 accumulation, which GeForce cards do at half rate
        ("RTX-3090", 328, 1.695e9, 128, 384, 19.5e9),
        ("RTX-4090", 512, 2.520e9, 128, 384, 21e9),
        ("RTX-5090", 680, 2.407e9, 128, 512, 28e9),
        ("A6000", 336, 1.800e9, 256, 384, 16e9),
        ("A100-80G", 432, 1.410e9, 512, 5120, 3.186e9),
        ("H100", 528, 1.830e9, 1024, 5120, 5.23e9),
        ("H200", 528, 1.830e9, 1024, 6144, 6.25e9),
        ("MI300X", 304, 2.100e9, 2048, 8192, 5.2e9),
    ],
)
def test_profiles_are_what_cores_and_clocks_give(
    name: str, num_units: int, clock_hz: float, flops_per_clock: int, num_bits: int, bits_per_s: float
) -> None:
    device = find_device(name)
    assert device.flops_per_s == pytest.approx(num_units * clock_hz * flops_per_clock, rel=3e-3)
    assert device.bytes_per_s == pytest.approx(num_bits / 8 * bits_per_s, rel=6e-3)


def test_links_are_what_lanes_give() -> None:
    for gigatransfers, device in ((16, find_device("4090")), (32, find_device("5090"))):
        assert device.link_bytes_per_s == pytest.approx(gigatransfers * 1e9 * 16 / 8 * 128 / 130, rel=3e-3)


def test_doctor(run: Output) -> None:
    found = json_of(run("doctor", "--json"))
    assert found["versions"]["torch"] == torch.__version__
    assert found["num_threads"] == torch.get_num_threads()
    assert found["memcpy_bytes_per_s"] > 1e8
    assert bool(found["devices"]) == torch.accelerator.is_available()
    code, out, _ = run("doctor")
    assert code == 0
    assert f"torch         {torch.__version__}" in out
    assert "pinning" in out


def test_the_module_runs_as_a_program_and_stops_quietly() -> None:
    command = [sys.executable, "-m", "roundpipe", "plan", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0
    assert "--device-profile" in result.stdout
    read, write = os.pipe()
    os.close(read)  # whoever reads is gone already, as behind ``| head``
    try:
        result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_readme_shows_what_is_printed(run: Output) -> None:
    out, shown = as_in_readme(run, "plan")
    printed = out[out.index("\nstep") + 1 :]
    number = r"\d[\d,]*(?:\.\d+)?"
    assert re.sub(number, "#", printed.strip()) == re.sub(number, "#", shown.strip())
    for one, other in zip(re.findall(number, printed), re.findall(number, shown), strict=True):
        assert float(one.replace(",", "")) == pytest.approx(float(other.replace(",", "")), rel=0.1, abs=0.2)
