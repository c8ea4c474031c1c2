"""`plan` for models: configs, factories, advice, timelines."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.runtime.engine import replanning
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.tools import command_line as cli
from roundpipe.tools.device_data import EFFICIENCY, find_device
from roundpipe.tools.forecast import Forecast, forecast
from roundpipe.tools.problem import Machine, Training
from roundpipe.tools.target import Target, load_target
from tests.tools.cases_command_line import (
    DATA,
    FACTORY,
    H100,
    TINY,
    Output,
    even_layers,
    json_of,
    num_tiny_parameters,
)

transformers = pytest.importorskip("transformers")


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


SMALL = ("--flops", "1T", "--memory", "1GiB", "--link", "1GB/s")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


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


@pytest.mark.long
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


@pytest.mark.long
def test_one_of_each_is_singular(run: Output, tiny: Path) -> None:
    code, out, _ = run("plan", tiny, *SMALL, "--seq", 1, "--batch", 1)
    assert code == 0
    assert re.search(r"^step .*: 1 sample of 1 token in 1 microbatch$", out, re.MULTILINE)


@pytest.mark.long
def test_fewer_devices_are_advised_where_they_are_faster(
    run: Output, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a slow link binds, and the plan of a first step stays: fewer stages move fewer weights."""
    slow = ("--flops", "10T", "--memory", "1GiB", "--link", "10MB/s", "--optimizer", "sgd", "--seq", 16)
    command = ("plan", tiny, *slow, "--residency", "off", "--microbatches", 1, "--recompute", "layer", "--json")
    best = json_of(run(*command, "--devices", 3))
    assert not [change for change in best["changes"] if "--devices" in change]
    # the plan of measured layers makes use of all devices: only without it is there something to advise
    monkeypatch.setattr(replanning, "REPLAN_GAIN", 1.0)
    found = json_of(run(*command, "--devices", 3))
    assert best["step"]["seconds"] < found["step"]["seconds"]
    (change,) = [change for change in found["changes"] if "--devices" in change]
    options, _, promise = change.partition(": +")
    assert options.startswith("--devices 2 ")
    other = json_of(run(*command, *options.split()))
    assert best["step"]["seconds"] < other["step"]["seconds"]
    gain = found["step"]["seconds"] / other["step"]["seconds"] - 1
    assert f"{gain:.0%} throughput" == promise
    for one in (found, other):
        step, idle = one["step"], one["step"]["idle"]
        assert 0 <= idle["total"] <= 1 and step["compute_s"] > 0
        assert step["compute_s"] == pytest.approx(step["seconds"] * (1 - idle["total"]))


@pytest.mark.long
def test_options_change_what_they_say(run: Output, tiny: Path) -> None:
    def of(*options: object) -> Any:
        return json_of(run("plan", tiny, *SMALL, "--batch", 8, "--seq", 16, "--json", *options))

    plain, size = of(), num_tiny_parameters()
    assert of("--optimizer", "sgd")["host_memory"]["optimizer_states"] == 0
    assert of("--optim-dtype", "bfloat16")["host_memory"]["optimizer_copies"] == 2 * size
    assert of("--dtype", "float32", "--residency", "off")["host_memory"]["gradients"] == 4 * size
    adapters = of("--lora", 2)
    per_block = 2 * (32 + 32 + 32 + 16 + 32 + 16 + 32 + 32 + 2 * (32 + 64) + 64 + 32)  # q, k, v, o, gate, up, down
    assert adapters["host_memory"]["gradients"] == 2 * 6 * per_block
    slower = of("--efficiency", 0.1)
    assert slower["layers"][1]["forward_s"] >= plain["layers"][1]["forward_s"]
    assert of("--host-memory", "1GiB")["fits"] is True


def test_what_does_not_fit(run: Output, tiny: Path) -> None:
    code, out, _ = run("plan", tiny, *SMALL, "--memory", "400K", "--batch", 16, "--seq", 64)
    assert code == 1
    assert re.search(r"doesn't fit, because layer \d+ .* does not fit the device budget", out)
    assert re.search(r"^to change +\S", out, re.MULTILINE)
    code, out, _ = run("plan", tiny, *SMALL, "--seq", 16, "--host-memory", "100K", "--json")
    found = json.loads(out)
    assert (code, found["fits"]) == (1, False)
    assert "the host needs" in found["reasons"][0]


@pytest.mark.long
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


@pytest.mark.long
def test_a_timeline_is_written(run: Output, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    command = ("plan", tiny, *SMALL, "--devices", 2, "--batch", 6, "--seq", 16, "--json", "--timeline", path)
    found = json_of(run(*command))
    written = json.loads(path.read_text())
    assert re.fullmatch(r"tiny on 2 x .+, simulated", written["otherData"]["model"])
    events = written["traceEvents"]
    computed = [event for event in events if event.get("cat") == "compute"]
    assert {event["pid"] for event in computed} == {1, 2}
    fused = [event for event in computed if event["args"]["part"] == "fused"]
    runs = {(event["args"]["job"], event["args"]["microbatch"]) for event in fused}  # one may be shown in parts
    assert len(runs) == 3 * found["microbatches"]
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
        # what is measured on CPU workers would change the plan
        pipe._runner.builder.plans = PlanChooser(2, [on.budget_bytes], accelerators=True)
        table = pipe.partition_table()
        pipe.forward_backward(input_kwargs=inputs, loss_fn=lambda out, _: out.loss)
        assert pipe.partition_table() == table
        assert pipe._runner.builder.last_plan == found.plan  # as values: the table rounds
        assert pipe._runner.last_chain.specs == found.layers.chain.specs  # as above


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


@pytest.mark.long
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
    block = next(
        cost for cost, spec in zip(found.costs, found.layers.chain.specs, strict=True) if "layers.1" in spec.name
    )
    assert 0.9 < block.forward_s * 1e3 / shape["forward_ms"] < 1.3
    assert 0.9 < block.backward_s * 1e3 / shape["backward_ms"] < 1.3
