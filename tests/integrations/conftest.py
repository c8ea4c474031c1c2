"""Keeps what training arguments leave in the environment to the test that made them."""

import os

import pytest


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """transformers 4.57 hands ``bf16`` and ``torch_compile`` on to every later trainer of the process."""
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update(before)
