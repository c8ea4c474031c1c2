"""The calls that the public documents show, made as they are shown there and held to what the text around them says.

Order: microbatch splitting, model interface, run configuration, training loop. Everything on CPU workers.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig

DTYPE = torch.float64
DEVICES = ["cpu", "cpu"]


class Classifier(nn.Sequential):
    """Pictures `[B, 3, 8, 8]` to scores of ten classes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32), nn.GELU(), nn.Linear(32, 10)
        )


def sequential(dtype: torch.dtype = DTYPE) -> nn.Sequential:
    return nn.Sequential(*Classifier().children()).to(dtype)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(12, 3, 8, 8, dtype=DTYPE)


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(10, (12,))


@pytest.fixture
def sizes() -> Iterator[list[int]]:
    """Batch sizes that the models of this file saw, in the order of microbatches."""
    Seen.sizes = []
    yield Seen.sizes


class Seen(nn.Module):
    """Takes several arguments and notes what came in."""

    sizes: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=DTYPE)

    def forward(self, x: Any, scale: Any = 1.0, **more: Any) -> Any:
        self.sizes.append(x.shape[0])
        x = self.inner(x) * scale
        for value in more.values():
            x = x + value
        return x


def one_after_the_other(model: nn.Module, **options: Any) -> RoundPipe:
    """One worker, so that microbatches run in their order."""
    return RoundPipe(model, devices=["cpu"], **options)


# Microbatch splitting


def test_twelve_pictures_in_four_microbatches(images: torch.Tensor) -> None:
    shapes = []

    def loss(outputs: torch.Tensor, given: Any) -> torch.Tensor:
        shapes.append(tuple(given.shape))
        return outputs.sum()

    config = RoundPipeRunConfig(num_microbatch=4)
    with one_after_the_other(sequential()) as model:
        model.forward_backward(input_args=(images,), label=images, loss_fn=loss, run_config=config)
    assert shapes == [(3, 3, 8, 8)] * 4


def test_split_spec_with_a_replicated_argument(sizes: list[int]) -> None:
    module, x, scale = Seen(), torch.randn(6, 4, dtype=DTYPE), torch.arange(1.0, 5.0, dtype=DTYPE)
    expected = module(x, scale)
    sizes.clear()
    config = RoundPipeRunConfig(split_input=((TensorChunkSpec(0), _Replicate), None), num_microbatch=3)
    with one_after_the_other(module) as model, torch.no_grad():
        found = model(x, scale, roundpipe_run_config=config)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert sizes == [2, 2, 2]


def test_split_spec_along_another_dimension(sizes: list[int]) -> None:
    class Positions(Seen):
        def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + positions.transpose(0, 1)

    module = Positions()
    tokens, positions = torch.randn(6, 4, dtype=DTYPE), torch.randn(4, 6, dtype=DTYPE)
    expected = module(tokens, positions)
    config = RoundPipeRunConfig(split_input=((TensorChunkSpec(0), TensorChunkSpec(1)), None), num_microbatch=2)
    with one_after_the_other(module) as model, torch.no_grad():
        torch.testing.assert_close(model(tokens, positions, roundpipe_run_config=config), expected, rtol=0, atol=1e-12)


def test_split_functions(sizes: list[int]) -> None:
    module, x, mask = Seen(), torch.randn(6, 4, dtype=DTYPE), torch.randn(6, 4, dtype=DTYPE)
    expected = module(x, mask), module(x, mask=mask)

    def by_position(args: Any, kwargs: Any, num_microbatch: int) -> Any:
        pieces = zip(*(one.chunk(num_microbatch) for one in args), strict=True)
        return list(pieces), [kwargs] * num_microbatch

    def by_name(args: Any, kwargs: Any, num_microbatch: int) -> Any:
        pieces = {name: value.chunk(num_microbatch) for name, value in kwargs.items()}
        named = [{name: chunks[index] for name, chunks in pieces.items()} for index in range(num_microbatch)]
        return [()] * num_microbatch, named

    with one_after_the_other(module, model_run_config=RoundPipeRunConfig(num_microbatch=3)) as model, torch.no_grad():
        sizes.clear()
        found = model(x, mask, roundpipe_run_config=RoundPipeRunConfig(split_input=by_position))
        torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-12)
        assert sizes == [2, 2, 2]
        found = model(x=x, mask=mask, roundpipe_run_config=RoundPipeRunConfig(split_input=by_name))
        torch.testing.assert_close(found, expected[1], rtol=0, atol=1e-12)


def chunked_labels(label: Any, num_microbatch: int) -> list[Any]:
    targets, weights = label
    return list(zip(targets.chunk(num_microbatch), weights.chunk(num_microbatch), strict=True))


@pytest.mark.parametrize(
    "split_label", [(TensorChunkSpec(0), TensorChunkSpec(0)), chunked_labels, None], ids=["spec", "function", "auto"]
)
def test_labels_are_split_beside_the_inputs(images: torch.Tensor, labels: torch.Tensor, split_label: Any) -> None:
    weights = torch.rand(12, dtype=DTYPE)

    def weighted(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        targets, share = label
        return (nn.functional.cross_entropy(outputs, targets, reduction="none") * share).sum()

    net = sequential()
    expected = weighted(net(images), (labels, weights))
    config = RoundPipeRunConfig(split_label=split_label, num_microbatch=3)
    with RoundPipe(net, devices=DEVICES) as model:
        loss = model.forward_backward((images,), label=(labels, weights), loss_fn=weighted, run_config=config)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)


def test_class_weights_are_replicated(images: torch.Tensor, labels: torch.Tensor) -> None:
    class_weights = torch.rand(10, dtype=DTYPE)

    def weighted(outputs: torch.Tensor, label: Any) -> torch.Tensor:
        targets, weights = label
        return nn.functional.cross_entropy(outputs, targets, weights, reduction="sum")

    net = sequential()
    expected = weighted(net(images), (labels, class_weights))
    config = RoundPipeRunConfig(split_label=(TensorChunkSpec(0), _Replicate), num_microbatch=4)
    with RoundPipe(net, devices=DEVICES) as model:
        loss = model.forward_backward((images,), label=(labels, class_weights), loss_fn=weighted, run_config=config)
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-10)


@dataclass
class Outputs:
    """What Hugging Face models return, in short."""

    logits: torch.Tensor
    hidden_states: torch.Tensor


class Heads(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(4, 4, dtype=DTYPE)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inner(x)
        return {
            "pair": lambda: (hidden * 2, hidden),
            "loss": lambda: hidden.square().sum(),
            "object": lambda: Outputs(hidden * 2, hidden),
            "mixed": lambda: {"hidden": hidden, "mean": hidden.mean(), "kind": "mixed"},
        }[self.kind]()


MERGES: dict[str, tuple[str, Any, Any]] = {
    "specs": ("pair", (TensorChunkSpec(0), TensorChunkSpec(0)), lambda whole: whole),
    "reducer": ("loss", _CustomReducer(torch.tensor(0.0, dtype=DTYPE), lambda x, y: x + y), lambda whole: whole),
    "function": ("object", lambda outputs: torch.cat([one.logits for one in outputs]), lambda whole: whole.logits),
    "auto": ("mixed", None, lambda whole: whole),
    "true": ("mixed", True, lambda whole: whole),
}


@pytest.mark.parametrize("name", list(MERGES))
def test_outputs_are_merged(name: str) -> None:
    kind, merge_output, of_whole = MERGES[name]
    net, x = Heads(kind), torch.randn(6, 4, dtype=DTYPE)
    expected = of_whole(net(x))
    config = RoundPipeRunConfig(merge_output=merge_output, num_microbatch=3)
    with RoundPipe(net, devices=DEVICES) as model, torch.no_grad():
        found = model(x, roundpipe_run_config=config)
    if kind == "mixed":
        assert found.pop("kind") == expected.pop("kind")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, check_device=True)


def test_unmerged_outputs_feed_another_model(images: torch.Tensor) -> None:
    front, back = sequential()[:4], sequential()[4:]
    expected = back(front(images)).detach()
    config = RoundPipeRunConfig(merge_output=False)
    with RoundPipe(front, devices=DEVICES) as first, RoundPipe(back, devices=DEVICES) as second, torch.no_grad():
        output = first(images, roundpipe_run_config=config)
        assert isinstance(output, roundpipe.RoundPipePackedData) and isinstance(output, list)
        torch.testing.assert_close(second(output), expected, rtol=0, atol=1e-12)
        output.synchronize()
        assert torch.equal(torch.cat(list(output)), front(images))


# Model interface


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


# Run configuration


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


# Training loop


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
