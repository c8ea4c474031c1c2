"""What forwards do beside returning a value, and that layers wrapped by hand which do it are not silent."""

import warnings
from functools import cached_property

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe.core.errors import ConfigError
from roundpipe.effects.snapshot import ContentsSnapshot
from roundpipe.effects.versions import WeightSnapshot
from roundpipe.wrappers.module_layers import StateWatch


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Counts(Layer):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


class Averages(Layer):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x):
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return self.linear(x) + self.mean


class Collects(Layer):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        return self.linear(x) * len(self.seen)


class Draws(Layer):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        return self.linear(x) * torch.rand((), generator=self.generator)


class Notes(Layer):
    """What it notes is the same after every call."""

    shape = None

    @cached_property
    def table(self):
        return torch.ones(4)

    def forward(self, x):
        self.shape = tuple(x.shape[1:])
        self.kind = "matrix"
        return self.linear(x) * self.table


KEEPING = {
    Counts: "changes attribute 'calls' from call to call",
    Averages: "stores tensors in attribute 'mean'",
    Collects: "changes the list in attribute 'seen'",
    Draws: "draws from the generator in attribute 'generator'",
}
OLD_NORM = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")


def train(layer, num_calls):
    plan = roundpipe.ExecutePlan([(0, 1), (1, 2)], (2, 3), [(1, 2), (0, 1)])
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, model_run_config=config) as piped:
        for _ in range(num_calls):
            piped.forward_backward((torch.randn(6, 4),), loss_fn=lambda output, _: output.square().sum())


@pytest.mark.parametrize("kind", KEEPING, ids=lambda kind: kind.__name__)
def test_a_layer_wrapped_by_hand_that_keeps_state_is_named(kind):
    with pytest.warns(UserWarning, match=f"the forward of layer 1 {KEEPING[kind]}.*Use roundpipe.compile") as caught:
        train(kind(), 4)
    assert sum("the forward of layer" in str(one.message) for one in caught) == 1


class Asks(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


def test_a_layer_that_asks_whether_gradients_are_recorded_is_told_the_callers_mode():
    """Its forward stage runs without autograd, but for this layer; `tests.wrappers.test_known_differences` compares."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Asks(4, 4), 2)


@OLD_NORM
@pytest.mark.parametrize(
    "make",
    [
        Notes,
        lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
        lambda: nn.BatchNorm1d(4),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    ],
    ids=["Notes", "weight_norm", "BatchNorm1d", "TransformerEncoderLayer"],
)
def test_other_layers_cause_no_warning(make):
    layer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(layer, 4)


@pytest.mark.parametrize("kind", [*KEEPING, Notes], ids=lambda kind: kind.__name__)
def test_only_the_first_calls_are_looked_at(kind):
    watch = StateWatch()
    assert [watch.is_due() for _ in range(StateWatch.CALLS + 2)] == [True] * StateWatch.CALLS + [False] * 2
    layer, watch, findings = kind(), StateWatch(), []
    for _ in range(StateWatch.CALLS):
        if watch.is_due():
            before = ContentsSnapshot(layer.modules())
            layer(torch.ones(2, 4))
            findings.append(watch.kept_state(before))
    assert [words for words in findings if words] == ([KEEPING[kind]] if kind in KEEPING else [])
    if kind in KEEPING:
        assert len(findings) == (2 if kind is Counts else 1), "nothing more is looked for"


def test_collections_are_put_back():
    layer = Collects()
    layer.table = {"a": 1}
    before = ContentsSnapshot(layer.modules())
    assert before.changed_container() is None
    layer(torch.ones(2, 4))
    layer.table.clear()
    assert before.changed_container() == ("seen", [2])
    assert before.changed_container(restore=True)[0] == "seen"
    assert layer.seen == [] and layer.table == {"a": 1}


def test_written_and_replaced_parameters_are_named():
    layer = nn.Sequential(Layer(), Layer())
    before = WeightSnapshot(layer)
    assert before.diff() is None
    with torch.no_grad():
        layer[1].linear.bias.mul_(2)
    assert before.diff() == "1.linear.bias"
    before = WeightSnapshot(layer)
    layer[0].linear.weight = nn.Parameter(torch.ones(4, 4))
    assert before.diff() == "0.linear.weight"


def test_writes_by_way_of_data_are_seen_and_conversions_are_none():
    layer = nn.Sequential(Layer(), Layer())
    layer[1].linear.bias = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)  # has no norm
    before = WeightSnapshot(layer)
    layer[0].linear.weight.data = layer[0].linear.weight.data * 2
    assert before.diff() == "0.linear.weight"
    before, quick = WeightSnapshot(layer, with_norms=True), WeightSnapshot(layer)
    layer[0].linear.bias.data.add_(1)
    assert before.diff() == "0.linear.bias" and quick.diff() is None
    before = WeightSnapshot(layer, with_norms=True)
    layer[0].double()
    assert before.diff() is None


def test_a_layer_wrapped_by_hand_that_writes_its_weights_is_an_error():
    class Clamps(Layer):
        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
            return self.linear(x)

    with pytest.raises(ConfigError, match="layer 1 writes its parameter linear.weight"):
        train(Clamps(), 1)
