"""`doctor --bench` writes a file, and `plan` uses it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe.core.errors import ConfigError
from roundpipe.tools import machine_file
from roundpipe.tools.command_line import main
from roundpipe.tools.device_data import EFFICIENCY
from roundpipe.tools.machine_file import MeasuredMachine
from tests.tools.cases_command_line import TINY

MACHINE = MeasuredMachine("card", 8 * 10**9, 8e12, 8e11, 1.6e10, 64 * 10**9, 1e11, 2e10, 1e10, "measured in a test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model's config, and the place where the machine's file is looked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


@pytest.mark.long
def test_bench_writes_what_plan_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_file, "UPDATED_PARAMETERS", 2**16)
    monkeypatch.setattr(machine_file, "PRODUCT_SIZE", 64)
    plan = ["plan", str(folder / "config.json"), "--seq", "16"]
    assert main(plan) == 2
    assert "doctor --bench" in capsys.readouterr().err
    assert main(["doctor", "--bench", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(folder / "roundpipe" / "machine.json")
    assert found["machine"] == json.loads(Path(found["file"]).read_text())
    figures = found["machine"]
    assert figures["host_bytes_per_s"] >= figures["update_bytes_per_s"] > 0
    assert 0 < figures["visit_s"] < 1
    if not torch.accelerator.is_available():
        assert figures["memory_bytes"] == figures["host_memory_bytes"] == found["host_bytes"]
        assert figures["link_bytes_per_s"] == found["memcpy_bytes_per_s"]
    assert main(plan) == 0
    assert figures["device"] in capsys.readouterr().out


@pytest.mark.long
def test_plans_rest_on_the_measured_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Updates that are slower than the host's memory make a step longer."""
    file, plan = folder / "machine.json", ["plan", str(folder / "config.json"), "--seq", "16", "--json"]
    plan += ["--residency", "off"]  # else all of it lives on the device, where the host's rate does not count

    def planned(machine: MeasuredMachine) -> dict[str, Any]:
        machine.write(file)
        assert main([*plan, "--machine", str(file)]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    slow = replace(MACHINE, update_bytes_per_s=1e5)
    assert planned(slow)["step"]["samples_per_s"] < planned(MACHINE)["step"]["samples_per_s"] / 2
    assert MACHINE.spec.flops_per_s * EFFICIENCY.compute == MACHINE.flops_per_s
    assert MACHINE.spec.link_bytes_per_s * EFFICIENCY.link == MACHINE.link_bytes_per_s


@pytest.mark.long
def test_visits_make_steps_longer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plan = folder / "machine.json", ["plan", str(folder / "config.json"), "--seq", "16", "--json"]
    seconds = []
    for visit_s in (0.0, 1.0):
        replace(MACHINE, visit_s=visit_s).write(file)
        assert main([*plan, "--residency", "off", "--machine", str(file)]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["step"]["seconds"])
    assert seconds[1] >= seconds[0] + 1.0


def test_files_from_before_visits_were_measured_are_read(tmp_path: Path) -> None:
    file, figures = tmp_path / "machine.json", asdict(MACHINE)
    del figures["visit_s"]
    file.write_text(json.dumps(figures))
    assert MeasuredMachine.read(file) == MACHINE
    file.write_text(json.dumps(figures | {"visit_s": -1.0}))
    with pytest.raises(ConfigError, match="visit_s is -1.0; it must be 0 or more"):
        MeasuredMachine.read(file)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"device": "card"})], ids=["empty", "list", "nothing", "incomplete"]
)
def test_other_files_are_refused(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "other.json"
    file.write_text(text)
    assert main(["plan", str(folder / "config.json"), "--machine", str(file)]) == 2
    assert "doctor --bench writes such a file" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["plan", "x.json", "--machine", str(folder / "none.json"), "--device-profile", "H100"])
    assert end.value.code == 2 and "--machine" in capsys.readouterr().err
    assert main(["doctor", "--machine", str(file)]) == 2


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "fast", None, True])
def test_figures_are_above_zero(value: object) -> None:
    with pytest.raises(ConfigError, match="flops_per_s"):
        MeasuredMachine("card", 1, value, 1, 1, 1, 1, 1, 1, "now")  # type: ignore[arg-type]
