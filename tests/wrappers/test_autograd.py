"""`forward` as a part of the caller's autograd graph, and without one."""

import copy
import gc

import pytest
import torch
from torch import nn

import roundpipe
from tests.repeats import repeats
from tests.runtime.models import (
    DTYPE,
    assert_same,
    batch,
    config,
    gradients,
    mlp,
    skip_chain,
    square_loss,
)
from tests.wrappers.cases_autograd import by_microbatch, grains, workers


@pytest.mark.parametrize("build", [mlp, skip_chain])
@grains
@workers
def test_backward_through_outputs(workers, grain, build):
    model = build()
    reference = copy.deepcopy(model)
    given, expected_given = batch().requires_grad_(), batch().requires_grad_()
    expected = by_microbatch(reference, expected_given)
    square_loss(expected, None).backward()
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        output = piped(given, roundpipe_run_config=config(3, grain))
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
        square_loss(output, None).backward()
    assert_same(gradients(model), gradients(reference))
    torch.testing.assert_close(given.grad, expected_given.grad, rtol=0, atol=1e-10)


def test_modules_before_and_after():
    front, model, back = nn.Linear(6, 6, dtype=DTYPE), mlp(), nn.Linear(6, 2, dtype=DTYPE)
    references = copy.deepcopy([front, model, back])
    expected = references[2](by_microbatch(references[1], references[0](batch())))
    expected.square().sum().backward()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        back(piped(front(batch()), roundpipe_run_config=config(3))).square().sum().backward()
    for found, reference in zip((front, model, back), references, strict=True):
        assert_same(gradients(found), gradients(reference))


def test_two_forwards_before_one_backward():
    model = mlp()
    reference = copy.deepcopy(model)
    one, other = batch(), batch(5, seed=8)
    (by_microbatch(reference, one).sum() * by_microbatch(reference, other, 2).square().sum()).backward()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        first = piped(one, roundpipe_run_config=config(3)).sum()
        second = piped(other, roundpipe_run_config=config(2)).square().sum()
        (first * second).backward()
    assert_same(gradients(model), gradients(reference))


def test_a_model_called_on_its_own_output():
    model = mlp()
    reference = copy.deepcopy(model)
    reference(reference(batch())).square().sum().backward()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        piped(piped(batch())).square().sum().backward()
    assert_same(gradients(model), gradients(reference))


def test_a_second_backward_says_what_to_do():
    with roundpipe.RoundPipe(mlp()) as piped:
        output = piped(batch()).sum()
        output.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time.*run forward again") as caught:
            output.backward()
        assert isinstance(caught.value, roundpipe.BackwardError)
        piped(batch()).sum().backward()


def test_an_argument_written_before_the_backward_is_an_error_as_in_eager():
    model = mlp()
    given = batch()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, model_run_config=config(2)) as piped:
        output = piped(given)
        given += 1
        with pytest.raises(roundpipe.BackwardError, match=r"args\[0\]: .*changed in place since the RoundPipe forward"):
            output.sum().backward()
        reference = copy.deepcopy(model)
        reference(given).square().sum().backward()
        piped(given).square().sum().backward()
        piped.synchronize()
        assert_same(gradients(model), gradients(reference))


@grains
@workers
def test_what_needs_no_gradient_is_recomputed_without(workers, grain):
    """As in eager, where a mask beside the hidden state costs nothing and attention takes its fast way."""
    seen = []

    def look(module, args):
        """A hook, since a layer that asks for the mode itself runs with autograd in its forward, too."""
        ((hidden, more),) = args
        if torch.is_grad_enabled():
            seen.append((hidden.requires_grad, more["mask"].requires_grad))

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, given):
            hidden, more = given
            return self.linear(hidden) * more["mask"], more

    model = nn.Sequential(*(Masked() for _ in range(4))).to(DTYPE)
    reference = copy.deepcopy(model)
    for layer in model:
        layer.register_forward_pre_hook(look)
    x, mask = batch().requires_grad_(), torch.rand_like(batch())
    expected_x = x.detach().clone().requires_grad_()
    square_loss(reference((expected_x, {"mask": mask}))[0], None).backward()
    plan = roundpipe.ExecutePlan([(0, 1), (1, 3)], (3, 4), [(2, 3), (0, 2)])
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers, model_run_config=config(3, grain, plan)) as piped:
        output, more = piped((x, {"mask": mask}))
        assert output.requires_grad and not more["mask"].requires_grad
        square_loss(output, None).backward()
        assert len(seen) == 12 and set(seen) == {(True, False)}
        assert_same(gradients(model), gradients(reference))
        torch.testing.assert_close(x.grad, expected_x.grad, rtol=0, atol=1e-10)
        seen.clear()
        piped.forward_backward(((x.detach(), {"mask": mask}),), loss_fn=lambda out, _: square_loss(out[0], None))
        assert len(seen) == 12 and {mask for _, mask in seen} == {False}


def write_parameter(piped):
    with torch.no_grad():
        next(piped.parameters()).mul_(2)


def write_buffer(piped):
    piped.model[1].scale.mul_(2)


def replace_parameter(piped):
    piped.model[0].weight = nn.Parameter(piped.model[0].weight.detach() * 2)


def replace_buffer(piped):
    piped.model[1].scale = piped.model[1].scale * 2


def load(piped):
    piped.load_state_dict(piped.state_dict())


def step(piped):
    piped.step(lambda: None, False)
    piped.step(lambda: None, False)


WRITES = [
    *(write_parameter, write_buffer, replace_parameter, replace_buffer),
    *(load, step, roundpipe.RoundPipe.synchronize),
]


@pytest.mark.parametrize("write", WRITES)
def test_weights_written_before_the_backward_are_an_error_as_in_eager(write):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.full((6,), 2.0, dtype=DTYPE))

        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 6)).to(DTYPE)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, model_run_config=config(2)) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        piped.forward_backward((batch(),), loss_fn=square_loss)
        piped.step(optimizer.step)
        output = piped(batch())
        write(piped)
        with pytest.raises(roundpipe.BackwardError, match="changed in place since the RoundPipe forward.*before step"):
            output.sum().backward()
        reference = copy.deepcopy(model)
        reference.zero_grad()
        piped.zero_grad()
        reference(batch()).sum().backward()
        piped(batch()).sum().backward()
        piped.synchronize()
        assert_same(gradients(model), gradients(reference))


@pytest.mark.parametrize("settings", [{"scale": 1.0}, [1.0]], ids=["dict", "list"])
def test_settings_changed_before_the_backward_are_those_of_the_forward(settings):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.settings = settings
            self.key = next(iter(settings)) if isinstance(settings, dict) else 0

        def forward(self, x):
            return torch.tanh(self.linear(x)) * self.settings[self.key]

    model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 6)).to(DTYPE)
    reference = copy.deepcopy(model)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2, model_run_config=config(2)) as piped:
        for used in (reference, piped):
            output = used(batch()).square().sum()
            layer = used[1] if used is reference else used.model[1]
            layer.settings[layer.key] = 3.0
            output.backward()
        assert_same(gradients(model), gradients(reference))
        piped(batch()).square().sum().backward()
        reference(batch()).square().sum().backward()
        piped.synchronize()
        assert_same(gradients(model), gradients(reference))


def test_gradients_of_gradients_are_refused():
    with roundpipe.RoundPipe(mlp(), devices=["cpu"]) as piped:
        given = batch().requires_grad_()
        output = piped(given).square().sum()
        with pytest.raises(roundpipe.BackwardError, match="create_graph=True.*use the wrapped module itself"):
            torch.autograd.grad(output, given, create_graph=True)
        output.backward()
        assert given.grad is not None


@pytest.mark.parametrize("wrap", repeats(["by hand", "traced", "module by module"], ["traced", "module by module"]))
def test_a_forward_without_backward_keeps_nothing(wrap):
    """Its values and its node in the autograd graph must not keep each other alive."""
    model, x = mlp(), batch()
    if wrap == "by hand":
        pipe = roundpipe.RoundPipe(model, devices=["cpu"])
    elif wrap == "traced":
        pipe = roundpipe.compile(model, example_args=(x,), devices=["cpu"])
    else:
        pipe = roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, devices=["cpu"])

    def alive():
        gc.collect()
        return sum(type(one) in (torch.Tensor, nn.Parameter) for one in gc.get_objects())

    with pipe:
        for _ in range(2):
            pipe(x).mean().item()
        before = alive()
        for _ in range(5):
            pipe(x).mean().item()
        assert alive() <= before
