"""Layers that are packed side by side."""

import threading

import pytest
import torch

from roundpipe.runtime.weights import host_weights
from roundpipe.runtime.weights.host_weights import HostWeights
from tests.runtime.models import mlp


def test_large_layers_are_packed_in_threads(monkeypatch):
    monkeypatch.setattr(host_weights, "PACKED_IN_THREAD_BYTES", 0)
    model = mlp(7)
    model[5][0].weight = model[2][0].weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    threads = set()

    def allocate(num_bytes):
        threads.add(threading.current_thread())
        return torch.empty(num_bytes, dtype=torch.uint8)

    host = HostWeights("alloc", allocate)
    host.prepare([f"layer{index}" for index in range(len(model))], list(model))
    assert threads and threading.main_thread() not in threads
    assert not any(thread.is_alive() for thread in threads)
    assert all(host.layer("", layer).is_packed() and host.is_prepared(layer) for layer in model)
    assert model[5][0].weight is model[2][0].weight
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("least_bytes", [0, 1024**2], ids=["threads", "caller"])
def test_packing_that_fails_is_made_up_for_later(monkeypatch, least_bytes):
    monkeypatch.setattr(host_weights, "PACKED_IN_THREAD_BYTES", least_bytes)
    model = mlp(7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names, fails = [f"layer{index}" for index in range(len(model))], [True]
    lock = threading.Lock()
    left = iter(range(3))

    def allocate(num_bytes):
        with lock:
            if fails and next(left, None) is None:
                raise MemoryError("no more")
        return torch.empty(num_bytes, dtype=torch.uint8)

    host = HostWeights("alloc", allocate)
    with pytest.raises(MemoryError, match="no more"):
        host.prepare(names, list(model))
    assert 0 < sum(map(host.is_prepared, model)) <= 3
    fails.clear()
    host.prepare(names, list(model))
    assert all(host.layer("", layer).is_packed() for layer in model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
