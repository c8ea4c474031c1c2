"""Where no trace serves a batch of the whole model, modules that read no data are traced, and cut into layers."""

from __future__ import annotations

import contextvars
import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import roundpipe
from roundpipe.wrappers.traced_parts import TracedPart
from tests.equality import assert_same_gradients

WIDTH, NUM_WORDS = 16, 20


class Text(nn.Module):
    """What a test gives as ``decides`` keeps it from being traced."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(6)]
        )
        self.decides = decides

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, use_cache: bool | None = None) -> torch.Tensor:
        hidden = hidden + positions[..., None] / 10
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.decides and hidden.mean() > 100:
            hidden = hidden * 2
        return hidden


class Seeing(nn.Module):
    """Puts rows of images, of which ``sizes`` has the numbers, in front of the words of each sample."""

    def __init__(self, decides: bool = False) -> None:
        super().__init__()
        self.rows, self.words = nn.Linear(WIDTH, WIDTH), nn.Embedding(NUM_WORDS, WIDTH)
        self.text, self.head = Text(decides), nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        images = torch.stack([image.mean(0) for image in torch.split(self.rows(rows), list(map(int, sizes)))])
        hidden = torch.cat([images[:, None], self.words(ids)], 1)
        positions = torch.arange(hidden.shape[1]).expand(len(ids), -1)
        return self.head(self.text(hidden, positions))


def batch_of(length: int, *sizes: int) -> dict[str, torch.Tensor]:
    return {
        "rows": torch.randn(sum(sizes), WIDTH),
        "sizes": torch.tensor(sizes),
        "ids": torch.randint(0, NUM_WORDS, (len(sizes), length)),
    }


BATCHES = [(7, 1, 3), (7, 2, 5), (9, 4, 4), (8, 6, 1), (5, 2, 2), (7, 3, 8)]


def train(model: Seeing, **options: Any) -> tuple[roundpipe.RoundPipe, list[str]]:
    """Steps with other images in each, which give eager's losses and gradients; the wrapper, and what it warned of."""
    reference = copy.deepcopy(model)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
    piped = roundpipe.compile(model, devices=["cpu", "cpu"], model_run_config=config, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in BATCHES:
            batch = batch_of(*each)
            loss = piped.forward_backward(input_kwargs=batch, loss_fn=lambda out, _: out.square().mean())
            expected = reference(**batch).square().mean()
            expected.backward()
            assert_close(loss, expected.detach())
    piped.synchronize()
    assert_same_gradients(model, reference, 1e-5)
    return piped, [str(warning.message) for warning in caught]


def text_part(piped: roundpipe.RoundPipe) -> TracedPart:
    parts = piped._runner.fallback.tree.parts  # which modules are parts is no part of what is public
    (part,) = (part for part in parts if isinstance(part, TracedPart))
    return part


def test_a_module_that_reads_no_data_is_traced_once() -> None:
    torch.manual_seed(0)
    piped, said = train(Seeing())
    with piped:
        part = text_part(piped)
        assert part.name == "text" and part.runner.trace_count == 1, "lengths of hidden states are open from the first"
        assert len(part.runner.last_chain) >= 6
        assert piped.trace_count == 2
        assert sum("where no trace serves a batch" in text for text in said) == 1
        assert not any("runs on the CPU from now on" in text or "nothing overlaps" in text for text in said)


def test_one_that_can_not_be_traced_runs_in_parts_of_its_own() -> None:
    torch.manual_seed(0)
    piped, _ = train(Seeing(decides=True))
    with piped:
        part = text_part(piped)
        assert part.runner.fallback is not None and part.runner.last_chain is None


def test_one_that_is_no_longer_traceable_goes_on_in_parts() -> None:
    torch.manual_seed(0)
    model = Seeing()
    piped, _ = train(model)
    with piped:
        model.text.decides = True
        batch = batch_of(6, 3, 9)
        with torch.no_grad():
            assert_close(piped(**batch), copy.deepcopy(model)(**batch))
        assert text_part(piped).runner.fallback is not None


def test_its_hooks_fire() -> None:
    torch.manual_seed(0)
    model, shapes = Seeing(), []
    piped, _ = train(model)
    with piped:
        model.text.register_forward_hook(lambda _module, _args, out: shapes.append(tuple(out.shape)))
        batch = batch_of(6, 3, 9)
        with torch.no_grad():
            assert_close(piped(**batch), model(**batch))
        assert shapes == [(2, 7, WIDTH)] * 2


def test_options_of_a_traced_part_are_its_own() -> None:
    torch.manual_seed(0)
    model = Seeing()
    own = roundpipe.RoundPipeRunConfig(recompute_grain="stage")
    piped, said = train(model, override_config={model.text: own})
    with piped:
        assert text_part(piped).own_options == own
        assert not any("override_config" in text for text in said)


@pytest.mark.parametrize("skipped", [True, False])
def test_a_skipped_module_stays_on_the_host(skipped: bool) -> None:
    torch.manual_seed(0)
    model = Seeing()
    piped, _ = train(model, skip_modules=[model.text] if skipped else [])
    with piped:
        parts = piped._runner.fallback.tree.parts  # as above
        assert any(isinstance(part, TracedPart) for part in parts) is not skipped


COLLECTED: contextvars.ContextVar[dict[str, list[torch.Tensor]] | None] = contextvars.ContextVar(
    "COLLECTED", default=None
)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            rows = step(rows).relu()
        return rows


class Collecting(nn.Module):
    """Installs hooks in its first forward, which put what layers of a part compute into a context variable's dict."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head, self._is_installed = Encoder(), nn.Linear(WIDTH, NUM_WORDS), False

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        if not self._is_installed:
            self._is_installed = True
            for step in self.encoder.steps:
                step.register_forward_hook(lambda _module, _args, out: COLLECTED.get()["steps"].append(out))
        token = COLLECTED.set({"steps": []})
        try:
            out = self.encoder(rows)
            out = out + sum(COLLECTED.get()["steps"])
        finally:
            COLLECTED.reset(token)
        return self.head(torch.stack([image.mean(0) for image in torch.split(out, list(map(int, sizes)))]))


def test_a_part_in_which_hooks_were_installed_runs_in_parts_of_its_own() -> None:
    torch.manual_seed(0)
    model = Collecting()
    reference = copy.deepcopy(model)
    with roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, devices=["cpu"]) as piped:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "runs on the CPU from now on")
            for step in range(3):
                rows, sizes = torch.randn(7 + step, WIDTH), torch.tensor([3, 4 + step])
                config = roundpipe.RoundPipeRunConfig(num_microbatch=1)
                loss_fn = lambda out, _: out.square().mean()  # noqa: E731
                loss = piped.forward_backward((rows, sizes), loss_fn=loss_fn, run_config=config)
                expected = reference(rows, sizes).square().mean()
                expected.backward()
                assert_close(loss, expected.detach())
        piped.synchronize()
        assert_same_gradients(model, reference, 1e-5)
