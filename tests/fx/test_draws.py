"""Branches by random draws whose outcome is the same for all of them, as of layers that are left out at a rate of 0."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import TraceError
from tests.runtime.models import assert_same, gradients, square_loss

KNOWN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "below 0": (lambda draw: draw < 0.0, False),
    "below 2": (lambda draw: draw < 2, True),
    "at most 1": (lambda draw: draw <= 1, True),
    "at most -1": (lambda draw: draw <= -1.0, False),
    "above 1": (lambda draw: draw > 1.0, False),
    "above -1": (lambda draw: torch.gt(draw, -1), True),
    "at least 0": (lambda draw: 0.0 <= draw, True),
    "at least 2": (lambda draw: draw >= 2, False),
}
UNKNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "below a half": lambda draw: draw < 0.5,
    "below 1, which rounding may make it": lambda draw: draw < 1.0,
    "above 0": lambda draw: draw > 0.0,
    "not itself": lambda draw: draw - 1 < 0.0,
    "written": lambda draw: draw.sub_(1) < 0.0,
    "written through a view": lambda draw: (draw.view(1).sub_(1), draw < 0.0)[1],
    "equal": lambda draw: draw == 2.0,
    "another draw": lambda draw: draw < torch.rand([]),
    "of another kind": lambda draw: torch.randn([]) < 0.0,
}


class Branches(nn.Module):
    """Goes on in one of two ways."""

    def __init__(self, ask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.ask = ask

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        ask = self.ask
        return self.first(value) if ask(torch.rand([])) else self.second(value)


class LayerDrop(nn.Module):
    """Leaves out layers by chance in training."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.rate = rate

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.rate:
                continue
            value = torch.tanh(layer(value))
        return value


def compiled(model: nn.Module) -> roundpipe.RoundPipe:
    return roundpipe.compile(model, example_args=(torch.ones(4, 4),), devices=["cpu"], fallback=False)


@pytest.mark.parametrize("kind", KNOWN)
def test_what_holds_for_all_draws_or_none_is_known(kind: str) -> None:
    ask, expected = KNOWN[kind]
    model = Branches(ask)
    value = torch.randn(4, 4)
    way = model.first if expected else model.second
    assert bool(ask(torch.rand([]))) is expected
    with compiled(model) as pipe:
        torch.testing.assert_close(pipe(value), way(value))


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_depends_on_the_draw_is_refused(kind: str) -> None:
    with pytest.raises(TraceError, match="data of an activation"):
        compiled(Branches(UNKNOWN[kind]))


def test_draws_of_several_elements_have_no_truth_as_in_eager() -> None:
    with pytest.raises((TraceError, RuntimeError)):
        compiled(Branches(lambda draw: torch.rand(2) < 0.0))


def test_layers_that_are_left_out_at_a_rate_of_0_train_as_in_eager_until_the_rate_changes() -> None:
    torch.manual_seed(0)
    model, batch = LayerDrop().double(), torch.randn(4, 4).double()
    reference = copy.deepcopy(model)
    with roundpipe.compile(model, example_args=(batch[:2],), devices=["cpu"] * 2, fallback=False) as pipe:
        config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
        pipe.forward_backward((batch,), loss_fn=square_loss, run_config=config)
        pipe.synchronize()
        for part in batch.chunk(2):
            square_loss(reference(part), None).backward()
        assert_same(gradients(model), gradients(reference), atol=1e-12)
        model.rate = 0.5
        with pytest.raises(TraceError, match="data of an activation"):
            pipe.forward_backward((batch,), loss_fn=square_loss, run_config=config)
