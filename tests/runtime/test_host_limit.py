"""Host memory is checked before it is taken, with an error that says what is short."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import HostMemoryError
from roundpipe.runtime.device import host_limit
from roundpipe.runtime.device.host_limit import HOST_LIMIT, RESERVE_BYTES, HostLimit, available_bytes
from roundpipe.runtime.weights import master_weights
from tests.runtime.models import assert_same, gradients

GIB = 1024**3


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(
        tmp_path, proc__meminfo=f"MemTotal: 999 kB\nMemFree: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\nHugePages: 0\n"
    )
    return tmp_path


def test_what_the_system_has(root: Path) -> None:
    assert available_bytes(root) == 8 * GIB
    assert available_bytes(root / "elsewhere") is None
    assert (available_bytes() or 0) > 0


@pytest.mark.parametrize("shown_as", ["/jobs/one", "/", "/not/mounted/here"])
def test_control_groups_of_version_two(root: Path, shown_as: str) -> None:
    """The least of what the group and those around it leave; page cache that can go counts as free."""
    write(root, proc__self__cgroup=f"0::{shown_as}\n")
    base = "sys__fs__cgroup__"
    limits = {"memory_dot_max": f"{4 * GIB}\n", "memory_dot_current": f"{3 * GIB}\n"}
    write(root, **{base + name: text for name, text in limits.items()})
    write(root, **{f"{base}memory_dot_stat": f"anon 5\ninactive_file {GIB}\n"})
    assert available_bytes(root) == 2 * GIB
    write(root, **{f"{base}jobs__one__memory_dot_max": "max\n", f"{base}jobs__one__memory_dot_current": "7\n"})
    assert available_bytes(root) == 2 * GIB
    write(root, **{f"{base}jobs__memory_dot_max": f"{GIB}\n", f"{base}jobs__memory_dot_current": "7\n"})
    assert available_bytes(root) == (GIB - 7 if shown_as == "/jobs/one" else 2 * GIB)


def test_control_groups_of_version_one(root: Path) -> None:
    write(root, proc__self__cgroup="5:devices:/a\n4:cpu,memory:/a/b\n")
    base = root / "sys/fs/cgroup/memory/a"
    base.mkdir(parents=True)
    (base / "memory.limit_in_bytes").write_text(str(3 * GIB))
    (base / "memory.usage_in_bytes").write_text(str(GIB))
    assert available_bytes(root) == 2 * GIB
    (base / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n")
    assert available_bytes(root) == 2 * GIB + GIB // 2


def test_the_error_says_what_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limit, "available_bytes", lambda: 2 * GIB + RESERVE_BYTES)
    limit = HostLimit()
    limit.check({"weights": GIB})
    with pytest.raises(
        HostMemoryError, match=r"short of 1\.00 GiB.*2\.50 GiB for weights, 512 MiB for copies.*2\.00 Gi"
    ):
        limit.check({"weights": 5 * GIB // 2, "copies": GIB // 2})
    limit.check({"weights": 5 * GIB // 2}, cached_bytes=lambda: GIB)
    assert issubclass(HostMemoryError, MemoryError)


def test_it_is_read_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[int] = []

    def available() -> int:
        readings.append(1)
        return 16 * GIB

    monkeypatch.setattr(host_limit, "available_bytes", available)
    limit = HostLimit()
    for _ in range(4096):
        limit.check({"values": 1024**2})
    assert 4 <= len(readings) <= 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).double()


def short_of(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The host has no memory left when it is asked for something."""

    def check(terms: dict[str, int], cached_bytes: object = None) -> None:
        if any(what in term for term in terms) and sum(terms.values()):
            raise HostMemoryError(f"host memory is short: {terms}")

    monkeypatch.setattr(HOST_LIMIT, "check", check)


@pytest.mark.parametrize("what", ["weights of", "values and gradients between", "gradients of weights"])
def test_a_call_that_does_not_fit_ends_in_it_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    ours = model()
    eager = copy.deepcopy(ours)
    x = torch.randn(8, 64, dtype=torch.float64)
    plan = roundpipe.ExecutePlan([(0, 2)], (2, 4), [(0, 2)])
    run = roundpipe.RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    with roundpipe.RoundPipe(ours, devices=["cpu"], model_run_config=run) as pipe:
        with monkeypatch.context() as patch:
            short_of(patch, what)
            with pytest.raises(HostMemoryError, match="short"):
                pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().sum())
        ours.zero_grad()
        pipe.forward_backward((x,), loss_fn=lambda outputs, _: outputs.square().sum())
        eager(x).square().sum().backward()
        assert_same(gradients(ours), gradients(eager))


def test_copies_that_do_not_fit_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limit, "available_bytes", lambda: RESERVE_BYTES + 1000)
    monkeypatch.setattr(master_weights, "HOST_LIMIT", HostLimit())
    with roundpipe.RoundPipe(model(), devices=["cpu"], optim_dtype=torch.float64) as pipe:
        with pytest.raises(HostMemoryError, match="optimizer's copies of weights"):
            list(pipe.optim_parameters())
        monkeypatch.undo()
        assert len(list(pipe.optim_parameters())) == 8
