"""Keeps what training arguments leave in the environment to the test that made them."""

import pytest


@pytest.fixture(autouse=True)
def _own_precision(monkeypatch):
    """transformers 4.57 hands ``bf16`` on to every later trainer of the process."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
