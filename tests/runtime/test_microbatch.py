"""Splitting and merging: the automatic rules, specs, functions, packed data, and what each error says."""

import warnings
from collections import namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from roundpipe.core.errors import MicrobatchError
from roundpipe.runtime.microbatch.merge import merge
from roundpipe.runtime.microbatch.split import split
from tests.runtime.cases_microbatch import CHUNK_0, CHUNK_1, Record, config, rows, sizes

Pair = namedtuple("Pair", "left right")


class Plain:
    def __init__(self, values):
        self.values = values


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_every_structure_is_walked():
    x = rows(10)
    args = (x, [x, (x, None)], Pair(x, "right"), Record(x), Plain(x))
    pieces = split(args, {"deep": {"x": x, 3: [x]}}, {"label": x}, config(3))
    assert pieces.num_microbatches == 3
    bounds = [(0, 4), (4, 7), (7, 10)]
    for (start, stop), got, kwargs, label in zip(bounds, pieces.args, pieces.kwargs, pieces.labels, strict=True):
        part = x[start:stop]
        found = [got[0], got[1][0], got[1][1][0], got[2].left, got[3].values, got[4].values]
        found += [kwargs["deep"]["x"], kwargs["deep"][3][0], label["label"]]
        assert all(one.equal(part) for one in found)
        assert all(one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for one in found)
        assert type(got[2]) is Pair and got[2].right == "right" and got[1][1][1] is None
        assert type(got[3]) is Record and got[3].name == "record" and type(got[4]) is Plain
    assert args[3].values is x and args[4].values is x


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 40), number=st.integers(1, 12))
def test_sizes_differ_by_at_most_one_and_lose_nothing(batch, number):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pieces = split((torch.arange(batch),), {}, torch.arange(batch), config(number))
    got = sizes(piece[0] for piece in pieces.args)
    assert len(got) == min(batch, number)
    assert max(got) - min(got) <= 1 and min(got) >= 1
    assert torch.cat([piece[0] for piece in pieces.args]).equal(torch.arange(batch))
    assert sizes(pieces.labels) == got
    assert merge([piece[0] for piece in pieces.args], config(number)).equal(torch.arange(batch))


def test_scalars_and_others_are_replicated():
    scalar, settings = torch.tensor(2.0), {"list": [1, 2]}
    pieces = split((rows(8), scalar, 3, "text", None, settings), {"flag": True}, None, config(2))
    for args, kwargs in zip(pieces.args, pieces.kwargs, strict=True):
        assert args[1] is scalar and args[2:5] == (3, "text", None) and args[5] is settings
        assert kwargs == {"flag": True}
    assert pieces.labels == [None, None]


def test_the_batch_size_is_that_of_the_first_tensor_with_a_dim():
    with pytest.warns(UserWarning) as caught:
        pieces = split((torch.tensor(1.0), rows(6)), {"mask": rows(5), "same": rows(6)}, rows(7), config(3))
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith("kwargs['mask'], label: dim 0 is not as long as the batch")
    assert [len(one["mask"]) for one in pieces.kwargs] == [5, 5, 5]
    assert [len(one["same"]) for one in pieces.kwargs] == [2, 2, 2]
    assert sizes(pieces.labels) == [7, 7, 7]
    kwargs_only = split((), {"a": rows(4)}, rows(4), config(2))
    assert sizes(kwargs_only.labels) == [2, 2] and kwargs_only.args == [(), ()]


LISTS = [*([entry] * 4 for entry in ("text", 3, {"boxes": rows(4)}, ["a", "b"])), ("text",) * 4, rows(4).numpy()]


@pytest.mark.parametrize("entries", LISTS)
def test_a_list_with_an_entry_for_each_sample_is_not_split_and_one_warning_says_so(entries):
    """Texts, or targets of detection: a loss that goes through outputs and the list would take the wrong ones."""
    with pytest.warns(UserWarning) as caught:
        pieces = split((rows(4),), {}, entries, config(2))
    assert len(caught) == 1
    assert str(caught[0].message).startswith("label: a list or array of as many entries as the batch has samples")
    assert [len(label) for label in pieces.labels] == [4, 4]
    with pytest.warns(UserWarning, match="captions.*: a list or array of as many entries"):
        split((rows(4),), {}, {"of": {"captions": ["text"] * 4}}, config(2))


@pytest.mark.parametrize(
    ("label", "number"), [([rows(4)] * 4, 2), (["text"] * 3, 2), (["text"] * 4, 1), ([None] * 4, 2), ((3,) * 4, 2)]
)
def test_other_lists_are_no_reason_for_a_warning(label, number):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split((rows(4),), {}, label, config(number))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "has 1 sample, so it runs as 1 microbatch instead of 4"),
        (2, "has 2 samples, so it runs as 2 microbatches i"),
    ],
)
def test_a_small_batch_has_fewer_microbatches_and_one_warning(number, words):
    with pytest.warns(UserWarning, match=words) as caught:
        pieces = split((rows(number),), {}, rows(number), config(4))
    assert len(caught) == 1
    assert pieces.num_microbatches == number and sizes(pieces.labels) == [1] * number


def test_an_empty_batch_is_an_error():
    with pytest.raises(ValueError, match=r"the batch is empty: .* \(shape \(0, 3\)\)") as caught:
        split((rows(0),), {}, None, config())
    assert isinstance(caught.value, MicrobatchError)


def test_without_a_batch_there_is_one_microbatch():
    pieces = split((3, torch.tensor(1.0)), {}, rows(5), config(4))
    assert pieces.num_microbatches == 1 and sizes(pieces.labels) == [5]


def test_gradients_flow_through_the_pieces():
    x = rows(5).requires_grad_()
    pieces = split((x,), {}, None, config(2))
    sum((index + 1) * piece[0].sum() for index, piece in enumerate(pieces.args)).backward()
    assert x.grad[:, 0].tolist() == [1, 1, 1, 2, 2]


def test_pieces_of_data_may_be_changed_in_place():
    x = rows(4)
    weight = torch.ones(3, requires_grad=True)
    piece = split((x,), {}, None, config(2)).args[1][0]
    piece.mul_(weight)
    assert piece.requires_grad and x[2:].equal(piece)


def test_cycles_do_not_hang():
    cyclic = Plain(rows(4))
    cyclic.itself = cyclic
    pieces = split((cyclic,), {}, None, config(2))
    assert sizes(piece[0].values for piece in pieces.args) == [2, 2]


def test_specs_say_which_dim():
    tokens, positions, scale = rows(6, 2), rows(2, 6), torch.tensor(3.0)
    rule = ((CHUNK_0, {"positions": CHUNK_1, "scale": _Replicate}), None)
    pieces = split(
        (tokens, {"positions": positions, "scale": scale}), {"auto": rows(6)}, (tokens, positions),
        config(3, split_input=rule, split_label=(CHUNK_0, _Replicate())),
    )  # fmt: skip
    for index, (args, kwargs, label) in enumerate(zip(pieces.args, pieces.kwargs, pieces.labels, strict=True)):
        part = slice(2 * index, 2 * index + 2)
        assert args[0].equal(tokens[part]) and args[1]["positions"].equal(positions[:, part])
        assert args[1]["scale"] is scale and kwargs["auto"].shape == (2, 3)
        assert label[0].equal(tokens[part]) and label[1] is positions


def test_the_batch_size_of_a_spec_is_that_of_its_dim():
    rule = ((CHUNK_1,), {"y": CHUNK_0})
    pieces = split((rows(2, 6),), {"y": rows(6)}, rows(6), config(3, split_input=rule))
    assert [piece[0].shape for piece in pieces.args] == [(2, 2)] * 3
    assert sizes(pieces.labels) == [2, 2, 2]
    with pytest.warns(UserWarning, match="runs as 6 microbatches instead of 8"):
        assert split((rows(2, 6),), {"y": rows(6)}, None, config(8, split_input=rule)).num_microbatches == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split_input": ((CHUNK_0,), None)}, "args has 2 items but its spec has 1"),
        (
            {"split_input": ((CHUNK_0, CHUNK_1), None)},
            r"args\[1\] is a container with the items \['m'\] but its spec is",
        ),
        (
            {"split_input": ((CHUNK_0, {"n": CHUNK_0}), None)},
            r"args\[1\] has the keys \['m'\] but its spec has \['n'\]",
        ),
        (
            {"split_input": (((CHUNK_0,), None), None)},
            r"args\[0\] is a single value but its spec is the structure",
        ),
        (
            {"split_input": ((TensorChunkSpec(2), None), None)},
            r"args\[0\] has shape \(6, 3\) .* allowed: -2 to 1",
        ),
        (
            {"split_input": ((0, None), None)},
            r"args\[0\] has the spec 0; allowed: TensorChunkSpec, _Replicate",
        ),
        (
            {"split_input": (None, {"k": CHUNK_0, "l": CHUNK_0})},
            r"kwargs has the keys \['k'\] but its spec has",
        ),
        ({"split_input": (None, {"k": CHUNK_0})}, r"kwargs\['k'\] has shape \(\) .* allowed: _Replicate"),
        ({"split_input": _Replicate}, r"give a pair \(args_spec, kwargs_spec\)"),
        ({"split_label": (CHUNK_0, CHUNK_0)}, "label has 3 items but its spec has 2"),
        (
            {"split_label": [None, None, CHUNK_1]},
            r"label\[2\] has only 3 samples along dim 1 for 4 microbatches",
        ),
        (
            {"split_label": lambda label, n: [label]},
            "split_label.* returned 1 items in labels for num_microbatch=4",
        ),
        (
            {"split_label": lambda label, n: label[0]},
            "a tensor of shape .6, 3. as labels; it must be a list of 4",
        ),
        ({"split_input": lambda a, k, n: k}, "it must return .args_list, kwargs_list."),
        ({"split_input": lambda a, k, n: ([a] * n,)}, "it must return .args_list, kwargs_list."),
        (
            {"split_input": lambda a, k, n: ([a] * n, [k] * 2)},
            "returned 2 items in kwargs_list for num_microbatch=4",
        ),
        (
            {"split_input": lambda a, k, n: ([a] * 5, [k] * n)},
            "returned 5 items in args_list for num_microbatch=4",
        ),
        (
            {"split_input": lambda a, k, n: ([a[0]] * n, [k] * n)},
            r"args_list\[0\] is a tensor .* must be a tuple",
        ),
        ({"split_input": lambda a, k, n: ([a] * n, [a] * n)}, r"kwargs_list\[0\] is .* must be a dict"),
    ],
)
def test_rules_that_do_not_fit_say_where(fields, message):
    with pytest.raises(MicrobatchError, match=message):
        split((rows(6), {"m": rows(6)}), {"k": torch.tensor(1.0)}, [rows(6)] * 3, config(4, **fields))


def test_functions_are_called_for_one_microbatch_too():
    calls = []

    def split_input(args, kwargs, number):
        calls.append((type(args), type(kwargs), number))
        return [list(args)] * number, [kwargs] * number

    def split_label(label, number):
        calls.append(number)
        return (label,) * number

    pieces = split((rows(3),), {"k": 1}, "label", config(1, split_input=split_input, split_label=split_label))
    assert calls == [(tuple, dict, 1), 1]
    assert type(pieces.args[0]) is tuple and pieces.kwargs == [{"k": 1}] and pieces.labels == ["label"]
    assert split((rows(3),), {}, None, config(1, split_label=split_label)).labels == [None]
    with pytest.raises(ZeroDivisionError):
        split((), {}, None, config(1, split_input=lambda *_: 1 // 0))


def test_labels_follow_the_pieces_of_a_function():
    x = rows(10)
    uneven = lambda a, k, n: ([(part,) for part in a[0].split([5, 3, 2])], [k] * n)  # noqa: E731
    assert sizes(split((x,), {}, x, config(3, split_input=uneven)).labels) == [5, 3, 2]
    along_1 = lambda a, k, n: ([(part,) for part in a[0].tensor_split(n, 1)], [k] * n)  # noqa: E731
    assert sizes(split((rows(4, 9),), {}, x, config(3, split_input=along_1)).labels) == [4, 3, 3]
