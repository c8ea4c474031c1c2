"""Forecasts of what lives on a device, against runs with the same budget: which layers, and how many bytes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.planning.stage_costs import num_trained
from roundpipe.runtime.engine import builder
from roundpipe.runtime.engine.cost_model import CostModel
from roundpipe.runtime.engine.plan_choice import PlanChooser
from roundpipe.tools.command_line import main
from roundpipe.tools.device_data import EFFICIENCY, DeviceSpec
from roundpipe.tools.forecast import Forecast, forecast_at
from roundpipe.tools.problem import Layers, Machine, Training
from roundpipe.tools.target import Target

transformers = pytest.importorskip("transformers", reason="plans for a Llama")

LENGTH = 16
TRAINING = Training(batch=6, num_microbatches=3, residency="full")


@pytest.fixture(autouse=True)
def plans_by_estimates(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs on CPU workers are planned as on accelerators, by what is estimated, as forecasts are."""
    monkeypatch.setattr(
        builder, "PlanChooser", lambda *args, **options: PlanChooser(*args, **{**options, "accelerators": True})
    )
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def decoder(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
        tie_word_embeddings=kind == "tied",
    )
    # the public constructor takes no dtype
    model = transformers.LlamaForCausalLM._from_config(config, dtype=dtype).train()
    if kind == "LoRA":
        peft = pytest.importorskip("peft", reason="adapters")
        model.requires_grad_(False)
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules="all-linear"), model)
    return model


def kwargs_for(num_samples: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(num_samples * LENGTH).reshape(num_samples, LENGTH) % 256
    return {"input_ids": ids, "labels": ids}


def layers_of(kind: str, dtype: torch.dtype = torch.float32) -> Layers:
    with torch.device("meta"):
        model = decoder(kind, dtype)
    return Layers.of(Target(kind, model, kwargs_for, None, LENGTH, True), 2, machine(10**9))


def machine(memory_bytes: int, num_devices: int = 1) -> Machine:
    device = DeviceSpec("device", memory_bytes, 1e13, 1e12, 1e10, "made up")
    return Machine(device, num_devices, EFFICIENCY, host_bytes_per_s=1e11)


class Run:
    """Some steps of a decoder on a CPU worker with a forecast's budget, and what there is then.

    ``expects``: whether layers are taken to be as fast as forecast, as once two steps were measured.
    """

    def __init__(
        self, kind: str, found: Forecast, dtype: torch.dtype, *, num_steps: int = 2, expects: bool = False
    ) -> None:
        options = roundpipe.RoundPipeRunConfig(num_microbatch=3, residency=found.training.residency)
        devices = [roundpipe.Device("cpu", memory_bytes=found.machine.budget_bytes)] * found.machine.num_devices
        model, given = decoder(kind, dtype), {"example_kwargs": kwargs_for(2), "optim_dtype": torch.float32}
        self.reports = []
        with roundpipe.compile(model, devices=devices, model_run_config=options, **given) as pipe:
            ours = torch.optim.AdamW(pipe.optim_parameters(), lr=1e-3)
            for _ in range(num_steps):
                pipe.forward_backward(input_kwargs=kwargs_for(6), loss_fn=_own_loss, loss_reduction="mean")
                pipe.step(ours.step, is_async=False)
                self.reports.append(pipe.report())
                if expects and len(self.reports) == 2:
                    # plans are chosen inside calls, by what steps have taught
                    costs, chain = pipe._runner.builder.plans.costs, found.layers.chain
                    known = found.layers.device_costs, chain.example_elements, found.tiles
                    latest = pipe._runner.source.latest  # the chain of the calls
                    costs.expect(latest, *known)
            # as values: tables show them as text
            session, built = pipe._session, pipe._runner.builder
            self.residency, self.plan = built.last_residency, built.last_plan
            self.names = {name for name, each in model.named_parameters() if session.optimizer.lives_there(each)}
            self.peak_bytes = pipe.peak_device_bytes()


def _own_loss(outputs: Any, label: Any) -> torch.Tensor:
    return outputs.loss


def names_there(found: Forecast) -> set[str]:
    """The parameters that are predicted to live there: those of the layers, which tied ones are of two of."""
    layers, chain = found.residency.trained, found.layers.chain
    there = {each for index in layers for each in chain[index].parameters() if each.requires_grad}
    return {name for name, each in found.layers.target.model.named_parameters() if each in there}


@pytest.mark.parametrize(
    ("kind", "dtype", "budgets"),
    [
        ("tied", torch.float32, {5_000_000: 0, 8_000_000: 3}),
        pytest.param("tied", torch.float32, {6_000_000: 1, 10_000_000: 7}, marks=pytest.mark.long),
        ("untied", torch.bfloat16, {8_000_000: 6}),
        ("LoRA", torch.float32, {3_300_000: 7}),
        pytest.param("LoRA", torch.float32, {3_000_000: 5}, marks=pytest.mark.long),
    ],
)
def test_what_lives_there_is_what_does_in_a_run(kind: str, dtype: torch.dtype, budgets: dict[int, int]) -> None:
    layers = layers_of(kind, dtype)
    for memory_bytes, number in budgets.items():
        found = forecast_at(layers, machine(memory_bytes), TRAINING)
        run, device = Run(kind, found, dtype), found.device
        assert len(found.residency.trained) == number
        assert (found.residency, found.plan) == (run.residency, run.plan)  # bytes, too
        assert names_there(found) == run.names and run.reports[-1].num_layers_there == number
        assert device is not None and run.peak_bytes <= device.total <= found.machine.budget_bytes
        forecasts = found.streamed_host or found.host, found.host
        for predicted, report in zip(forecasts, run.reports, strict=True):
            of_a_run = report.host_memory
            assert predicted.weights == of_a_run.weights
            assert predicted.optimizer_copies == of_a_run.optimizer_copies
            assert predicted.optimizer_gradients == of_a_run.optimizer_gradients
        assert (found.host.total < found.host_bytes) is bool(number)


@pytest.mark.parametrize(("kind", "budgets"), [("untied", {4_000_000: 4, 7_000_000: 7}), ("tied", {5_000_000: 5})])
def test_what_lives_on_two_devices_is_what_does_in_a_run(kind: str, budgets: dict[int, int]) -> None:
    layers = layers_of(kind)
    for memory_bytes, number in budgets.items():
        found = forecast_at(layers, machine(memory_bytes, 2), TRAINING)
        run, device = Run(kind, found, torch.float32), found.device
        assert not found.plan.rotates and len(found.residency.trained) == number
        assert (found.residency, found.plan) == (run.residency, run.plan)
        assert names_there(found) == run.names and run.reports[-1].num_layers_there == number
        assert device is not None and run.peak_bytes <= device.total <= found.machine.budget_bytes


def test_steps_are_faster_the_more_lives_there_and_updates_there_take_their_time() -> None:
    layers = layers_of("tied")

    def seconds(memory_bytes: int, residency: Any = "full", **changes: Any) -> float:
        on = replace(machine(memory_bytes), **changes)
        found = forecast_at(layers, on, replace(TRAINING, residency=residency)).simulation
        assert found is not None
        return found.seconds_per_step

    slow_host = {"host_bytes_per_s": 1e9}
    steps = [seconds(memory_bytes, **slow_host) for memory_bytes in (5_000_000, 8_000_000, 10_000_000)]
    assert steps == sorted(steps, reverse=True) and steps[2] < 0.5 * steps[0]
    assert steps[0] == seconds(5_000_000, "off", **slow_host) == seconds(10_000_000, "off", **slow_host)
    fast, slow = (
        seconds(10_000_000, device=replace(machine(10_000_000).device, bytes_per_s=rate)) for rate in (1e15, 1e10)
    )
    found = forecast_at(layers, machine(10_000_000), TRAINING)
    assert slow - fast > found.residency.most.update_s(1e10 * EFFICIENCY.bandwidth) * 0.99


@pytest.mark.parametrize(("memory_bytes", "residency"), [(2_000_000, "off"), (4_000_000, "off"), (6_000_000, "full")])
def test_stages_are_those_of_a_run_where_updates_are_the_limit(
    memory_bytes: int, residency: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which knows its layers, links and updates as a run that has measured them."""
    torch.use_deterministic_algorithms(False)
    layers, training = layers_of("tied"), replace(TRAINING, residency=residency)
    device = DeviceSpec("device", memory_bytes, 2e9, 1e9, 1e8, "made up")
    slow, fast = (Machine(device, 1, EFFICIENCY, 1e15, update_bytes_per_s=rate) for rate in (2e8, 1e15))
    found, beside = forecast_at(layers, slow, training), forecast_at(layers, fast, training)
    assert found.simulation is not None
    assert found.simulation.mean_idle.optimizer > 0.3
    assert (found.plan != beside.plan) is (residency == "off")
    chain_s = found.setting.profile.chain(sum(num_trained(cost) for cost in found.costs))
    links = slow.link_bytes_per_s, slow.link_bytes_per_s

    def measured(num_workers: int, budgets_bytes: Any, *args: Any, **options: Any) -> PlanChooser:
        options |= {"accelerators": True, "chain": lambda: chain_s, "visit_s": lambda: 0.0}
        return PlanChooser(num_workers, budgets_bytes, lambda: links, **options)

    monkeypatch.setattr(builder, "PlanChooser", measured)
    monkeypatch.setattr(CostModel, "times_of", lambda *args: None)
    run = Run("tied", found, torch.float32, num_steps=5, expects=True)
    assert (found.residency, found.plan) == (run.residency, run.plan)
    assert len(found.residency.trained) == (residency == "full")


@pytest.mark.parametrize("is_slow", [False, True])
def test_unasked_all_lives_there_if_that_is_faster_by_enough(is_slow: bool) -> None:
    torch.use_deterministic_algorithms(False)  # with which nothing is decided by times
    layers, training = layers_of("tied"), replace(TRAINING, residency="auto")
    on = replace(machine(12_000_000), host_bytes_per_s=1e9 if is_slow else 1e15)
    found = forecast_at(layers, on, training)
    assert len(found.residency.trained) == 7 * is_slow
    assert found.simulation is not None
    assert found.simulation.downloaded_bytes > 10**6  # gradients, or the weights that follow
    beside_others = forecast_at(layers, on, training, is_alone=False)
    assert not beside_others.residency.trained and beside_others.streamed_host is None
    some = forecast_at(layers, replace(on, device=replace(on.device, memory_bytes=8_000_000)), training)
    assert len(some.residency.trained) == 3 * is_slow


def test_tables_show_what_lives_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = decoder("tied").config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    given = ["plan", str(tmp_path), "--dtype", "float32", "--seq", str(LENGTH), "--batch", "6", "--microbatches", "3"]
    on = ["--flops", "10T", "--link", "10GB/s", "--residency", "full", "--memory", "8000000"]
    assert main([*given, *on]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^lives there +3 of 7 layers \(0 \.\. 2\): ", text, re.MULTILINE)
    assert re.search(r"^layer .* weights +stays ", text, re.MULTILINE)
    assert main([*given, *on, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    host, residency = found["host_memory"], found["residency"]
    assert residency["trained_layers"] == [0, 1, 2] and host["steady_bytes"] < host["needed_bytes"]
    assert [layer["resident_bytes"] > 0 for layer in found["layers"]] == [True] * 3 + [False] * 4
    assert main([*given, *on, "--sweep", "devices"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert "lives there" in rows[2] and "3 of 7 layers" in rows[4]
    assert "5 of 7 layers" in rows[5]  # on two devices, but for those that share a weight of both
