"""Backward through parts of the outputs, without gradients, and through packed data."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.models import (
    DTYPE,
    Do,
    assert_equal_bits,
    assert_same,
    batch,
    buffers,
    chain,
    config,
    gradients,
    mlp,
    skip_chain,
    square_loss,
)
from tests.wrappers.cases_autograd import by_microbatch, grains, workers


def ask_by_grad(loss, inputs):
    return torch.autograd.grad(loss, inputs)


def ask_by_backward(loss, inputs):
    loss.backward(inputs=inputs)
    return [one.grad for one in inputs]


@workers
@pytest.mark.parametrize("ask", [ask_by_grad, ask_by_backward])
def test_gradients_of_inputs_alone_leave_those_of_parameters(workers, ask):
    """As in eager: also where there are gradients already, which an asynchronous step is about to take."""
    front, model = nn.Linear(6, 6, dtype=DTYPE), mlp()
    references = copy.deepcopy([front, model])
    wanted = ask(by_microbatch(references[1], references[0](batch())).square().sum(), [references[0].weight])
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.0)
        found = ask(piped(front(batch())).square().sum(), [front.weight])
        torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-10)
        assert not any(p.grad is not None for p in [*model.parameters(), front.bias])
        piped.forward_backward((batch(5, seed=8),), loss_fn=square_loss)
        square_loss(references[1](batch(5, seed=8)), None).backward()
        front.weight.grad = None
        ask(piped(front(batch())).square().sum(), [front.weight])
        piped.step(optimizer.step)
        front.weight.grad = None
        ask(piped(front(batch())).square().sum(), [front.weight])
        piped.synchronize()
        assert_same(gradients(model), gradients(references[1]))


def test_gradients_of_parameters_are_not_in_the_callers_graph():
    model = mlp()
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        loss = piped(batch()).square().sum()
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert all(p.grad is None for p in model.parameters())
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())


def test_part_of_the_outputs_is_as_in_eager():
    """Rows of some microbatches only, and an output that is used twice."""
    model = mlp()
    reference = copy.deepcopy(model)
    by_microbatch(reference, batch())[2:4].square().sum().backward()
    once = by_microbatch(reference, batch())
    (once[0] * once[-1]).sum().backward()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        piped(batch(), roundpipe_run_config=config(3))[2:4].square().sum().backward()
        once = piped(batch(), roundpipe_run_config=config(3))
        (once[0] * once[-1]).sum().backward()
    assert_same(gradients(model), gradients(reference))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_kept(mode):
    model = skip_chain()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        with mode():
            output = piped(batch(), roundpipe_run_config=config(3))
            expected = by_microbatch(model, batch())
        assert not output.requires_grad
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
        made = piped._runner.builder  # values are dropped right behind their last reader
        assert made.last_plan is not None


def test_a_model_whose_first_call_has_tensors_made_for_inference_is_cut_all_the_same():
    model, reference = mlp(3).to(DTYPE), mlp(3).to(DTYPE)
    reference.load_state_dict(model.state_dict())
    with roundpipe.compile(model, devices=["cpu"] * 2, fallback=False) as piped:
        with torch.inference_mode():
            x = batch()  # as a loader makes it in Lightning's evaluations; no version of it is counted
            torch.testing.assert_close(piped(x), reference(x), rtol=0, atol=1e-10)
        piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
        assert piped.trace_count == 1 and len(piped.partition_table().splitlines()) > 5
    by_microbatch(reference, batch()).square().sum().backward()
    assert_same(gradients(model), gradients(reference))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_after_a_first_call_without_grad(mode):
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), *mlp(3)).to(DTYPE)
    reference = copy.deepcopy(model)
    with mode():
        by_microbatch(reference, batch())
    for _ in range(2):
        square_loss(by_microbatch(reference, batch()), None).backward()
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.1)
        with mode():
            piped(batch(), roundpipe_run_config=config(3))
        for _ in range(2):
            piped.forward_backward((batch(),), loss_fn=square_loss, run_config=config(3))
        piped.synchronize()
        assert_same(gradients(model), gradients(reference))
        assert_same(buffers(model), buffers(reference))
        piped.step(optimizer.step, is_async=False)
    assert not any(p.is_inference() for p in model.parameters())


def test_requires_grad_of_the_config_holds_over_the_callers_mode():
    model = mlp()
    with roundpipe.RoundPipe(model) as piped:
        output = piped(batch(), roundpipe_run_config=config(2, requires_grad=False))
        assert not output.requires_grad


def test_frozen_models_give_outputs_without_graph_unless_inputs_need_it():
    model = mlp().requires_grad_(False)
    reference = copy.deepcopy(model)
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        assert not piped(batch()).requires_grad
        given, expected = batch().requires_grad_(), batch().requires_grad_()
        piped(given).square().sum().backward()
        reference(expected).square().sum().backward()
    torch.testing.assert_close(given.grad, expected.grad, rtol=0, atol=1e-10)


@grains
@workers
def test_several_outputs_of_which_some_get_gradients(workers, grain):
    linears = [nn.Linear(6, 6) for _ in range(3)]
    model = chain(
        ["x"],
        [
            (linears[0], ["x"], ["a"]),
            (Do(lambda a: (a.tanh(), a.argmax(-1))), ["a"], ["b", "index"]),
            (linears[1], ["b"], ["c"]),
            (linears[2], ["c"], ["d"]),
        ],
        ["d", "b", "index", "x"],
        build=lambda d, b, index, x: {"d": d, "b": (b, x), "index": index, "name": "n"},
    )
    reference = copy.deepcopy(model)
    given, expected_given = batch().requires_grad_(), batch().requires_grad_()
    expected = reference.run(expected_given)
    (expected["b"][0].sum() + expected["b"][1].square().sum()).backward()
    with roundpipe.RoundPipe(model, devices=["cpu"] * workers) as piped:
        output = piped(given, roundpipe_run_config=config(3, grain))
        assert torch.equal(output["index"], expected["index"]) and output["name"] == "n"
        assert not output["index"].requires_grad
        (output["b"][0].sum() + output["b"][1].square().sum()).backward()
    found, wanted = gradients(model), gradients(reference)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():  # layers behind the last output with a gradient may get zeros
        if value is None:
            assert found[name] is None or not found[name].any()
            found[name] = None
    assert_same(found, wanted)
    torch.testing.assert_close(given.grad, expected_given.grad, rtol=0, atol=1e-10)


@grains
def test_buffers_and_dropout_of_forward_and_backward(grain):
    def build():
        torch.manual_seed(2)
        return nn.Sequential(
            nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6), nn.BatchNorm1d(6)
        ).to(DTYPE)

    rounds = []
    for as_one in (True, False):
        model = build()
        with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
            torch.manual_seed(9)
            run = config(3, grain)
            if as_one:
                piped.forward_backward((batch(),), loss_fn=square_loss, run_config=run)
            else:
                square_loss(piped(batch(), roundpipe_run_config=run), None).backward()
        rounds.append((gradients(model), buffers(model)))
    assert_same(rounds[0][0], rounds[1][0])
    assert_equal_bits(rounds[0][1], rounds[1][1])


@workers
def test_packed_outputs_feed_another_model(workers):
    """Neither merged nor synchronised in between, in forward and in backward."""
    one, other = mlp(), mlp()
    references = copy.deepcopy(one), copy.deepcopy(other)
    given, expected_given = batch().requires_grad_(), batch().requires_grad_()
    expected = references[1](references[0](expected_given))
    expected.square().sum().backward()
    with (
        roundpipe.RoundPipe(one, devices=["cpu"] * workers) as first,
        roundpipe.RoundPipe(other, devices=["cpu"] * 2) as second,
    ):
        packed = first(given, roundpipe_run_config=config(3, merge_output=False))
        assert isinstance(packed, roundpipe.RoundPipePackedData) and len(packed) == 3
        output = second(packed, roundpipe_run_config=config(3))
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
        output.square().sum().backward()
        for model, reference in zip((one, other), references, strict=True):
            assert_same(gradients(model), gradients(reference))
            model.zero_grad()
            reference.zero_grad()
        torch.testing.assert_close(given.grad, expected_given.grad, rtol=0, atol=1e-10)

        given.grad = expected_given.grad = None
        references[1](references[0](expected_given)).square().sum().backward()
        packed = first(given, roundpipe_run_config=config(3, merge_output=False))
        second.forward_backward((packed,), loss_fn=square_loss, run_config=config(3))
        for model, reference in zip((one, other), references, strict=True):
            assert_same(gradients(model), gradients(reference))
        torch.testing.assert_close(given.grad, expected_given.grad, rtol=0, atol=1e-10)


def test_packed_data_can_be_synchronised_and_used():
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as piped, torch.no_grad():
        packed = piped(batch(), roundpipe_run_config=config(3, merge_output=False))
        packed.synchronize()
        torch.testing.assert_close(torch.cat(list(packed)), piped(batch()), rtol=0, atol=1e-10)


def test_an_exception_in_backward_comes_through_the_callers_graph():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("in backward")

    model = nn.Sequential(*mlp(2), Do(Fails.apply), *mlp(2))
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as piped:
        with pytest.raises(ArithmeticError, match="in backward"):
            piped(batch()).sum().backward()
        with torch.no_grad():
            assert torch.isfinite(piped(batch())).all()


def test_hooks_of_the_callers_graph_run():
    seen = []
    with roundpipe.RoundPipe(mlp(), devices=["cpu"] * 2) as piped:
        given = batch().requires_grad_()
        output = piped(given)
        output.register_hook(lambda gradient: seen.append("output"))
        given.register_hook(lambda gradient: seen.append("input"))
        gradient = torch.autograd.grad(output.sum(), given)[0]
    assert seen == ["output", "input"] and gradient.shape == given.shape
