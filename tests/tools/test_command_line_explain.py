"""`explain` and `doctor`, device profiles, and the program as a whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe.core.errors import ConfigError
from roundpipe.tools import command_line as cli
from roundpipe.tools.device_data import DEVICES, FIGURES, find_device
from roundpipe.tools.target import EXPLAINED_SEQ
from tests.tools.cases_command_line import (
    FACTORY,
    QWEN,
    TINY,
    Output,
    json_of,
    num_tiny_parameters,
)

ROOT = Path(__file__).parent.parent.parent


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


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def test_explain_a_config(run: Output, tiny: Path, tmp_path: Path) -> None:
    code, out, err = run("explain", tiny, "--seq", 16, "--batch", 3, "--graph", tmp_path / "tiny.dot")
    assert (code, err) == (0, "")
    assert out.startswith("Qwen3ForCausalLM, traced for 48 tokens\n")
    assert "inputs input_ids: i64[3, 16], labels: i64[3, 16]" in out
    assert "6 times, the first of them:\n    model.layers.0 (Qwen3DecoderLayer) -> bf16[3, 16, 32]" in out
    hidden = 2 * 3 * 16 * 32 / 1024
    assert f"model_layers_0 {hidden:.2f} KiB" in out  # carried over the cut behind it
    assert "A call traces again unless" in out
    assert (tmp_path / "tiny.dot").read_text().startswith("digraph model {")
    config = {**TINY, "max_position_embeddings": 4096}
    (tiny / "config.json").write_text(json.dumps(config))
    assert json_of(run("explain", tiny, "--json"))["example_elements"] == 2 * 2 * EXPLAINED_SEQ


def as_documented(run: Output, command: str) -> tuple[str, str]:
    """What the one documented example of a command prints, and what its page says it prints."""
    pattern = rf"^```text\n\$ python -m roundpipe ({command} .*?)\n(.*?)^```$"
    ((line, shown),) = re.findall(pattern, (ROOT / "docs" / "command-line.md").read_text(), re.M | re.S)
    arguments = [str(QWEN) if word.endswith("config.json") else word for word in line.split("|")[0].split()]
    code, out, _ = run(*arguments)
    assert code == 0
    return out, shown


def test_the_page_shows_what_explain_prints(run: Output) -> None:
    requirements = (ROOT / "requirements-dev.txt").read_text()
    if f"transformers=={version('transformers')}\n" not in requirements:
        pytest.skip("the page shows operators of the code of another version of transformers")
    out, shown = as_documented(run, "explain")
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


@pytest.mark.long
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
    assert "f32[7, 64]" in out and "traced for 7 samples" in out
    code, out, _ = run("explain", "explained:untraceable", "--graph", tmp_path / "none.dot")
    assert code == 1
    assert out.startswith("Branches can't be cut into layers.")
    assert "explained.py:" in out and "torch.where(condition, a, b)" in out
    assert not (tmp_path / "none.dot").exists()
    code, out, _ = run("explain", "explained:untraceable", "--json")
    found = json.loads(out)
    assert (code, found["traced"]) == (1, False)
    assert "explained.py:" in found["error"]


def test_device_profiles() -> None:
    assert {device.name for device in DEVICES} == {
        *(
            "RTX-3060",
            "RTX-3060-Ti",
            "RTX-3070",
            "RTX-3080",
            "RTX-3090",
            "RTX-3090-Ti",
            "RTX-4060",
            "RTX-4060-Ti",
            "RTX-4070",
            "RTX-4070-Ti",
            "RTX-4070-Ti-Super",
            "RTX-4080",
            "RTX-4090",
            "RTX-5060-Ti",
            "RTX-5070",
            "RTX-5070-Ti",
            "RTX-5080",
            "RTX-5090",
        ),
        *("A6000", "RTX-6000-Ada", "L4", "L40S", "A100-40G", "A100-80G", "H100", "H200", "B200", "MI300X"),
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
        ("RTX-3060", 112, 1.777e9, 128, 192, 15e9),
        ("RTX-3060-Ti", 152, 1.665e9, 128, 256, 14e9),
        ("RTX-3070", 184, 1.725e9, 128, 256, 14e9),
        ("RTX-3080", 272, 1.710e9, 128, 320, 19e9),
        ("RTX-3090", 328, 1.695e9, 128, 384, 19.5e9),
        ("RTX-3090-Ti", 336, 1.860e9, 128, 384, 21e9),
        ("RTX-4060", 96, 2.460e9, 128, 128, 17e9),
        ("RTX-4060-Ti", 136, 2.535e9, 128, 128, 18e9),
        ("RTX-4070", 184, 2.475e9, 128, 192, 21e9),
        ("RTX-4070-Ti", 240, 2.610e9, 128, 192, 21e9),
        ("RTX-4070-Ti-Super", 264, 2.610e9, 128, 256, 21e9),
        ("RTX-4080", 304, 2.505e9, 128, 256, 22.4e9),
        ("RTX-4090", 512, 2.520e9, 128, 384, 21e9),
        ("RTX-5060-Ti", 144, 2.572e9, 128, 128, 28e9),
        ("RTX-5070", 192, 2.512e9, 128, 192, 28e9),
        ("RTX-5070-Ti", 280, 2.452e9, 128, 256, 28e9),
        ("RTX-5080", 336, 2.617e9, 128, 256, 30e9),
        ("RTX-5090", 680, 2.407e9, 128, 512, 28e9),
        ("A6000", 336, 1.800e9, 256, 384, 16e9),
        ("RTX-6000-Ada", 568, 2.505e9, 256, 384, 20e9),
        ("L40S", 568, 2.490e9, 256, 384, 18e9),
        ("A100-40G", 432, 1.410e9, 512, 5120, 2.43e9),
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


@pytest.mark.long
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


@pytest.mark.long
def test_the_page_shows_what_is_printed(run: Output) -> None:
    out, shown = as_documented(run, "plan")
    printed = out[out.index("\nstep") + 1 :]
    number = r"\d[\d,]*(?:\.\d+)?"
    assert re.sub(number, "#", printed.strip()) == re.sub(number, "#", shown.strip())
    for one, other in zip(re.findall(number, printed), re.findall(number, shown), strict=True):
        assert float(one.replace(",", "")) == pytest.approx(float(other.replace(",", "")), rel=0.1, abs=0.2)
