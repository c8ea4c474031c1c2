"""Models with sparse buffers, such as the adjacency of a graph, which no graph of nodes can hold: they run in parts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.core.errors import TraceError
from roundpipe.fx.trace.tracer import trace
from tests.runtime.models import assert_same, gradients

LAYOUTS = ["coo", "csr"]


class Convolution(nn.Module):
    """Of the nodes of one graph."""

    def __init__(self, adjacency):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("adjacency", adjacency)

    def forward(self, x):
        x = torch.relu(self.first(torch.sparse.mm(self.adjacency, x)))
        return self.second(torch.sparse.mm(self.adjacency, x))


def model(layout):
    torch.manual_seed(0)
    dense = torch.rand(9, 9) * (torch.rand(9, 9) > 0.5)
    return Convolution(dense.to_sparse() if layout == "coo" else dense.to_sparse_csr())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tracer_names_a_sparse_buffer(layout):
    with pytest.raises(TraceError, match=rf"adjacency is a sparse one \(torch.sparse_{layout}\)"):
        trace(model(layout), (torch.randn(9, 6),), {})


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta", "ignore:.*module by module", "ignore:.*nothing"
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_with_a_sparse_buffer_trains_in_one_piece(layout):
    net = model(layout)
    reference, label = model(layout), torch.randint(4, (9,))
    x = torch.randn(9, 6)
    F.cross_entropy(reference(x), label).backward()
    with roundpipe.compile(net, devices=["cpu"] * 2) as piped:
        piped.forward_backward(
            (x,),
            label=label,
            loss_fn=F.cross_entropy,
            loss_reduction="mean",
            run_config=RoundPipeRunConfig(num_microbatch=1),
        )
        piped.synchronize()
    assert_same(gradients(net), gradients(reference), 1e-6)
