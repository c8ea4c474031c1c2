"""What a figure was measured on, and where its JSON goes; the same for every benchmark.

What is measured is the library of the script's own checkout, unless PYTHONPATH names another, whatever is installed: a
script imports this module before the library.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

_BEFORE = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
sys.path.insert(1 + len(_BEFORE), str(Path(__file__).resolve().parent.parent))  # behind the script's folder and these


def processor() -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Hardware, versions and command of this run."""
    found: dict[str, Any] = {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads_per_operator": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator(check_available=True)
        found["accelerator"] = f"{torch.accelerator.device_count()} x {device}"
        if torch.cuda.is_available():
            found["accelerator"] += f" ({torch.cuda.get_device_name()})"
    return found


def write(path: Path, environment: dict[str, Any], results: dict[str, Any]) -> None:
    """The JSON of results and what they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment, "results": results}, indent=2) + "\n")


def report(path: Path | None, results: dict[str, Any]) -> None:
    """Prints the environment and, if a path is given, writes it with the results as JSON."""
    document = {"environment": environment(), "results": results}
    for name, value in document["environment"].items():
        print(f"{name:21} {value}")
    if path is not None:
        write(path, document["environment"], results)
        print(f"{'written to':21} {path}")
