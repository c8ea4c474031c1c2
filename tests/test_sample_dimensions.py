"""Where a batch's samples are not in dimension 0: cut rightly, or said."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn import functional

import roundpipe
from roundpipe import RoundPipeRunConfig

DTYPE = torch.float64
DEVICES = ["cpu", "cpu"]


class OddOutputs(nn.Module):
    def __init__(self, *names):
        super().__init__()
        self.names = names
        self.first, self.second = nn.Linear(8, 5), nn.Linear(5, 5)
        self.lstm = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x):
        z = self.second(self.first(x))
        made, _ = self.lstm(z[:, None])
        outputs = {
            "usage": z.softmax(-1).sum(0),
            "scores": z @ z.T,
            "views": torch.stack([z, z]),
            "weight": self.second.weight,
            "rows": z,
            "flat": z.reshape(-1),
            "made": made,
            "twice": torch.cat([z, z], 1),
        }
        return {name: outputs[name] for name in self.names}


@pytest.mark.parametrize(
    "name, why",
    [
        ("usage", "has no dimension for the samples"),
        ("weight", "has no dimension for the samples"),
        ("scores", "has the samples in dimensions 0 and 1"),
    ],
)
@pytest.mark.parametrize("way", ["forward", "training"])
def test_outputs_that_pieces_do_not_make_up_are_named(name, why, way):
    with roundpipe.compile(OddOutputs("rows", name).to(DTYPE), devices=DEVICES) as piped:
        x = torch.randn(12, 8, dtype=DTYPE)

        def call(options=None):
            if way == "forward":
                return piped(x, roundpipe_run_config=options)
            loss_fn = lambda out, _: out["rows"].sum()  # noqa: E731
            return piped.forward_backward((x,), loss_fn=loss_fn, return_outputs=True, run_config=options)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(RoundPipeRunConfig(1))
        with pytest.warns(UserWarning, match=rf"output\['{name}'\] {why}.*merge_output") as told:
            call(RoundPipeRunConfig(3))
        assert "rows" not in str(told[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(RoundPipeRunConfig(3))  # once
            call(RoundPipeRunConfig(3, merge_output=lambda outputs: outputs[0]))


def test_a_list_with_one_output_for_each_sample_is_warned_of():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return [scores[scores.argsort()] for scores in self.head(x)]

    with roundpipe.compile(Detector(), devices=["cpu", "cpu"]) as piped:
        with pytest.warns(UserWarning, match=r"output\[0\] is of one sample alone.*num_microbatch=1"):
            piped(torch.randn(6, 4), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3))
        assert len(piped(torch.randn(6, 4), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))) == 6


def test_outputs_with_rows_are_not_warned_of():
    model = OddOutputs("rows", "flat", "made", "twice", "views").to(DTYPE)
    with roundpipe.compile(model, devices=DEVICES) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (12, 5, 5, 8):  # as long as there are features, too
            x = torch.randn(length, 8, dtype=DTYPE)
            outputs = piped(x)
            for name, expected in model(x).items():
                torch.testing.assert_close(outputs[name], expected)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6, num_layers=2, batch_first=True), nn.Linear(6, 4)

    def forward(self, x, state=None):
        y, state = self.lstm(x, state)
        return self.head(y), state


@pytest.mark.parametrize("splits", [False, True])
def test_a_state_is_that_of_the_batch_and_can_be_given_again(splits):
    """Its samples are in dimension 1; split along it, or not, when a batch runs in one piece."""
    torch.manual_seed(0)
    model = Recurrent().to(DTYPE)
    eager = copy.deepcopy(model)
    at_one = (TensorChunkSpec(1), TensorChunkSpec(1))
    options = None
    if splits:
        first = TensorChunkSpec(0)
        options = RoundPipeRunConfig(3, split_input=((first, at_one), None), merge_output=(first, at_one))
    with roundpipe.compile(model, devices=DEVICES) as piped, warnings.catch_warnings():
        warnings.simplefilter("error" if splits else "ignore")
        state = expected_state = None
        for step in range(3):
            x = torch.randn(9, 5, 8, dtype=DTYPE)
            given = (x,) if step == 0 else (x, state)
            out, state = piped(*given, roundpipe_run_config=options if step else None)
            expected, expected_state = eager(x, expected_state)
            state, expected_state = [[each.detach() for each in pair] for pair in (state, expected_state)]
            state, expected_state = tuple(state), tuple(expected_state)
            out.square().mean().backward()
            expected.square().mean().backward()
            torch.testing.assert_close(out, expected)
            torch.testing.assert_close(state, expected_state)
        for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


class Counts(nn.Module):
    def __init__(self, *, has_place=True):
        super().__init__()
        self.linear, self.has_place = nn.Linear(8, 4), has_place

    def forward(self, x, y):
        z = self.linear(x)
        right = z.argmax(-1) == y
        counts = {
            "correct": right.sum(),
            "above": (z > 0).sum(),
            "zeros": y.count_nonzero(),
            "numbers": [len(x), y.numel() * z.shape[1]],
            "shape": z.shape,
        }
        return {"logits": z, "place": z.argmax(), **counts} if self.has_place else {"logits": z, **counts}


@pytest.mark.parametrize("number", [10, 9])
def test_counts_and_sizes_of_a_batch_add_up(number):
    torch.manual_seed(0)
    x, y = torch.randn(number, 8), torch.randint(4, (number,))
    model = Counts(has_place=False)
    expected = model(x, y)
    with roundpipe.compile(model, devices=DEVICES) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn = lambda out, _: out["logits"].sum()  # noqa: E731
        _, training = piped.forward_backward((x, y), loss_fn=loss_fn, return_outputs=True, loss_reduction="sum")
        for found in (piped(x, y), training):
            for name in ("correct", "above", "zeros"):
                assert found[name].dtype == torch.int64 and found[name] == expected[name]
            assert found["numbers"] == [number, 4 * number] and tuple(found["shape"]) == (number, 4)


def test_averaged_numbers_are_warned_of():
    torch.manual_seed(0)
    x, y = torch.randn(10, 8), torch.randint(4, (10,))
    with roundpipe.compile(Counts(), devices=DEVICES) as piped:
        with pytest.warns(UserWarning, match=r"output\['place'\] of Counts is a whole number or a truth value"):
            piped(x, y)
    with roundpipe.compile(Counts(), devices=DEVICES) as piped:
        loss_fn = lambda out, _: out["logits"].sum()  # noqa: E731
        with pytest.warns(UserWarning, match=r"output\['place'\] of Counts is a whole number or a truth value"):
            piped.forward_backward((x, y), loss_fn=loss_fn, return_outputs=True)


class Tagger(nn.Module):
    """``transposes``: samples come first, and time inside."""

    def __init__(self, kind, *, transposes):
        super().__init__()
        self.embedding, self.head, self.transposes = nn.Embedding(11, 8), nn.Linear(8, 11), transposes
        if kind is nn.TransformerEncoder:
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        else:
            self.body = kind(8, 8)

    def forward(self, ids):
        x = self.embedding(ids)
        x = self.body(x.transpose(0, 1) if self.transposes else x)
        x = x[0] if isinstance(x, tuple) else x
        return self.head(x.transpose(0, 1) if self.transposes else x)


def token_loss(outputs, label):
    return functional.cross_entropy(outputs.flatten(0, 1), label.flatten())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.TransformerEncoder])
@pytest.mark.parametrize("transposes", [False, True])
@pytest.mark.parametrize("number", [None, 3])
def test_a_batch_whose_first_dimension_is_time_stays_in_one_piece(kind, transposes, number):
    torch.manual_seed(0)
    model = Tagger(kind, transposes=transposes).to(DTYPE)
    reference = copy.deepcopy(model)
    ids = torch.randint(11, (12, 4))
    expected = token_loss(reference(ids), ids)
    expected.backward()
    options = None if number is None else RoundPipeRunConfig(num_microbatch=number)
    with roundpipe.compile(model, devices=DEVICES) as piped, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss = piped.forward_backward(
                (ids,), label=ids, loss_fn=token_loss, loss_reduction="mean", run_config=options
            )
            piped.synchronize()
        torch.testing.assert_close(loss, expected)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad, 2 * other.grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(piped(ids), reference(ids))
        assert piped.trace_count == 1
    told = [each for each in caught if "batch_first=False, takes dimension 0 of the batch as time" in str(each.message)]
    assert len(told) == (not transposes)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_state_that_is_given_beside_it_does_not_hide_the_time(kind):
    """It has as many layers as a microbatch would have steps."""
    torch.manual_seed(0)

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.recurrent, self.head = nn.Embedding(9, 6), kind(6, 6, 2), nn.Linear(6, 9)

        def forward(self, tokens, state):
            made, state = self.recurrent(self.table(tokens), state)
            return self.head(made), state

    model, tokens = Language(), torch.randint(9, (6, 4))
    state = torch.zeros(2, 4, 6)
    state = (state, state) if kind is nn.LSTM else state
    expected, _ = model(tokens, state)
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped:
        with pytest.warns(UserWarning, match="takes dimension 0 of the batch as time|mixes the samples of a batch"):
            found, _ = piped(tokens, state)
    torch.testing.assert_close(found, expected)


def test_explain_says_where_the_samples_are():
    found = roundpipe.explain(Tagger(nn.GRU, transposes=False), (torch.randint(11, (12, 4)),))
    assert "body, a GRU with batch_first=False, takes dimension 0 as time: a batch runs as one microbatch" in str(found)
    found = roundpipe.explain(OddOutputs("rows", "scores"), (torch.randn(12, 8),))
    assert "output['scores'] has the samples in dimensions 0 and 1" in str(found)
    assert found.as_json()["odd_outputs"] == {"output['scores']": "has the samples in dimensions 0 and 1"}
    found = roundpipe.explain(OddOutputs("rows", "flat"), (torch.randn(12, 8),))
    assert "Where the samples" not in str(found)


def test_samples_in_dimension_1_are_cut_where_the_call_says_so():
    pipelining = pytest.importorskip("torch.distributed.pipelining.microbatch")
    spec = pipelining.TensorChunkSpec(1)
    model = Tagger(nn.LSTM, transposes=False).to(DTYPE)
    ids = torch.randint(11, (7, 6))
    options = RoundPipeRunConfig(num_microbatch=3, split_input=((spec,), None), merge_output=spec)
    with roundpipe.compile(model, devices=DEVICES) as piped, warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(piped(ids, roundpipe_run_config=options), model(ids))


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x, prototypes):
        return self.body(x) @ prototypes.T


@pytest.mark.filterwarnings("ignore:.*every microbatch gets the whole tensor")
@pytest.mark.parametrize("make", [roundpipe.compile, roundpipe.AutoRoundPipe])
def test_what_samples_share_is_not_cut_when_a_batch_is_as_long(make):
    model, prototypes = Prototypes().to(DTYPE), torch.randn(9, 8, dtype=DTYPE)
    with make(model, devices=DEVICES) as piped:
        for length in (16, 9, 9, 12, 9):
            x = torch.randn(length, 8, dtype=DTYPE)
            options = RoundPipeRunConfig(num_microbatch=3)
            torch.testing.assert_close(piped(x, prototypes, roundpipe_run_config=options), model(x, prototypes))


class LanguageOfStates(nn.Module):
    """Time is in dimension 0, and the state of the step before is an argument."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8, 2), nn.Linear(8, 20)

    def forward(self, ids, state):
        out, state = self.rnn(self.embedding(ids), state)
        return self.head(out), state


def test_a_recurrent_state_as_argument_leaves_time_in_dimension_0():
    model, ids = LanguageOfStates(), torch.randint(20, (7, 4))
    state = torch.zeros(2, 4, 8), torch.zeros(2, 4, 8)
    with roundpipe.compile(model, devices=["cpu"] * 2) as pipe:
        with pytest.warns(
            UserWarning, match="rnn, a LSTM with batch_first=False, takes dimension 0 of the batch as time"
        ):
            out, _ = pipe(ids, state)
        torch.testing.assert_close(out, model(ids, state)[0])
