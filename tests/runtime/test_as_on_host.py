"""Operations with tensors of two places give what they give in one; here both are the host, told apart by a mark."""

import pytest
import torch
from torch import nn

from roundpipe.runtime.optimizer import as_on_host as module
from roundpipe.runtime.optimizer.as_on_host import (
    HostMix,
    as_on_host,
    begin_torchs_own,
    end_torchs_own,
    torchs_own,
)


class Marked:
    """The memory of tensors that count as the device's; operations with others are refused as a device would."""

    def __init__(self):
        self.addresses = set()
        self.kept = []

    def add(self, tensor):
        self.addresses.add(tensor.untyped_storage().data_ptr())
        self.kept.append(tensor)
        return tensor

    def has(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.addresses


@pytest.fixture
def marked(monkeypatch):
    marked = Marked()
    run = HostMix._run  # where it runs what it has moved
    monkeypatch.setattr(HostMix, "is_there", lambda self, tensor: marked.has(tensor))
    monkeypatch.setattr(HostMix, "to_host", lambda self, tensor: tensor.clone())
    monkeypatch.setattr(HostMix, "to_device", lambda self, tensor, device: marked.add(tensor.clone()))

    def checked(self, func, args, kwargs, written, device):
        def in_one_place(*given, **options):
            tensors = [each for each in module.trees.tensors((given, options)) if each.ndim]
            assert len({marked.has(each) for each in tensors}) <= 1, func
            return func(*given, **options)

        return run(self, in_one_place, args, kwargs, written, device)

    monkeypatch.setattr(HostMix, "_run", checked)  # as above
    return marked


def tensors(seed=0):
    torch.manual_seed(seed)
    return [torch.randn(4, 3) for _ in range(4)]


OPERATIONS = {
    "average": lambda there, here: here[0].lerp_(there[0], 0.25),
    "averages": lambda there, here: torch._foreach_lerp_(here, there, 0.25),
    "noise": lambda there, here: there[0].add_(here[0]),
    "noises": lambda there, here: torch._foreach_add_(there, here, alpha=0.5),
    "product": lambda there, here: there[0] * here[0] + there[1],
    "joined": lambda there, here: torch.cat([there[0], here[0]]),
    "result given": lambda there, here: torch.add(there[0], there[1], out=here[0]),
    "matrix": lambda there, here: there[0] @ here[0].T,
    "where": lambda there, here: torch.where(here[0] > 0, there[0], 0.0),
    "scalar": lambda there, here: here[0][0, 0].add_(there[0][0, 0]),
    "index": lambda there, here: there[0].masked_fill_(here[0] > 0, 1.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_and_writes_are_those_of_the_host(name, marked):
    there, here = tensors()[:2], tensors(1)[:2]
    expected_there, expected_here = tensors()[:2], tensors(1)[:2]
    expected = OPERATIONS[name](expected_there, expected_here)
    for each in there:
        marked.add(each)
    with as_on_host({torch.device("cpu")}) as mix:
        found = OPERATIONS[name](there, here)
    assert mix.has_mixed
    for one, other in zip([*there, *here], [*expected_there, *expected_here], strict=True):
        assert torch.equal(one, other)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
        if expected is expected_here[0]:
            assert found is here[0]
        if expected is expected_there[0]:
            assert found is there[0]


def test_scalars_of_two_places_are_joined_without_a_reason_to_go_home(marked):
    """As with the norm of gradients, of which some are on the device."""
    there, here = tensors()[0], tensors(1)[0]
    expected = torch.stack([there[0, 0], here[0, 0]]).norm()
    marked.add(there)
    with as_on_host({torch.device("cpu")}) as mix:
        assert torch.equal(torch.stack([there[0, 0], here[0, 0]]).norm(), expected)
    assert not mix.has_mixed


def test_what_is_in_one_place_or_goes_between_runs_as_it_is(marked):
    there, here = marked.add(torch.ones(3)), torch.zeros(3)
    with as_on_host({torch.device("cpu")}) as mix:
        there.mul_(2).add_(torch.tensor(1.0))
        here.add_(1)
        here.copy_(there)
        torch._foreach_copy_([there], [here])
        there.sum().item()
    assert not mix.has_mixed and torch.equal(here, torch.full((3,), 3.0))


def test_what_needs_the_host_gets_it(marked):
    there = nn.Parameter(torch.ones(3))
    marked.add(there)
    with as_on_host({torch.device("cpu")}) as mix:
        assert there.detach().numpy().sum() == 3 and mix.has_mixed
        mix.has_mixed = False
        there.grad = given = torch.ones(3)
        assert mix.has_mixed and marked.has(there.grad) and not marked.has(given)
        mix.has_mixed = False
        there.data = torch.full((3,), 2.0)
        assert mix.has_mixed and marked.has(there)
        there.grad = None
    assert torch.equal(there.detach(), torch.full((3,), 2.0))


def test_what_is_torchs_own_is_not_looked_at(marked):
    there, here = marked.add(torch.ones(3)), torch.ones(3)
    with as_on_host({torch.device("cpu")}) as mix:
        with torchs_own():
            there.add_(here)
            assert not mix.has_mixed
            with torchs_own():
                there.numpy()
            there.add_(here)
        begin_torchs_own()
        there.add_(here)
        end_torchs_own()
        assert not mix.has_mixed
        there.add_(here)
        assert mix.has_mixed and there[0] == 5


@pytest.mark.parametrize("by_hooks", [False, True])
def test_what_raises_in_torchs_own_leaves_nothing_behind(by_hooks, marked):
    there, here = marked.add(torch.ones(3)), torch.ones(3)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), as_on_host({torch.device("cpu")}):
            if by_hooks:
                begin_torchs_own()
                raise ZeroDivisionError
            with torchs_own():
                raise ZeroDivisionError
        with torchs_own():  # outside it does nothing
            pass
        end_torchs_own()
        with as_on_host({torch.device("cpu")}) as mix:
            there.numpy()
            assert mix.has_mixed and here[0] == 1
