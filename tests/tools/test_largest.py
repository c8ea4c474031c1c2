"""The longest sequence and the largest batch that fit, beside plans for these sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundpipe.tools import command_line as cli
from roundpipe.tools.largest import STEPS_PER_OCTAVE, largest_size
from tests.tools.cases_command_line import TINY, Output, json_of

SMALL = ("--flops", "1T", "--memory", "1500K", "--link", "1GB/s", "--microbatches", 1, "--json")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Output:
    """Runs a command line in this process: exit code, what it printed, what it complained of."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": 1, "max_position_embeddings": 64}))
    return tmp_path


@pytest.mark.parametrize("most", [7, 999, 131_072, 10**9])
@pytest.mark.parametrize(("fixed", "bend"), [(0.0, 1.0), (0.7, 1.0), (0.3, 1.2), (0.3, 0.8)])
def test_a_few_sizes_tell_the_largest(most: int, fixed: float, bend: float) -> None:
    tried = []

    def share(size: int) -> float:
        tried.append(size)
        return fixed + (1 - fixed) * (size / most) ** bend

    found = largest_size(share, 8192, 1, 10**12)
    assert found <= most and most - found <= max(2 * most // STEPS_PER_OCTAVE, 1)
    assert len(tried) <= 16 and len(set(tried)) == len(tried)
    assert largest_size(lambda size: 2.0, 256, 16, 10**6) == 0
    assert largest_size(lambda size: 0.5, 256, 16, 1000) == 1000


@pytest.mark.long
def test_the_longest_sequence(run: Output, tiny: Path) -> None:
    found = json_of(run("plan", tiny, *SMALL, "--max-length"))
    size = found["max_length"]
    assert found["fits"] and found["tokens_per_sample"] == size > 64
    assert found["device_memory"]["needed_bytes"] <= found["device_memory"]["usable_bytes"]
    assert "of the device's" in found["limit"] and "activations" in found["limit"]
    assert any("max_position_embeddings" in note for note in found["notes"])
    code, _, error = run("plan", tiny, *SMALL, "--max-batch", "--batch", 4)
    assert code == 2 and "leave --batch out" in error


@pytest.mark.long
def test_a_longer_sequence_does_not_fit(run: Output, tiny: Path) -> None:
    size = json_of(run("plan", tiny, *SMALL, "--max-length"))["max_length"]
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10**6}))
    assert run("plan", tiny, *SMALL, "--seq", size + 2 * size // STEPS_PER_OCTAVE)[0] == 1


@pytest.mark.long
def test_the_largest_batch_and_the_host(run: Output, tiny: Path) -> None:
    """Values of several microbatches wait on the host, between layers that do not all have room on the device."""
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    command = ("plan", tiny, *SMALL, "--memory", "600K", "--microbatches", 4, "--seq", 32, "--max-batch")
    found = json_of(run(*command))
    assert found["fits"] and found["batch"] == found["max_batch"] > 1
    host = found["host_memory"]
    less = host["needed_bytes"] - host["carried"] // 2
    limited = json_of(run(*command, "--host-memory", less))
    assert 0 < limited["max_batch"] < found["max_batch"] and "the host has" in limited["limit"]
    code, _, error = run(*command, "--host-memory", "10K")
    assert code == 1 and "no batch fits" in error
