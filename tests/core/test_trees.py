"""Nested values: every kind of container is walked, found in, mapped and rebuilt alike."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import nn

import roundpipe
from roundpipe.core import trees
from roundpipe.core.errors import ConfigError
from roundpipe.core.trees import Access

transformers_outputs = pytest.importorskip("transformers.modeling_outputs", reason="needs transformers")

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Plain:
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class Holder:
    """An object of a user's, such as a cache."""

    def __init__(self, value):
        self.value = value
        self.length = 3


class Registered:
    def __init__(self, left, right, tag):
        self.left, self.right, self.tag = left, right, tag


torch_pytree.register_pytree_node(
    Registered,
    lambda value: ([value.left, value.right], value.tag),
    lambda parts, tag: Registered(*parts, tag),
    serialized_type_name="tests.core.test_trees.Registered",
)


class Sub(list):
    """A list with a type of its own."""


T = [torch.full((2,), float(i)) for i in range(4)]

CASES = {
    "tensor": (T[0], [()]),
    "none": (None, [()]),
    "string": ("text", [()]),
    "tuple": ((T[0], 1), ["[0]", "[1]"]),
    "list": ([T[0], [T[1]]], ["[0]", "[1][0]"]),
    "empty": ((), []),
    "dict": ({"a": T[0], 3: T[1]}, ["['a']", "[3]"]),
    "ordered": (OrderedDict(b=T[0], a=T[1]), ["['b']", "['a']"]),
    "defaultdict": (defaultdict(list, a=T[0]), ["['a']"]),
    "namedtuple": (Point(T[0], (T[1],)), ["[0]", "[1][0]"]),
    "dataclass": (Plain(T[0], {"k": T[1]}), [".first", ".second['k']"]),
    "frozen": (Frozen(T[0]), [".value"]),
    "model output": (
        transformers_outputs.CausalLMOutputWithPast(loss=T[0], logits=T[1]),
        ["['loss']", "['logits']"],
    ),
    "registered": (Registered(T[0], T[1], "tag"), ["[0]", "[1]"]),
    "object": (Holder(T[0]), [".value", ".length"]),
    "namespace": (SimpleNamespace(a=T[0]), [".a"]),
    "slice": (slice(1, T[0], None), [".start", ".stop", ".step"]),
    "subclass": (Sub([T[0], 2]), ["[0]", "[1]"]),
    "size": (torch.Size([2, 3]), [()]),
    "deep": (
        [{"a": (Plain(Point([T[0]], None)),)}],
        ["[0]['a'][0].first[0][0]", "[0]['a'][0].first[1]", "[0]['a'][0].second"],
    ),
}
cases = pytest.mark.parametrize("value, paths", CASES.values(), ids=CASES)


def same(one, other):
    """Equal in type and content, tensors by identity."""
    if isinstance(one, torch.Tensor):
        return one is other
    below, other_below = trees.children(one), trees.children(other)
    if below is None:
        return one == other
    return (
        type(one) is type(other)
        and [step for step, _ in below] == [step for step, _ in other_below]
        and all(same(a, b) for (_, a), (_, b) in zip(below, other_below, strict=True))
    )


@cases
def test_walk_gives_every_leaf_with_its_path(value, paths):
    found = list(trees.walk(value))
    assert [trees.path_string(path) for path, _ in found] == [path or "" for path in paths]
    for path, leaf in found:
        assert trees.get(value, path) is leaf
    assert [leaf for _, leaf in found] == trees.leaves(value)


@cases
def test_rebuilding_over_its_own_leaves_gives_an_equal_value(value, paths):
    assert same(trees.rebuild(value, trees.leaves(value)), value)


@cases
def test_mapping_replaces_tensors_and_leaves_the_original_alone(value, paths):
    before = trees.leaves(value)
    mapped = trees.map_tensors(value, lambda tensor: tensor + 10)
    assert all(a is b for a, b in zip(trees.leaves(value), before, strict=True))
    assert type(mapped) is type(value)
    tensors = trees.tensors(value)
    assert [one.tolist() for one in trees.tensors(mapped)] == [(one + 10).tolist() for one in tensors]
    assert [x for x in trees.leaves(mapped) if not isinstance(x, torch.Tensor)] == [
        x for x in before if not isinstance(x, torch.Tensor)
    ]
    if not tensors:
        assert mapped is value


@cases
def test_tensors_come_in_the_order_of_the_walk(value, paths):
    expected = [leaf for leaf in trees.leaves(value) if isinstance(leaf, torch.Tensor)]
    assert all(a is b for a, b in zip(trees.tensors(value), expected, strict=True))


def test_types_and_extras_survive():
    output = trees.map_tensors(CASES["model output"][0], torch.neg)
    assert isinstance(output, transformers_outputs.CausalLMOutputWithPast)
    assert output.logits is output["logits"] is output[1] and output.past_key_values is None
    assert trees.map_tensors(CASES["defaultdict"][0], torch.neg).default_factory is list
    assert trees.map_tensors(CASES["registered"][0], torch.neg).tag == "tag"
    assert trees.map_tensors(Point(T[1], 2), torch.neg).x.tolist() == [-1, -1]
    assert list(trees.map_tensors(CASES["ordered"][0], torch.neg)) == ["b", "a"]


def test_what_is_no_container():
    module, generator = nn.Linear(1, 1), torch.Generator()
    for value in (module, generator, torch.float32, torch.device("cpu"), print, range(3), Plain, 1.5, b"x", {1, 2}):
        assert trees.children(value) is None
        assert trees.leaves(value) == [value]


def test_steps_say_how_to_get_there():
    ((path, _),) = trees.walk({"a": [Frozen(T[0])]})
    assert path == (Access("item", "a"), Access("item", 0), Access("attribute", "value"))
    ((first, _), _) = trees.walk(CASES["registered"][0])
    assert first == (Access("node", 0),)


def test_too_deep_values_are_leaves():
    value = [T[0]]
    for _ in range(trees.MAX_DEPTH + 3):
        value = [value]
    (path, leaf), *rest = trees.walk(value)
    assert len(path) == trees.MAX_DEPTH and isinstance(leaf, list) and not rest
    assert trees.tensors(value) == []


def test_a_value_that_holds_itself_ends():
    holder = Holder(T[0])
    holder.own = holder
    assert len(trees.tensors(holder)) == trees.MAX_DEPTH


def test_one_tensor_in_two_places_is_found_twice():
    assert len(trees.tensors((T[0], {"again": T[0]}))) == 2


def test_map_leaves_changes_all_leaves():
    assert trees.map_leaves({"a": (1, [2.5]), "b": Point(3, 4)}, lambda leaf: leaf * 2) == {
        "a": (2, [5.0]),
        "b": Point(6, 8),
    }


def test_a_cache_of_transformers():
    cache_utils = pytest.importorskip("transformers.cache_utils")
    cache = cache_utils.DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert [t.shape for t in trees.tensors(cache)] == [(1, 2, 3, 4)] * 2
    doubled = trees.map_tensors(cache, lambda tensor: tensor * 2)
    assert type(doubled) is type(cache)
    assert [t.mean().item() for t in trees.tensors(doubled)] == [2.0, 0.0]
    assert [t.mean().item() for t in trees.tensors(cache)] == [1.0, 0.0]


class Node:
    def __init__(self, value: Any, parent: Node | None = None, children: int = 0) -> None:
        self.value, self.parent = value, parent
        self.children = [Node(value, self) for _ in range(children)]


def nested(depth: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(depth):
        value = (value, None)
    return value


def test_arguments_that_have_no_end_or_lie_too_deep_are_refused() -> None:
    assert len(trees.checked_tensors(((nested(10),), {}))) == 1
    with pytest.raises(ConfigError, match="11 or more containers inside each other"):
        trees.checked_tensors(((nested(11),), {}))
    with pytest.raises(ConfigError, match="refers back to itself"):
        trees.checked_tensors(((Node(torch.ones(1), children=2),), {}))
    with pytest.raises(ConfigError, match="in more ways than can be walked"):
        trees.checked_tensors(((Node("word", children=50),), {}))
    shared = [1.0] * 50_000
    assert not trees.checked_tensors((([shared, shared], Node("word", children=2)), {}))


def test_such_a_call_ends_with_an_error_before_anything_is_traced() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, root: Node | None = None) -> torch.Tensor:
            return self.linear(x if root is None else root.value)

    endless, x = Node("word", children=50), torch.randn(3, 4)
    with roundpipe.compile(Encoder(), devices=["cpu"]) as piped:
        for call in (
            lambda: piped(x, endless),
            lambda: piped(x, Node(x, children=2)),
            lambda: piped.forward_backward((x,), label=endless, loss_fn=lambda outputs, _: outputs.sum()),
        ):
            with pytest.raises(ConfigError, match="without references back"):
                call()
        assert piped(x).shape == (3, 4)
