"""``len(tensor)`` in a model's own code: a symbol, where the code can do with one."""

from __future__ import annotations

import queue
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.fx.graph.nodes import hint
from roundpipe.fx.trace.tracer import trace
from tests.fx.against_eager import check, vectors
from tests.fx.test_shapes import Layers

SIZES = [(4, 6), (6, 6), (9, 6)]


class Contrastive(Layers):
    """Scores of all pairs in a batch, each of which should be its own best; what CLIP does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.layers[0](x).mean(1), self.layers[1](x).mean(1)
        scores = self.layers[2](one) @ other.T
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def test_a_contrastive_loss_is_one_trace_for_every_batch_size() -> None:
    seen = check(Contrastive, sizes=SIZES)
    assert not seen.fell_back and seen.num_layers >= 3 and seen.trace_count == 1


def test_a_decision_on_a_length_is_guarded() -> None:
    class Decides(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.layers[0](x))
            return self.layers[2](x) * (1 if len(x) == 3 else len(x))

    seen = check(Decides, sizes=[(4, 6), (5, 6), (3, 6), (6, 6)], num_microbatches=1)
    assert not seen.fell_back and seen.trace_count == 2


@pytest.mark.parametrize("use", ["{n: 1}[n]", "float(f'{n:d}')", "len(list(range(n)))"])
def test_what_only_a_number_can_do_traces_a_size_at_a_time(use: str) -> None:
    class Uses(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.layers[0](x))
            return self.layers[2](x) * eval(use, {"n": len(x)})

    seen = check(Uses, sizes=[(4, 6), (5, 6), (4, 6)], num_microbatches=1)
    assert not seen.fell_back and not seen.opaque and seen.trace_count == 2


def test_len_is_the_builtin_outside_of_the_trace() -> None:
    file = sys.modules[__name__]
    found: queue.SimpleQueue[object] = queue.SimpleQueue()

    class Asks(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            elsewhere = threading.Thread(target=lambda: found.put(type(len(torch.zeros(5)))))
            elsewhere.start()
            elsewhere.join()
            found.put(len("four"))
            return self.layers[0](x)

    trace(Asks().double(), (), vectors(4, 6))
    assert [found.get(), found.get()] == [int, 4] and "len" not in vars(file)


def test_a_decision_against_a_batch_of_one_is_found_before_layers_run() -> None:
    """A batch of one is traced as two; the model's own first line tells that this can't serve it."""
    batches: queue.SimpleQueue[int] = queue.SimpleQueue()

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batches.put(hint(x.shape[0]))
            return super().forward(x)

    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Looks(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.shape[0] == 1 else -self.layer(x)

    graph = trace(Decides(), (torch.ones(1, 3),), {}).graph
    assert "neg" not in {node.name for node in graph.nodes}
    assert {batches.get() for _ in range(batches.qsize())} == {1}
