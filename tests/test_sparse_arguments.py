"""Sparse and nested tensors among the arguments of a call, of which torch has no views of parts."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe
from roundpipe import MicrobatchError, RoundPipeRunConfig

NODES = 6
torch.manual_seed(0)
X, Y = torch.randn(NODES, 4), torch.randint(3, (NODES,))
EDGES = (torch.rand(NODES, NODES) > 0.5).float()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that such tensors are in beta state
    SPARSE = {"coo": EDGES.to_sparse(), "csr": EDGES.to_sparse_csr()}
    NESTED = torch.nested.nested_tensor([torch.randn(length, 4) for length in (2, 3, 1, 5)], layout=torch.jagged)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, edges):
        return self.second(torch.sparse.mm(edges, self.first(x).relu()))


@pytest.mark.parametrize("edges", SPARSE.values(), ids=SPARSE)
def test_by_default_the_batch_is_not_cut(edges):
    model = Graph()
    reference = copy.deepcopy(model)
    expected = F.cross_entropy(reference(X, edges), Y)
    expected.backward()
    with roundpipe.compile(model, devices=["cpu"] * 2) as piped:
        with pytest.warns(UserWarning, match=r"args\[1\] is sparse or nested, and can't be cut"):
            loss = piped.forward_backward((X, edges), label=Y, loss_fn=F.cross_entropy, loss_reduction="mean")
        piped.synchronize()
        torch.testing.assert_close(loss, expected.detach())
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
        torch.testing.assert_close(piped(X, edges), reference(X, edges))


@pytest.mark.parametrize("edges", [*SPARSE.values(), NESTED], ids=[*SPARSE, "nested"])
def test_a_number_that_is_given_can_not_be_met(edges):
    config = RoundPipeRunConfig(num_microbatch=2)
    with roundpipe.compile(Graph(), devices=["cpu"]) as piped:
        with pytest.raises(MicrobatchError, match=r"args\[1\] is sparse or nested.*num_microbatch=1"):
            piped.forward_backward((X[: len(edges)], edges), loss_fn=lambda out, _: out.sum(), run_config=config)


def test_a_sparse_label_is_found_too():
    label = F.one_hot(Y, 3).float().to_sparse()
    with roundpipe.compile(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), devices=["cpu"]) as piped:
        with pytest.warns(UserWarning, match="label is sparse"):
            loss = piped.forward_backward((X,), label=label, loss_fn=lambda out, label: (out - label).square().mean())
        torch.testing.assert_close(loss, (piped.model(X) - label.to_dense()).square().mean().detach())


def test_one_that_is_not_as_long_as_the_batch_goes_to_every_microbatch():
    table = torch.rand(3, 4).to_sparse()

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, table):
            return self.linear(x) @ table.to_dense().T

    model = Looks()
    config = RoundPipeRunConfig(num_microbatch=3)
    with roundpipe.compile(model, devices=["cpu"], model_run_config=config) as piped:
        torch.testing.assert_close(piped(X, table), model(X, table))
