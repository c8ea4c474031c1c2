"""What of the weights stays on the device when `generate` is over, for the next one, and that it is never stale."""

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.models import assert_same
from tests.wrappers.cases_generate import VOCAB, limited, llama, uploaded_bytes, weight_bytes

transformers = pytest.importorskip("transformers")


def device_bytes(piped):
    return piped._session.engine.backends[0].ledger.total_bytes  # what is in use between calls is shown nowhere else


def written_in_place(model, reference):
    with torch.no_grad():
        for each in (model, reference):
            each.model.layers[1].mlp.up_proj.weight.mul_(-3)


def written_through_data(model, reference):
    for each in (model, reference):
        each.model.layers[1].mlp.up_proj.weight.data *= -3


def loaded(model, reference):
    torch.manual_seed(7)
    state = {name: torch.randn_like(value) for name, value in reference.state_dict().items()}
    for each in (model, reference):
        each.load_state_dict(state)


def replaced(model, reference):
    for each in (model, reference):
        layer = each.model.layers[1].mlp.up_proj
        layer.weight = nn.Parameter(layer.weight.detach() * -3)


def given_other_memory(model, reference):
    for each in (model, reference):
        layer = each.model.layers[1].mlp.up_proj
        layer.weight.data = layer.weight.detach() * -3


def frozen(model, reference):
    for each in (model, reference):
        each.model.layers[1].requires_grad_(False)


@pytest.mark.parametrize(
    "change", [written_in_place, written_through_data, loaded, replaced, given_other_memory, frozen]
)
def test_weights_stay_for_the_next_call_until_they_are_written(change):
    model, reference = llama(3), llama(3)
    tokens = torch.randint(3, VOCAB, (2, 6))
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        moved = [uploaded_bytes(piped)]
        for turn in range(4):
            if turn == 2:
                change(model, reference)
            expected = reference.generate(tokens, max_new_tokens=6 + turn, min_new_tokens=6)
            assert torch.equal(piped.generate(tokens, max_new_tokens=6 + turn, min_new_tokens=6), expected), turn
            moved.append(uploaded_bytes(piped))
        first, second, third, fourth = (b - a for a, b in zip(moved, moved[1:], strict=False))
        assert first >= weight_bytes(model)
        assert max(second, fourth) < weight_bytes(model) // 20  # norms, and what is small
        assert second < third


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_and_calls_between_are_seen_and_have_all_the_memory(is_async):
    model, reference = llama(2), llama(2)
    tokens = torch.randint(3, VOCAB, (4, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    with roundpipe.compile(model, devices=[limited(12 * weight_bytes(model))]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.5)
        plain = torch.optim.SGD(reference.parameters(), lr=0.5)
        for _ in range(3):
            piped.forward_backward((), batch, loss_fn=lambda out, _: out.loss, loss_reduction="mean")
            reference(**batch).loss.backward()
            assert torch.equal(piped.generate(tokens, max_new_tokens=5), reference.generate(tokens, max_new_tokens=5))
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
            plain.step()
            plain.zero_grad()
            for _ in range(2):  # no call of the model between the step and these
                expected = reference.generate(tokens, max_new_tokens=5)
                assert torch.equal(piped.generate(tokens, max_new_tokens=5), expected)
            assert device_bytes(piped) > weight_bytes(model) // 2
            with torch.no_grad():
                assert_same({"": piped(tokens).logits}, {"": reference(tokens).logits})
            piped.synchronize()
        piped.generate(tokens, max_new_tokens=5)
        piped.close()
        assert device_bytes(piped) == 0


def test_what_stays_is_a_quarter_of_the_budget_at_most():
    model = llama(6)
    budget, tokens = 1.5 * weight_bytes(model), torch.randint(3, VOCAB, (2, 6))
    with roundpipe.compile(model, devices=[limited(budget)]) as piped:
        moved = [uploaded_bytes(piped)]
        for _ in range(3):
            expected = model.generate(tokens, max_new_tokens=2, min_new_tokens=2)
            assert torch.equal(piped.generate(tokens, max_new_tokens=2, min_new_tokens=2), expected)
            assert weight_bytes(model) // 8 < device_bytes(piped) <= budget / 4
            moved.append(uploaded_bytes(piped))
        first, *later = (b - a for a, b in zip(moved, moved[1:], strict=False))
        assert all(first - number >= weight_bytes(model) // 8 for number in later)
        with pytest.raises(IndexError):
            piped.generate(tokens + VOCAB, max_new_tokens=1)
        assert device_bytes(piped) == 0
        assert torch.equal(piped.generate(tokens, max_new_tokens=2, min_new_tokens=2), expected)
        assert piped.peak_device_bytes() <= budget


class Speech(nn.Module):
    """An encoder that is read once, and a decoder that is read for each of the steps."""

    def __init__(self, num_layers=12):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(32, 32) for _ in range(num_layers)])
        self.decoder = nn.ModuleList([nn.Linear(32, 32) for _ in range(num_layers)])

    def forward(self, x):
        for layer in self.encoder:
            x = layer(x)
        return x

    def generate(self, x, steps, after):
        x = self(x)[-1:]
        for _ in range(steps):
            for layer in self.decoder:
                x = layer(x).tanh()
            after()
        return x


@pytest.mark.parametrize("num_rows", [2, 200])
def test_a_prompt_that_is_read_once_leaves_its_room_to_weights(num_rows):
    torch.manual_seed(0)
    model, x, moved = Speech().double(), torch.randn(num_rows, 32).double(), []
    budget = 0.7 * weight_bytes(model) + 4 * x.nbytes
    with torch.no_grad():
        expected = model.generate(x, 20, lambda: None)
    with roundpipe.compile(model, devices=[limited(budget)]) as piped:
        found = piped.generate(x, 20, lambda: moved.append(uploaded_bytes(piped)))
        assert_same({"": found}, {"": expected})
        assert moved[-1] == moved[14] > moved[0]  # half of the weights have room once the prompt is forgotten
        assert piped.peak_device_bytes() <= budget
