"""The documented examples of training: losses, optimizers, wrapping, run options."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from tests.cases_documented_examples import DEVICES, DTYPE, sequential


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(12, 3, 8, 8, dtype=DTYPE)


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(10, (12,))


def reference_forward_backward(
    net: nn.Module, images: torch.Tensor, labels: torch.Tensor, loss_fn: Any, num: int
) -> tuple[Any, torch.Tensor]:
    losses, outputs = [], []
    for image, label in zip(torch.tensor_split(images, num), torch.tensor_split(labels, num), strict=True):
        output = net(image)
        loss = loss_fn(output, label)
        torch.autograd.backward(loss)
        losses.append(loss)
        outputs.append(output)
    return losses, torch.cat(outputs)


@pytest.mark.parametrize("num_microbatch", [1, 3, 5])
def test_forward_backward_is_the_loop_over_microbatches(
    images: torch.Tensor, labels: torch.Tensor, num_microbatch: int
) -> None:
    net = sequential()
    reference = copy.deepcopy(net)
    loss_fn = nn.CrossEntropyLoss()
    losses, outputs = reference_forward_backward(reference, images, labels, loss_fn, num_microbatch)
    with RoundPipe(net, devices=DEVICES) as model:
        found, merged = model.forward_backward(
            input_args=(images,),
            input_kwargs={},
            label=labels,
            loss_fn=loss_fn,
            return_outputs=True,
            run_config=RoundPipeRunConfig(num_microbatch=num_microbatch),
        )
        model.synchronize()
    torch.testing.assert_close(found, sum(losses).detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(merged, outputs.detach(), rtol=0, atol=1e-12)
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_a_sequence_of_losses_gives_a_list_of_sums(images: torch.Tensor, labels: torch.Tensor) -> None:
    def two(outputs: torch.Tensor, label: torch.Tensor) -> list[torch.Tensor]:
        return [nn.functional.cross_entropy(outputs, label, reduction="sum"), outputs.square().sum()]

    net = sequential()
    expected = [loss.detach() for loss in two(net(images), labels)]
    with RoundPipe(net, devices=DEVICES) as model:
        found = model.forward_backward((images,), label=labels, loss_fn=two)
    assert isinstance(found, list) and len(found) == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_optimizer_parameters_have_their_own_dtype_and_the_models_names() -> None:
    net = sequential(torch.float16)
    with RoundPipe(net, optim_dtype=torch.float32, devices=DEVICES) as model:
        named = dict(model.optim_named_parameters(prefix="net"))
        assert list(named) == [f"net.{name}" for name, _ in net.named_parameters()]
        assert {parameter.dtype for parameter in model.optim_parameters()} == {torch.float32}
        assert {parameter.dtype for parameter in net.parameters()} == {torch.float16}


def test_arguments_of_step_reach_the_function(images: torch.Tensor) -> None:
    seen = []
    with RoundPipe(sequential(), devices=DEVICES) as model:
        model.forward_backward((images,), loss_fn=lambda outputs, _: outputs.sum())
        model.step(lambda *args, **kwargs: seen.append((args, kwargs)), True, 1, 2, clip=3)
        model.synchronize()
        model.step(lambda *args, **kwargs: seen.append((args, kwargs)), False, 4)
    assert seen == [((1, 2), {"clip": 3}), ((4,), {})]


def test_the_original_model_answers_for_its_parts() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vocab_size, self.inner = 7, sequential()

    original = Whole()
    with RoundPipe(original.inner, devices=DEVICES) as model:
        with pytest.raises(AttributeError):
            model.vocab_size
        model.set_original_model(original)
        assert model.vocab_size == 7
        model.vocab_size = 8
        assert original.vocab_size == 8
        del model.vocab_size
        assert not hasattr(original, "vocab_size")


@pytest.mark.skipif(not hasattr(roundpipe, "wrap_model_to_roundpipe"), reason="not written yet")
def test_wrapping_any_model(images: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    net = sequential()
    expected = net(images).detach()
    caplog.set_level(logging.INFO)
    model = roundpipe.wrap_model_to_roundpipe(net, use_sequential_preset=False, name="wrapped", devices=DEVICES)
    with model, torch.no_grad():
        assert isinstance(model, RoundPipe)
        torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-12)


def test_a_call_overrides_the_model_for_that_call_alone(images: torch.Tensor, labels: torch.Tensor) -> None:
    counts: list[int | None] = []

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        counts.append(roundpipe.num_microbatches())
        return nn.functional.cross_entropy(outputs, label)

    with RoundPipe(sequential(), model_run_config=RoundPipeRunConfig(num_microbatch=4), devices=DEVICES) as model:
        for config, expected in ((RoundPipeRunConfig(num_microbatch=6), 6), (RoundPipeRunConfig(), 4)):
            counts.clear()
            model.forward_backward(input_args=(images,), label=labels, loss_fn=loss_fn, run_config=config)
            assert counts == [expected] * expected


def test_built_in_number_of_microbatches_is_one_more_than_devices(images: torch.Tensor) -> None:
    counts: list[Any] = []

    def loss_fn(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        counts.append(roundpipe.num_microbatches())
        return outputs.sum()

    for number in (1, 2, 3):
        counts.clear()
        with RoundPipe(sequential(), devices=["cpu"] * number) as model:
            model.forward_backward((images,), loss_fn=loss_fn)
        assert counts == [number + 1] * (number + 1)


def test_the_grain_of_recomputation_changes_no_number(images: torch.Tensor, labels: torch.Tensor) -> None:
    found = []
    for grain in ("stage", "layer"):
        torch.manual_seed(0)
        net = sequential()
        plan = roundpipe.ExecutePlan([(0, 3)], (3, 6), [(0, 3)])
        config = RoundPipeRunConfig(recompute_grain=grain, execute_plan=plan)
        with RoundPipe(net, model_run_config=config, devices=DEVICES) as model:
            loss = model.forward_backward((images,), label=labels, loss_fn=nn.functional.cross_entropy)
            model.synchronize()
        found.append([loss, *(parameter.grad for parameter in net.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)


def test_outputs_are_on_the_cpu_by_default(images: torch.Tensor) -> None:
    with RoundPipe(sequential(), devices=DEVICES) as model, torch.no_grad():
        for config in (
            RoundPipeRunConfig(),
            RoundPipeRunConfig(output_device=None),
            RoundPipeRunConfig(output_device="cpu"),
        ):
            assert model(images, roundpipe_run_config=config).device == torch.device("cpu")


def patterns(model: Any, optimizer: Any, scaler: Any, scheduler: Any) -> dict[str, Any]:
    def plain() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def scaled() -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def clipped() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def scheduled() -> None:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def by_the_models_parameters() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {
        "plain": plain,
        "scaled": scaled,
        "clipped": clipped,
        "scheduled": scheduled,
        "parameters": by_the_models_parameters,
    }


def train_plain(
    net: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]], pattern: str, num: int, make_scaler: Any
) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = make_scaler()
    update = patterns(net, optimizer, scaler, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))[pattern]
    scaled = pattern in ("scaled", "clipped")
    losses = []
    for images, labels in data:
        total = 0.0
        for image, label in zip(torch.tensor_split(images, num), torch.tensor_split(labels, num), strict=True):
            loss = nn.functional.cross_entropy(net(image).float(), label)
            loss = (scaler.scale(loss) if scaled else loss) / num
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        update()
    return losses


@pytest.mark.parametrize("pattern", ["plain", "scaled", "clipped", "scheduled", "parameters"])
@pytest.mark.parametrize("scaler_kind", ["ours", "torch"])
def test_patterns_of_step(pattern: str, scaler_kind: str) -> None:
    """A half-precision-style loop (here float32) with every shape that ``step_fn`` takes in the text."""
    num = 3
    data = [(torch.randn(6, 3, 8, 8), torch.randint(10, (6,))) for _ in range(4)]
    net = sequential(torch.float32)
    reference = copy.deepcopy(net)

    def torch_scaler() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    expected = train_plain(reference, data, pattern, num, torch_scaler)
    scaler = (
        torch_scaler() if scaler_kind == "torch" else roundpipe.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    )
    criterion, scaled = nn.CrossEntropyLoss(), pattern in ("scaled", "clipped")

    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = criterion(outputs.float(), label)
        return (scaler.scale(loss) if scaled else loss) / num

    with RoundPipe(net, devices=DEVICES, model_run_config=RoundPipeRunConfig(num_microbatch=num)) as model:
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1, momentum=0.9)
        update = patterns(model, optimizer, scaler, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))[pattern]
        losses = []
        for images, labels in data:
            losses.append(float(model.forward_backward((images,), label=labels, loss_fn=loss_fn)))
            model.step(update, is_async=False)
        model.synchronize()
    assert losses == pytest.approx(expected, rel=1e-4)
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_evaluation_saving_and_inspection(images: torch.Tensor, labels: torch.Tensor) -> None:
    net = sequential()
    with RoundPipe(net, devices=DEVICES) as model:
        optimizer = torch.optim.Adam(model.optim_parameters(), lr=0.05)

        def step_fn() -> None:
            optimizer.step()
            optimizer.zero_grad()

        losses = []
        for _ in range(15):
            loss = model.forward_backward((images,), label=labels, loss_fn=nn.functional.cross_entropy)
            model.step(step_fn)
            losses.append(float(loss))
        assert losses[-1] < losses[0] / 2, "it learns its twelve pictures"

        model.forward_backward((images,), label=labels, loss_fn=nn.functional.cross_entropy)
        model.synchronize()
        norms = {name: p.grad.norm() for name, p in model.model.named_parameters() if p.grad is not None}
        assert list(norms) == [name for name, _ in net.named_parameters()] and all(norm > 0 for norm in norms.values())
        model.zero_grad()

        model.eval()
        assert not net.training
        with torch.no_grad():
            outputs = model(images)
            again = model.forward(images, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
        assert not outputs.requires_grad
        torch.testing.assert_close(outputs, again, rtol=0, atol=1e-12)
        torch.testing.assert_close(outputs, net(images).detach(), rtol=0, atol=1e-12)
        model.train()
        assert net.training

        file = io.BytesIO()
        torch.save(model.model.state_dict(), file)
        file.seek(0)
        loaded = sequential()
        loaded.load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(loaded(images), outputs, rtol=0, atol=1e-12)

        criterion = nn.CrossEntropyLoss()
        criterion(model(images), labels).backward()
        criterion(loaded(images), labels).backward()
        model.synchronize()
    for ours, theirs in zip(net.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10)
