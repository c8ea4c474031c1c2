"""What is answered about sizes that only data tell."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from roundpipe.fx.sizes import ShapeWorld


@pytest.mark.filterwarnings("ignore:_check_is_size")
def test_operators_may_compare_them_and_glue_may_not() -> None:
    """As operators of torch before 2.12 do; numbers that are read from data are no sizes."""
    world = ShapeWorld()
    one, other, number = (world.create_unbacked_symint() for _ in range(3))
    for size in (one, other):
        torch._check_is_size(size)
    assert bool(one == other) and not bool(one != other)
    assert bool(one == 14) and bool(one != 1) and not bool(one == 1) and bool(one != 0)
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(number == 14)
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(one > other)
    world.in_glue = lambda: True
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(one == other)


def test_a_trace_does_not_import_what_exports_models() -> None:
    """Torch does, a second long, to note lines of code that nobody reads."""
    code = """
import sys
import torch
import roundpipe
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
with roundpipe.compile(model, example_args=(torch.zeros(4, 3),), devices="cpu") as piped:
    piped(torch.zeros(6, 3))
print("torch.export._trace" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
