"""The command line: answers checked against arithmetic and against a run, refusals against one line and exit code 2."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from roundpipe.tools import command_line as cli
from roundpipe.tools.cost_file import parse_costs, plan_costs
from roundpipe.tools.option_types import quantity
from tests.tools.cases_command_line import (
    DATA,
    H100,
    QWEN,
    Output,
    even_layers,
    json_of,
)


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "limit_s", "replicated_limit_s"),
    [("qwen3-1.7b", 1.05, 1.02), ("llama3.1-8b", 2.97, 2.89), ("qwen3-32b", 12.77, 12.60)],
)
def test_published_models(run: Output, tmp_path: Path, name: str, limit_s: float, replicated_limit_s: float) -> None:
    costs = published(name)
    command = ("plan", "--costs", written(tmp_path, costs), "--devices", 8, "--microbatches", 9, "--json")
    plain, replicated = json_of(run(*command, "--replicas", "off")), json_of(run(*command))
    assert set(plain) == {
        *("forward", "fused", "backward", "replicas", "rotates", "round_s", "idle", "lower_bound_s", "planning_s"),
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
    found = plan_costs(parse_costs(even_layers(4), num_workers=1, num_microbatches=2))
    assert found["fused"] == (0, 4)
    assert found["round_s"] == found["lower_bound_s"] == pytest.approx(2 * 4 * 3.0)
    assert found["idle"] == pytest.approx(0.0)


def test_the_lower_bound_knows_the_way_to_the_losses() -> None:
    document = even_layers(2, activation_bytes=600_000)  # two layers don't fit in one fused stage
    setting = parse_costs(document, num_workers=8, num_microbatches=3)
    work_s, to_losses_s = 3 * (6.0 + 1.0) / 8, 1.0 + 3 * 3.0
    assert work_s < to_losses_s
    assert plan_costs(setting, replicate=False)["lower_bound_s"] == pytest.approx(to_losses_s)


def test_a_slow_link_makes_the_round_longer() -> None:
    free = plan_costs(parse_costs(even_layers(8), num_workers=2, num_microbatches=4))
    slow = plan_costs(parse_costs({**even_layers(8), "link_bytes_per_s": 20}, num_workers=2, num_microbatches=4))
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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "COMMAND"),
        (("fly",), "fly"),
        (("plan",), "TARGET or --costs"),
        (("plan", QWEN, "--costs", "x.json"), "both"),
        (("plan", "--costs", "missing.json"), "missing.json"),
        (("plan", "--costs", QWEN, "--seq", 3), "--seq"),
        (("plan", "--costs", QWEN, "--sweep", "batch"), "--sweep"),
        (("plan", QWEN, "--flops=--", *H100), "--flops"),
        (("plan", "--costs=--"), "--costs"),
        (("plan", QWEN, "--replicas", "some", *H100), "--replicas"),
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
    [("24GiB", 24 * 2**30), ("25GB/s", 25e9), ("165T", 165e12), ("165TFLOPS", 165e12), ("1.5e12", 1.5e12)],
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
