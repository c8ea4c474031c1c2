"""The rules for operators, beside what happens to results when one row of the inputs changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.fx.fakes import static_mode
from roundpipe.fx.passes import row_rules
from roundpipe.fx.passes.regions import RowSpace
from roundpipe.fx.passes.rows import RowWatch

SPACE = RowSpace((3, 5))
WEIGHT = torch.randn(4, 4, dtype=torch.float64)
NORM = nn.LayerNorm(4).double()


def watched(function, *inputs):
    """What is known about the results of a function, whose inputs have rows if their leading sizes say so."""
    mode = static_mode()
    fakes = [mode.from_tensor(tensor) for tensor in inputs]
    rows = [(fake, SPACE.rows_of(fake)) for fake in fakes if SPACE.rows_of(fake)]
    free = [fake for fake in fakes if not SPACE.rows_of(fake)]
    watch = RowWatch(SPACE.sizes, rows, free)
    with mode, watch:
        result = function(*fakes)
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    found = [watch.found(tensor) for tensor in results]
    return None if watch.why_not or None in found else found


def row_of(tensor, rows, batch, position):
    for dim in reversed(range(tensor.dim())):
        axes = rows[dim]
        if axes is not None:
            index = batch * 5 + position if axes == (0, 2) else (batch, position)[axes[0]]
            tensor = tensor.select(dim, index)
    return tensor


def is_rowwise(function, found, *inputs):
    """Whether a change in one row of the inputs changes that row of the results only."""
    for batch, position in [(0, 0), (1, 2), (2, 4)]:
        results = []
        for change in (0, 1):
            torch.manual_seed(0)
            changed = [tensor.clone() for tensor in inputs]
            for tensor in changed:
                rows = SPACE.rows_of(tensor)
                if rows:
                    row_of(tensor, rows, batch, position).add_(change)
            with torch.no_grad():
                result = function(*changed)
            results.append([result] if isinstance(result, torch.Tensor) else list(result))
        for before, after, rows in zip(*results, found, strict=True):
            before, after = before.clone(), after.clone()
            for tensor in (before, after):
                row_of(tensor, rows, batch, position).zero_()
            if not torch.allclose(before.double(), after.double(), equal_nan=True):
                return False
    return True


x = torch.randn(3, 5, 4, dtype=torch.float64)
ids = torch.randint(0, 3, (3, 5))
ROWWISE = {
    "linear": lambda x: F.linear(x, WEIGHT.to(x.device), None),
    "matmul": lambda x: x @ torch.ones(4, 6, dtype=x.dtype),
    "einsum": lambda x: torch.einsum("bsd,dv->bsv", x, torch.ones(4, 6, dtype=x.dtype)),
    "gelu and scale": lambda x: F.gelu(x, approximate="tanh") * 2 + 1,
    "gate": lambda x: (lambda a, b: F.silu(a) * b)(*x.chunk(2, -1)),
    "softcap": lambda x: 30 * torch.tanh(x / 30),
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "rms norm": lambda x: F.rms_norm(x, (4,)),
    "hand-written norm": lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6),
    "softmax over features": lambda x: x.softmax(-1),
    "log-softmax": lambda x: x.log_softmax(-1),
    "flattened": lambda x: x.view(-1, 4).exp(),
    "heads": lambda x: x.view(3, 5, 2, 2).transpose(1, 2).contiguous(),
    "heads as batch entries": lambda x: x.view(3, 5, 2, 2).permute(2, 0, 1, 3),
    "group of heads": lambda x: x.view(3, 5, 2, 1, 2).expand(3, 5, 2, 3, 2).reshape(3, 5, 6, 2),
    "rotation": lambda x: torch.cat((-x[..., 2:], x[..., :2]), dim=-1),
    "padding of features": lambda x: F.pad(x, (0, 2)),
    "top k": lambda x: x.topk(2, -1),
    "sort of features": lambda x: x.sort(-1),
    "cumsum of features": lambda x: x.cumsum(-1),
    "flip of features": lambda x: x.flip(-1),
    "one feature": lambda x: x[..., 1],
    "argmax": lambda x: x.argmax(-1),
    "log-sum-exp": lambda x: x.logsumexp(-1).square(),
    "variance": lambda x: x.var(-1),
    "masked": lambda x: x.masked_fill(x > 0, 0.0).where(x < 1, 1.0),
    "stacked": lambda x: torch.stack([x, -x], 2),
    "in place into its own": lambda x: x.clone().mul_(2).add_(x),
    "into its own zeros": lambda x: torch.zeros_like(x).copy_(x),
    "all of the rows": lambda x: x[:, 0:5][:, :, 1:],
}
MIXING = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention scores": lambda x: x @ x.transpose(1, 2),
    "batch norm": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "cumsum over tokens": lambda x: x.cumsum(1),
    "softmax over tokens": lambda x: x.softmax(1),
    "sort over tokens": lambda x: x.sort(1).values,
    "mean over tokens, used per token": lambda x: x - x.mean(1, keepdim=True),
    "mean over all, used per token": lambda x: x - x.mean(),
    "maximum over the batch": lambda x: x / x.amax(0, keepdim=True),
    "flip over tokens": lambda x: x.flip(1),
    "roll over tokens": lambda x: x.roll(1, 1),
    "shift by a token": lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "difference of tokens": lambda x: x[:, 1:] - x[:, :-1],
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), torch.ones(4, 4, 3, dtype=x.dtype), padding=1).transpose(1, 2),
    "transposed batch and tokens": lambda x: x.transpose(0, 1).reshape(3, 5, 4),
    "tokens as features": lambda x: x.reshape(3, 20) * torch.ones(20, dtype=x.dtype),
    "write in place into the input": lambda x: x.mul_(2),
    "gather of tokens": lambda x: x.gather(1, x.argsort(1)),
    "indexing of tokens": lambda x: x[:, torch.tensor([4, 3, 2, 1, 0])],
    "tokens by position": lambda x: x * torch.arange(5, dtype=x.dtype)[None, :, None],
    "fft": lambda x: torch.fft.fft(x, dim=1).real,
    "unfolded": lambda x: x.unfold(1, 3, 1),
    "group norm": lambda x: F.group_norm(x, 1),
    "difference of neighbours": lambda x: x.diff(dim=1, prepend=x[:, :1]),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_what_is_rowwise(name):
    found = watched(ROWWISE[name], x)
    assert found and is_rowwise(ROWWISE[name], found, x)


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows(name):
    assert watched(MIXING[name], x) is None


def test_inputs_without_rows_are_narrowed_where_they_meet_rows():
    positions, scale = torch.randn(1, 5, 4), torch.randn(4, 4)
    mode = static_mode()
    fakes = [mode.from_tensor(tensor) for tensor in (x.float(), positions, scale)]
    watch = RowWatch(SPACE.sizes, [(fakes[0], SPACE.rows_of(x))], fakes[1:])
    with mode, watch:
        result = (fakes[0] + fakes[1]) @ fakes[2]
    assert watch.found(result) == ((0, 1), (1, 2), None)
    assert watch.taken_in_rows == {id(fakes[1]): (None, (1, 2), None)}


def test_ends_are_sums_and_means_over_all_rows_alone():
    assert watched(lambda x: x.square().sum(), x) == ["sum"]
    assert watched(lambda x: x.mean((0, 1)), x) == ["mean"]
    assert watched(lambda x: x.mean(1), x) is None
    assert watched(lambda x: x.amax(), x) is None
    assert watched(lambda x: x.sum() * 2, x) is None  # what follows is done once


@pytest.mark.parametrize("name", ["cumsum over tokens", "roll over tokens", "sort over tokens"])
def test_a_wrong_rule_would_be_seen(monkeypatch, name):
    def wrong(call):
        return call.rows()

    for operator in ("cumsum", "roll", "sort"):
        monkeypatch.setitem(row_rules.RULES, operator, wrong)
    found = watched(MIXING[name], x)
    assert found and not is_rowwise(MIXING[name], found, x)
