"""Losses that run as a part of the last layer, against eager: which do, which don't, and that the numbers agree."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import RoundPipeRunConfig
from tests.repeats import repeats
from tests.wrappers.cases_tails import (
    NUM_MICROBATCHES,
    TILED,
    VOCABULARY,
    WIDTH,
    Language,
    Pair,
    cross_entropy,
    language,
    runs,
    tokens,
)

__all__ = ["runs"]

WEIGHTS = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)
CRITERION = nn.CrossEntropyLoss(label_smoothing=0.1)
TEACHER = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
TEMPERATURE = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))


def flat(outputs: Any) -> torch.Tensor:
    return outputs["logits"].float().double().view(-1, VOCABULARY)


def sliced(outputs: Any, label: Any) -> torch.Tensor:
    logits = outputs["logits"][..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, VOCABULARY), label[..., 1:].contiguous().view(-1))


def padded(outputs: Any, label: Any) -> torch.Tensor:
    label = F.pad(label, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(outputs["logits"].view(-1, VOCABULARY), label.view(-1).to(outputs["logits"].device))


def with_padding_tokens(outputs: Any, label: Any) -> torch.Tensor:
    label = label.masked_fill(label < 9, 3)
    return F.cross_entropy(outputs["logits"].flatten(0, 1), label.flatten(), ignore_index=3)


def z_loss(outputs: Any, label: Any) -> torch.Tensor:
    z = outputs["logits"].logsumexp(-1)
    return cross_entropy(outputs, label) + 1e-2 * z.square().mean()


def masked(outputs: Any, label: Any) -> torch.Tensor:
    each = F.cross_entropy(flat(outputs), label.view(-1), reduction="none")
    mask = (label.view(-1) != 4).double()
    return (each * mask).sum() / mask.sum()


def distilled(outputs: Any, label: Any) -> torch.Tensor:
    with torch.no_grad():
        target = TEACHER(outputs["hidden"]).softmax(-1)
    return F.kl_div(outputs["logits"].log_softmax(-1), target, reduction="batchmean")


def weighted(outputs: Any, label: Any) -> torch.Tensor:
    return cross_entropy(outputs, label) / roundpipe.num_microbatches()


LOSSES: dict[str, Any] = {
    "flat": lambda outputs, label: F.cross_entropy(flat(outputs), label.view(-1)),
    "sliced": sliced,
    "padded": padded,
    "ignored": with_padding_tokens,
    "smoothed": lambda outputs, label: F.cross_entropy(flat(outputs), label.view(-1), label_smoothing=0.2),
    "z": z_loss,
    "classes": lambda outputs, label: F.cross_entropy(flat(outputs), label.view(-1), WEIGHTS),
    "criterion": lambda outputs, label: CRITERION(flat(outputs), label.view(-1)),
    "masked": masked,
    "two": lambda outputs, label: [cross_entropy(outputs, label), outputs["hidden"].square().mean()],
    "partial": functools.partial(lambda scale, outputs, label: scale * cross_entropy(outputs, label), 0.3),
    "teacher": distilled,
    "temperature": lambda outputs, label: cross_entropy(outputs, label) * TEMPERATURE,
}


@pytest.mark.parametrize("name", repeats(LOSSES, ("sliced", "z", "two", "teacher")))
def test_a_loss_is_a_part_of_the_last_layer(name: str, runs: Counter[str]) -> None:
    TEMPERATURE.grad = None
    with Pair(language()) as pair:
        for seed in range(2):
            pair.step(LOSSES[name], tokens(), tokens(seed=seed), 1e-9)
        assert pair.trace_count == 1
    assert runs["tail"] == runs["tiled in tail"] == 2 * NUM_MICROBATCHES


def test_trainable_tensors_of_a_loss_get_their_gradients() -> None:
    TEMPERATURE.grad = None
    with Pair(language()) as pair:
        pair.step(LOSSES["temperature"], tokens(), tokens(seed=2), 1e-9)
    assert TEMPERATURE.grad is not None
    # half of it is eager's
    half: Any = sum(cross_entropy(pair.reference(ids), label) for ids, label in zip(*map(parts, (0, 2)), strict=True))
    assert abs(float(TEMPERATURE.grad - 2 * half.detach())) < 1e-9


def parts(seed: int) -> Any:
    return torch.tensor_split(tokens() if not seed else tokens(seed=seed), NUM_MICROBATCHES)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype, runs: Counter[str]) -> None:
    def loss_fn(outputs: Any, label: Any) -> torch.Tensor:
        return F.cross_entropy(outputs["logits"].float().view(-1, VOCABULARY), label.view(-1))

    with Pair(language(dtype)) as pair:
        pair.step(loss_fn, tokens(), tokens(seed=2), 1e-5 if dtype is torch.float32 else 2e-2)
    assert runs["tail"] == NUM_MICROBATCHES


@pytest.mark.long
def test_autocast_is_that_of_the_call(runs: Counter[str]) -> None:
    def loss_fn(outputs: Any, label: Any) -> torch.Tensor:
        return F.cross_entropy(outputs["logits"].float().view(-1, VOCABULARY), label.view(-1))

    with Pair(language(torch.float32)) as pair:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pair.step(loss_fn, tokens(), tokens(seed=2), 2e-2)
        pair.step(loss_fn, tokens(), tokens(seed=2), 2e-2)
        assert pair.trace_count == 2
    assert runs["tail"] == 2 * NUM_MICROBATCHES


@pytest.mark.long
def test_a_dict_as_label_with_plain_values(runs: Counter[str]) -> None:
    def loss_fn(outputs: Any, label: Any) -> torch.Tensor:
        return cross_entropy(outputs, label["ids"]) + outputs["logits"].sub(label["shift"]).square().mean()

    label = {"ids": tokens(seed=2), "shift": torch.randn(5, 1, 1, dtype=torch.float64)}
    with Pair(language()) as pair:
        pair.step(loss_fn, tokens(), label, 1e-9)
    assert runs["tail"] == NUM_MICROBATCHES


def test_a_module_as_loss(runs: Counter[str]) -> None:
    class Logits(nn.Sequential):
        pass

    torch.manual_seed(0)
    model = Logits(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)).double()
    with Pair(model) as pair:
        pair.step(nn.CrossEntropyLoss(), torch.randn(6, 4).double(), torch.randint(0, 5, (6,)), 1e-9)
    assert runs["tail"] == NUM_MICROBATCHES


@pytest.mark.long
def test_the_number_of_microbatches_is_guarded(runs: Counter[str]) -> None:
    with Pair(language()) as pair:
        for number in (2, 3, 2):
            pair.config = RoundPipeRunConfig(num_microbatch=number, tiles=3)
            expected = functools.partial(lambda number, *args: cross_entropy(*args) / number, number)
            pair.step(weighted, tokens(), tokens(seed=2), 1e-9, expected)
    assert runs["tail"] == 7


@pytest.mark.long
def test_sizes_may_vary_between_calls_and_microbatches(runs: Counter[str]) -> None:
    with Pair(language()) as pair:
        for length, batch in ((7, 5), (7, 4), (4, 4), (9, 3), (7, 5), (2, 2)):
            pair.step(padded, tokens(length, batch), tokens(length, batch, seed=2), 1e-9)
        assert pair.trace_count <= 4
    assert runs["tail"] == 6 * NUM_MICROBATCHES


@pytest.mark.long
def test_train_and_eval(runs: Counter[str]) -> None:
    model = language()
    model.blocks.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)))
    with Pair(model.double()) as pair:
        for mode in (True, False, True):
            pair.pipe.train(mode)
            pair.reference.train(mode)
            pair.step(padded, tokens(), tokens(seed=2), 1e-9)
    assert runs["tail"] == 3 * NUM_MICROBATCHES


def test_a_loss_made_anew_for_each_call_is_traced_once(runs: Counter[str]) -> None:
    def make(scale: float) -> Any:
        return lambda outputs, label: scale * cross_entropy(outputs, label)

    with Pair(language()) as pair:
        for _ in range(3):
            pair.step(make(0.5), tokens(), tokens(seed=2), 1e-9)
        assert pair.trace_count == 1
        pair.step(make(0.25), tokens(), tokens(seed=2), 1e-9)
        assert pair.trace_count == 2
        pair.step(make(0.5), tokens(), tokens(seed=2), 1e-9)
        assert pair.trace_count == 2
    assert runs["tail"] == 5 * NUM_MICROBATCHES


@pytest.mark.long
def test_what_a_loss_reads_may_change_between_calls(runs: Counter[str]) -> None:
    scale, weights = 1.0, torch.ones(VOCABULARY, dtype=torch.float64)
    options = {"smoothing": 0.0}

    def loss_fn(outputs: Any, label: Any) -> torch.Tensor:
        smoothing = options["smoothing"]
        return scale * F.cross_entropy(flat(outputs), label.view(-1), weights, label_smoothing=smoothing)

    with Pair(language()) as pair:
        pair.step(loss_fn, tokens(), tokens(seed=2), 1e-9)
        scale = 0.5
        pair.step(loss_fn, tokens(), tokens(seed=2), 1e-9)
        options["smoothing"] = 0.3
        pair.step(loss_fn, tokens(), tokens(seed=2), 1e-9)
        weights = WEIGHTS
        pair.step(loss_fn, tokens(), tokens(seed=2), 1e-9)
        weights.mul_(1.5)  # the same tensor
        pair.step(loss_fn, tokens(), tokens(seed=2), 1e-9)
        weights.div_(1.5)
        assert pair.trace_count == 4
    assert runs["tail"] == 5 * NUM_MICROBATCHES


@pytest.mark.long
def test_a_decision_by_the_label(runs: Counter[str]) -> None:
    def loss_fn(outputs: Any, label: Any) -> torch.Tensor:
        return cross_entropy(outputs, label) * (2.0 if bool((label == 3).any()) else 1.0)

    with Pair(language()) as pair:
        for label in (torch.full((5, 7), 3), torch.full((5, 7), 4)):
            pair.step(loss_fn, tokens(), label, 1e-9)
        label = torch.full((5, 7), 4)
        label[0] = 3
        pair.step(loss_fn, tokens(), label, 1e-9)  # the microbatches differ: no tail
    assert runs["tail"] == 2 * NUM_MICROBATCHES


def test_none_where_nobody_wants_tiles(runs: Counter[str]) -> None:
    with Pair(language(), RoundPipeRunConfig(num_microbatch=2)) as pair:
        pair.step(padded, tokens(), tokens(seed=2), 1e-9)
        assert pair.trace_count == 0
    with Pair(language()) as pair:
        _, outputs = pair.pipe.forward_backward(
            (tokens(),), label=tokens(seed=2), loss_fn=padded, return_outputs=True, run_config=TILED
        )
        assert outputs["logits"].shape == (5, 7, VOCABULARY)
    assert not runs


def test_hooks_fire(runs: Counter[str]) -> None:
    seen: list[str] = []
    model = language()
    model.head.register_forward_hook(lambda module, args, result: seen.append("forward"))
    model.head.register_full_backward_hook(lambda module, gradients, results: seen.append("backward"))
    config = RoundPipeRunConfig(num_microbatch=2, tiles=3)
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        pipe.forward_backward((tokens(),), label=tokens(seed=2), loss_fn=padded, run_config=config)
    assert seen == ["forward", "backward"] * 2 and runs["tail"] == 2


@pytest.mark.long
def test_a_model_that_computes_its_own_loss(runs: Counter[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    model = LlamaForCausalLM(config).double()
    ids = tokens()
    own: dict[str, Any] = {"input_kwargs": {"input_ids": ids, "labels": ids}}
    with Pair(model) as pair:
        found = pair.pipe.forward_backward(**own, loss_fn=lambda outputs, _: outputs.loss, run_config=TILED)
        losses = [pair.reference(input_ids=piece, labels=piece).loss for piece in torch.tensor_split(ids, 2)]
        torch.autograd.backward(losses)
        assert abs(float(found - sum(losses).detach())) < 1e-9
        named = {"input_kwargs": {"input_ids": ids}, "label": ids}
        pair.pipe.forward_backward(
            **named,
            loss_fn=lambda outputs, label: F.cross_entropy(
                outputs.logits.float().view(-1, pair.pipe.config.vocab_size), label.view(-1)
            ),
            run_config=TILED,
        )
    assert runs["tail"] == 4


def test_an_example_cut_out_of_longer_tensors(runs: Counter[str]) -> None:
    class WithLoss(Language):
        def forward(self, ids: torch.Tensor, label: torch.Tensor) -> Any:  # type: ignore[override]
            assert ids.shape[0] == 1
            outputs = super().forward(ids)
            return {"loss": cross_entropy(outputs, label)}

    torch.manual_seed(0)
    ids = tokens(batch=2)
    with roundpipe.compile(WithLoss(), example_args=(ids[:1, :5], ids[:1, :5]), devices=["cpu"]) as pipe:
        pipe.forward_backward((ids, ids), loss_fn=lambda outputs, _: outputs["loss"], run_config=TILED)
    assert runs["tail"] == 2


# ---------------------------------------------------------------------------------- losses that stay as they are


def test_losses_with_side_effects_run_as_they_are(
    runs: Counter[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls, history, log = 0, [], logging.getLogger("a loss")

    def counting(outputs: Any, label: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(outputs, label)

    def adding(outputs: Any, label: Any) -> torch.Tensor:
        loss = cross_entropy(outputs, label)
        history.append(loss.detach() + len(history))
        return loss

    def formatting(outputs: Any, label: Any) -> torch.Tensor:
        loss = cross_entropy(outputs, label)
        history.append(f"{loss.item():.2f}")
        return loss

    def printing(outputs: Any, label: Any) -> torch.Tensor:
        print("a loss is computed")
        return cross_entropy(outputs, label)

    def logging_(outputs: Any, label: Any) -> torch.Tensor:
        log.warning("computed")
        return cross_entropy(outputs, label)

    with Pair(language()) as pair, caplog.at_level(logging.INFO):
        for loss_fn in (counting, adding, formatting, printing, logging_):
            for _ in range(2):
                pair.step(loss_fn, tokens(), tokens(seed=2), 1e-9)
        untraced = [record.message for record in caplog.records if "runs as it is" in record.message]
        assert len(untraced) == 5 and "calls" in untraced[0] and "print" in untraced[3]
        computed = [record for record in caplog.records if record.name == "a loss"]
    assert calls == len(computed) == 2 * NUM_MICROBATCHES * 2  # eager's are half
    assert len(history) == 2 * calls and all(isinstance(entry, (str, torch.Tensor)) for entry in history)
    assert capsys.readouterr().out.count("a loss is computed") == calls
    assert not runs


def test_losses_that_write_outputs_draw_or_scale_run_as_they_are(runs: Counter[str]) -> None:
    scaler = roundpipe.GradScaler(init_scale=8.0)
    torchs = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Pair(language()) as pair:
        pair.step(lambda outputs, label: scaler.scale(cross_entropy(outputs, label)), tokens(), tokens(seed=2), 1e-9)
        for _ in range(2):
            loss_fn = lambda outputs, label: torchs.scale(cross_entropy(outputs, label))  # noqa: E731
            pair.step(loss_fn, tokens(), tokens(seed=2), 1e-9)
            torchs.scale(torch.zeros(()))
            torchs.update(16.0)
        in_place = lambda outputs, label: cross_entropy({"logits": outputs["logits"].div_(3.0)}, label)  # noqa: E731
        pair.step(in_place, tokens(), tokens(seed=2), 1e-9)
        config = RoundPipeRunConfig(num_microbatch=1, tiles=3)
        dropped = pair.pipe.forward_backward(
            (tokens(),), loss_fn=lambda outputs, label: F.dropout(outputs["logits"]).sum(), run_config=config
        )
        assert dropped.isfinite()
    assert not runs


def test_an_error_of_the_loss_says_so(runs: Counter[str]) -> None:
    label = tokens(seed=2)
    label[0, 1] = VOCABULARY
    with Pair(language()) as pair:
        with pytest.raises(IndexError, match="out of bounds") as caught:
            pair.pipe.forward_backward((tokens(),), label=label, loss_fn=padded, run_config=TILED)
        assert any("microbatch 0, phase loss_fn" in note for note in caught.value.__notes__)
        pair.pipe.zero_grad()
        pair.step(padded, tokens(), tokens(seed=2), 1e-9)
    assert runs["tail"] == 1 + NUM_MICROBATCHES


def test_an_error_of_the_last_layer_says_so(runs: Counter[str]) -> None:
    def fail(module: nn.Module, args: Any) -> None:
        raise KeyError("mine")

    model = language()
    handle = model.head.register_forward_pre_hook(fail)
    with roundpipe.compile(model, devices=["cpu"]) as pipe:
        with pytest.raises(KeyError) as caught:
            pipe.forward_backward((tokens(),), label=tokens(seed=2), loss_fn=padded, run_config=TILED)
        assert any("module head" in note and "phase forward" in note for note in caught.value.__notes__)
    handle.remove()
