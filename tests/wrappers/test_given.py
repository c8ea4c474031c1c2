"""What a foreign training loop needs of a wrapper: its own microbatches, optimizer, and look at the model."""

import inspect

import pytest
import torch

import roundpipe
from tests.runtime.models import batch, mlp, square_loss


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = mlp(3)
    plain = mlp(3)
    plain.load_state_dict(model.state_dict())
    with roundpipe.RoundPipe(model, devices=["cpu"] * 2) as pipe:
        yield pipe, plain


def test_microbatches_of_different_sizes_are_given_as_a_list(pair):
    pipe, plain = pair
    pieces, labels = [batch(seed=1)[:1], batch(seed=2), batch(seed=3)[:2]], [torch.tensor(each) for each in (1, 2, 3)]
    expected = sum(label * square_loss(plain(piece), None) for piece, label in zip(pieces, labels, strict=True))
    expected.backward()
    arguments = {
        "input_args": [(piece,) for piece in pieces],
        "input_kwargs": [{}] * 3,
        "label": labels,
        "loss_fn": lambda outputs, label: label * square_loss(outputs, None),
    }
    torch.testing.assert_close(pipe.forward_loss(**arguments), expected.detach())
    loss, outputs = pipe.forward_backward(**arguments, return_outputs=True)
    torch.testing.assert_close((loss, outputs.shape[0]), (expected.detach(), sum(map(len, pieces))))
    pipe.synchronize()
    for one, other in zip(pipe.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert pipe.report().num_samples == 2 * sum(map(len, pieces))
    for wrong, message in (
        ({"label": labels[:2]}, "label is 2 items; give a list of 3"),
        ({"input_args": pieces[0][0]}, "input_args is Tensor; give a list of 3"),
        ({"input_kwargs": []}, "a list of 0 microbatches"),
    ):
        with pytest.raises(roundpipe.ConfigError, match=message):
            pipe.forward_backward(**{**arguments, **wrong})


def test_an_optimizer_of_the_parameters_is_adopted(pair):
    """With its groups and the moments that it has; the copies are what it steps from then on."""
    pipe, plain = pair
    made = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in (pipe.model, plain)]
    for number in range(3):
        square_loss(plain(batch(seed=number)), None).backward()
        made[1].step()
        made[1].zero_grad()
        pipe.forward_backward((batch(seed=number),), loss_fn=square_loss)
        if number == 0:  # its first step is on the model's own parameters
            made[0].step()
            pipe.adopt(made[0])
            assert made[0].param_groups[0]["params"] == list(pipe.optim_parameters())
        else:
            pipe.step(made[0].step, is_async=False)
        pipe.zero_grad()
    for one, other in zip(pipe.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(roundpipe.ConfigError, match=r"none of the model's trainable parameters"):
        pipe.adopt(made[1])
    with pytest.raises(roundpipe.ConfigError, match=r"adopt\(\) takes a torch.optim.Optimizer, got list"):
        pipe.adopt([])


def test_accelerate_prepares_a_wrapper(pair):
    """Its autocast goes around the wrapper's forward, not around the model's."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils.memory import should_reduce_batch_size

    accelerate.state.AcceleratorState._reset_state(True)  # one for the process, that of whichever test was first
    pipe, plain = pair
    assert inspect.signature(pipe.forward) == inspect.signature(plain.forward)
    before = dict(vars(pipe.model))
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared, _ = accelerator.prepare(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
    assert prepared is pipe and vars(pipe.model) == before
    loss = square_loss(prepared(batch()), None)
    accelerator.backward(loss)
    assert all(parameter.grad is not None for parameter in pipe.model.parameters())
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is pipe
    assert should_reduce_batch_size(roundpipe.DeviceMemoryError("block 3 does not fit"))
    assert not should_reduce_batch_size(roundpipe.ConfigError("block 3 does not fit"))
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("prepared", ["all", "loader"])
def test_a_loop_of_accelerate_trains_as_with_the_plain_model(pair, prepared):
    """Accumulation over two batches and clipping, without a launcher."""
    accelerate = pytest.importorskip("accelerate")
    rows = torch.utils.data.TensorDataset(torch.cat([batch(seed=number) for number in range(4)]))

    def train(model, parameters, whole):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(parameters, lr=0.05)
        loader = accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=len(rows) // 4))
        if whole:
            model, optimizer = accelerator.prepare(model, optimizer)
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(square_loss(model(x), None))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                if whole or accelerator.sync_gradients:
                    optimizer.step()
                    optimizer.zero_grad()
        accelerate.state.AcceleratorState._reset_state(True)

    pipe, plain = pair
    train(pipe, pipe.optim_parameters(), prepared == "all")
    train(plain, plain.parameters(), True)
    for one, other in zip(pipe.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_number_left_to_choice_can_be_asked_for():
    """By integrations that cut batches themselves."""
    used = []

    def loss_fn(y, _):
        used.append(roundpipe.num_microbatches())
        return y.sum()

    net, auto = mlp(3).float(), roundpipe.RoundPipeRunConfig(num_microbatch="auto")
    for config, expected in (
        (roundpipe.RoundPipeRunConfig(), 3),
        (roundpipe.RoundPipeRunConfig(num_microbatch=2), 2),
        (auto, None),
    ):
        with roundpipe.compile(net, devices=["cpu"] * 2, model_run_config=config) as piped:
            x = batch().float()
            assert piped.num_microbatches_for((x,), {}) == (expected or 3)
            for _ in range(2):
                used.clear()
                piped.forward_backward((x,), loss_fn=loss_fn)
            assert set(used) == {piped.num_microbatches_for((x,), {})}
