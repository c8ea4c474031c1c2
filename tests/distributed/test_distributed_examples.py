"""The examples for several processes, as torchrun starts them; each checks itself against one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TINY = ["--check", "--steps", "2", "--batch", "5", "--seq", "16", "--microbatches"]

pytest.importorskip("transformers", reason="the examples need the extra [hf]")


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "options"),
    [("data_parallel", ["2"]), ("data_parallel", ["2", "--shard"]), ("distributed_pipeline", ["5"])],
)
def test_an_example_agrees_with_one_process(tmp_path: Path, example: str, options: list[str]) -> None:
    text = tmp_path / "data.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(EXAMPLES / f"{example}.py"), *TINY, *options, "--data", str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "losses differ from one process by at most" in done.stdout
