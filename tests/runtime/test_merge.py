"""Merging outputs, and packed data."""

import warnings

import pytest
import torch
from torch.distributed.pipelining.microbatch import _CustomReducer, _Replicate

from roundpipe.core.errors import MicrobatchError
from roundpipe.runtime.microbatch.merge import RoundPipePackedData, is_spec, is_spec_of, merge
from roundpipe.runtime.microbatch.split import split
from tests.runtime.cases_microbatch import CHUNK_0, CHUNK_1, Record, config, rows, sizes


class Arrival:
    """An event that counts how often it is waited for."""

    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_automatic_merge():
    outputs = [
        {
            "logits": torch.full((size, 2), float(index)),
            "loss": torch.tensor(float(index)),
            "n": 3,
            "r": Record(rows(size)),
        }
        for index, size in enumerate([2, 2, 1])
    ]
    merged = merge(outputs, config())
    assert merged["logits"][:, 0].tolist() == [0, 0, 1, 1, 2]
    assert merged["loss"].item() == 1.0 and merged["n"] == 3
    assert type(merged["r"]) is Record and merged["r"].values.shape == (5, 3)


def test_merge_of_integers_nans_and_equal_objects():
    same = object()
    values = (torch.tensor(3), float("nan"), same, [1, (2, None)])
    merged = merge([values, (torch.tensor(3), float("nan"), same, [1, (2, None)])], config())
    assert merged[0].dtype == torch.int64 and merged[0] == 3 and merged[2] is same and merged[3] == [1, (2, None)]
    assert merge([torch.tensor(1), torch.tensor(2)], config()) == 1.5


def test_one_output_is_itself():
    output = {"a": torch.tensor(1), "b": rows(2)}
    assert merge([output], config()) is output


def test_merged_outputs_carry_gradients():
    parts = [rows(2).requires_grad_(), rows(3).requires_grad_()]
    merged = merge([(part * 2, part.sum()) for part in parts], config())
    (merged[0].sum() + merged[1]).backward()
    assert all(part.grad.eq(2.5).all() for part in parts)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{"a": 1}, {"a": 2}], r"output\['a'\] is 1 \(int\) for microbatch 0 but 2 \(int\) for microbatch 1"),
        ([(rows(2), [1, "x"]), (rows(2), [1, "y"])], r"output\[1\]\[1\] is 'x' .* but 'y'"),
        (
            [(1, 2), (1, 2, 3)],
            r"output is a tuple with the items \[0, 1\] .* but a tuple with the items \[0, 1, 2\]",
        ),
        ([{"a": rows(1)}, {"b": rows(1)}], r"output is a dict with the items \['a'\] .* microbatch 1"),
        (
            [[rows(2, 3)], [rows(2, 4)]],
            r"output\[0\] can't be concatenated on dim 0: .* \[\(2, 3\), \(2, 4\)\]",
        ),
        ([[rows(2)], [None]], r"output\[0\] is a tensor of shape \(2, 3\) for microbatch 0 but None"),
        ([[None], [rows(2)]], r"output\[0\] is None .* but a tensor of shape \(2, 3\) for microbatch 1"),
        ([rows(2), rows(2)[0]], "must be a tensor of as many dimensions for all"),
        ([Record(rows(1), "a"), Record(rows(1), "b")], r"output\.name is 'a'"),
    ],
)
def test_outputs_that_can_not_be_merged_are_named(outputs, message):
    with pytest.raises(MicrobatchError, match=message):
        merge(outputs, config())


def test_merge_specs():
    outputs = [(rows(2, 2), {"loss": torch.tensor(float(index)), "same": torch.ones(3)}) for index in range(3)]
    start = torch.tensor(10.0)
    reducer = _CustomReducer(start, lambda total, value: total.add_(value))
    merged = merge(outputs, config(merge_output=(CHUNK_1, {"loss": reducer, "same": _Replicate})))
    assert merged[0].shape == (2, 6) and merged[1]["loss"].item() == 13.0 and merged[1]["same"].shape == (3,)
    assert start.item() == 10.0
    assert merge([torch.tensor(1.0)] * 3, config(merge_output=_CustomReducer(0, lambda a, b: a + b))) == 3
    assert merge(outputs, config(merge_output=(None, _CustomReducer([], lambda a, b: [*a, b]))))[1][2]["loss"] == 2.0
    for rule, message in [
        ((CHUNK_0,), "output has 2 items but its spec has 1"),
        ((CHUNK_0, CHUNK_0), r"output\[1\] is a container"),
        ((CHUNK_0, {"loss": CHUNK_0, "same": None}), r"output\[1\]\['loss'\] has shape \(\)"),
        ((_Replicate, None), r"output\[0\] is replicated by its spec but differs"),
        (("x", None), r"output\[0\] has the spec 'x'"),
    ]:
        with pytest.raises(MicrobatchError, match=message):
            merge(outputs, config(merge_output=rule))


def test_merge_function_gets_all_outputs():
    arrivals = [Arrival(), None]
    assert merge([1, 2], config(merge_output=sum), arrivals) == 3
    assert arrivals[0].waits == 1


def test_unmerged_outputs_are_packed_leaf_by_leaf():
    arrivals = [Arrival(), None, Arrival()]
    outputs = [Record(rows(size)) for size in (2, 2, 1)]
    packed = merge(outputs, config(merge_output=False), arrivals)
    assert type(packed) is Record and packed.name == "record"
    assert isinstance(packed.values, RoundPipePackedData) and isinstance(packed.values, list)
    assert all(value is output.values for value, output in zip(packed.values, outputs, strict=True))
    assert [one.waits for one in (arrivals[0], arrivals[2])] == [0, 0]
    packed.values.synchronize()
    packed.values.synchronize()
    assert [one.waits for one in (arrivals[0], arrivals[2])] == [1, 1]
    assert merge([(1, None), (2, None)], config(merge_output=False)) == ([1, 2], None)
    with pytest.raises(MicrobatchError, match="2 values was given 1 events"):
        RoundPipePackedData([1, 2], [None])


def test_packed_data_is_taken_as_it_is():
    x = rows(7).requires_grad_()
    values = [part * 2 for part in x.split([4, 2, 1])]
    arrivals = [Arrival(), Arrival(), None]
    packed = RoundPipePackedData(values, arrivals)
    pieces = split((packed,), {"mask": rows(7)}, rows(7), config(5))
    assert pieces.num_microbatches == 3
    assert all(piece[0] is value for piece, value in zip(pieces.args, values, strict=True))
    assert sizes(one["mask"] for one in pieces.kwargs) == sizes(pieces.labels) == [4, 2, 1]
    assert pieces.events == [[arrivals[0]], [arrivals[1]], []]
    assert arrivals[0].waits == 0
    sum(piece[0].sum() for piece in pieces.args).backward()
    assert x.grad.eq(2).all()


def test_packed_data_of_one_is_a_tensor():
    arrival = Arrival()
    pieces = split((RoundPipePackedData([rows(6)], [arrival]),), {}, rows(6), config(3))
    assert sizes(piece[0] for piece in pieces.args) == [2, 2, 2]
    assert arrival.waits == 1


def test_packed_data_of_another_length_is_cut_anew():
    x, arrival = rows(6), Arrival()
    three, two = RoundPipePackedData(x.split(2)), RoundPipePackedData(x.split(3), [arrival, None])
    pieces = split((three, two), {}, two, config(2))
    assert pieces.num_microbatches == 3
    assert all(
        one[0].equal(one[1]) and one[1].equal(label) for one, label in zip(pieces.args, pieces.labels, strict=True)
    )
    assert arrival.waits >= 1


def test_packed_data_has_arrived_when_a_function_sees_it():
    arrival = Arrival()
    packed = RoundPipePackedData(rows(4).split(2), [arrival, None])
    pieces = split((packed,), {}, None, config(2, split_input=lambda a, k, n: ([(one,) for one in a[0]], [k] * n)))
    assert arrival.waits == 1 and sizes(piece[0] for piece in pieces.args) == [2, 2]


def test_packed_data_feeds_through():
    """What one call leaves unmerged is what the next takes, object by object."""
    first = split((rows(9),), {}, None, config(4))
    packed = merge([(args[0] + 1, 7) for args in first.args], config(merge_output=False))
    second = split(packed, {}, None, config(4))
    assert [args[0] for args in second.args] == list(packed[0])
    assert merge([args[0] for args in second.args], config()).equal(rows(9) + 1)


def test_torchs_specs_are_where_they_are_expected():
    """Fails when torch moves or renames the private classes that specs are made of."""
    assert is_spec(CHUNK_0) and is_spec(_Replicate)
    assert is_spec_of(_CustomReducer(0, min), "_CustomReducer")
    assert CHUNK_0.split_dim == 0 and _CustomReducer(0, min).reduce_fn is min
    assert not is_spec(0) and not is_spec(min)
