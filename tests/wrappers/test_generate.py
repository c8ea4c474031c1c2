"""`generate` and `streamed`: the model's own code on a device, its weights brought when they are read."""

import copy

import pytest
import torch
from torch import nn

import roundpipe
from tests.runtime.models import assert_same
from tests.wrappers.cases_generate import VOCAB, limited, llama, prompt, uploaded_bytes, weight_bytes

transformers = pytest.importorskip("transformers")


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB, **sizes)).double().eval()


def addresses(model):
    return [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("build", [llama, t5])
@pytest.mark.parametrize("share", [None, 0.6])
def test_generates_what_the_plain_model_does_within_the_budget(build, share):
    model = build()
    budget = None if share is None else share * weight_bytes(model) + 300_000
    options = prompt() | {"max_new_tokens": 8, "min_new_tokens": 8}
    ways = {"greedy": {}, "sampled": {"do_sample": True}, "beams": {"num_beams": 2}}
    with roundpipe.compile(model, devices=["cpu", "cpu"] if budget is None else [limited(budget)]) as piped:
        before = addresses(model)
        for way, more in ways.items():
            torch.manual_seed(3)
            expected = model.generate(**options, **more)
            torch.manual_seed(3)
            assert torch.equal(piped.generate(**options, **more), expected), way
            if way == "greedy":  # the first call packs the weights, the others find them so
                packed = addresses(model)
        assert before != packed == addresses(model)
        assert piped.trace_count == 0
        assert budget is None or piped.peak_device_bytes() <= budget


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("share", [None, 0.6])
def test_generates_on_a_card_what_the_plain_model_does_there(share):
    model = llama(6, hidden_size=512, intermediate_size=2048)  # 200 MB
    plain, options = copy.deepcopy(model).cuda(), prompt() | {"max_new_tokens": 8, "min_new_tokens": 8}
    on_card = options | {name: options[name].cuda() for name in ("input_ids", "attention_mask")}
    budget = None if share is None else int(share * weight_bytes(model)) + (80 << 20)  # libraries have workspaces
    with roundpipe.compile(model, devices=[roundpipe.Device("cuda:0", memory_bytes=budget)]) as piped:
        for way, more in {"greedy": {}, "sampled": {"do_sample": True}}.items():
            torch.manual_seed(3)
            expected = plain.generate(**on_card, **more).cpu()
            torch.manual_seed(3)
            assert torch.equal(piped.generate(**options, **more).cpu(), expected), way


def test_each_token_brings_no_more_than_what_has_no_room():
    model = llama(6, hidden_size=64, intermediate_size=256)
    total, prefix = weight_bytes(model), prompt()
    moved = {}
    for share in (0.7, 2.0):
        with roundpipe.compile(model, devices=[limited(share * total)]) as piped:
            piped.generate(**prefix, max_new_tokens=12, min_new_tokens=12)
            moved[share] = uploaded_bytes(piped) / total
            assert piped.peak_device_bytes() <= share * total
    assert moved[2.0] < 2.2  # in the first pass, which has the prompt, few weights stay; then all do
    assert moved[0.7] < 9


def test_rich_results_and_callers_caches():
    model, prefix = llama(), prompt()
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_scores": True}
    caches = [transformers.DynamicCache(), transformers.DynamicCache()]
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        for turn in range(2):
            expected = model.generate(**prefix, **options, past_key_values=caches[0])
            results = piped.generate(**prefix, **options, past_key_values=caches[1])
            assert type(results) is type(expected)
            assert torch.equal(results.sequences, expected.sequences), turn
            assert_same(dict(enumerate(results.scores)), dict(enumerate(expected.scores)))
            assert caches[1].get_seq_length() == caches[0].get_seq_length()
            prefix = {"input_ids": expected.sequences}


def test_generates_with_the_latest_weights_between_steps():
    model, reference = llama(1), llama(1)
    tokens = torch.randint(3, VOCAB, (4, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    with roundpipe.compile(model, devices=["cpu", "cpu"]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.5)
        plain = torch.optim.SGD(reference.parameters(), lr=0.5)
        for _ in range(2):
            piped.forward_backward((), batch, loss_fn=lambda out, _: out.loss, loss_reduction="mean")
            piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
            generated = piped.generate(tokens, max_new_tokens=5)
            reference(**batch).loss.backward()
            plain.step()
            plain.zero_grad()
            assert torch.equal(generated, reference.generate(tokens, max_new_tokens=5))
        piped.synchronize()
        assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))


class Odd(nn.Module):
    """Reads weights past the modules that hold them, keeps them in lists, writes buffers, counts its calls."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.memory = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.scales = nn.ParameterList([torch.full((16,), 0.5), torch.full((16,), 2.0)])
        self.bias = nn.Parameter(torch.full((16,), 0.1))
        self.register_buffer("large", torch.randn(100, 100))
        self.register_buffer("sums", torch.zeros(16))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x, _ = self.attention(x, x, x, need_weights=False)
        x = self.encoder(x)
        x, _ = self.memory(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        # held across the read of others
        weights = [self.first.weight, self.second.bias, *self.scales]
        x = nn.functional.linear(self.second(self.first(x)), weights[0] * weights[2], weights[1])
        self.sums += x.sum((0, 1))
        self.large += 1
        total = sum(parameter.sum() for parameter in self.parameters())
        return (x + self.bias) * total + self.large.sum()

    def generate(self, x, steps):
        for _ in range(steps):
            x = torch.cat([x, self(x)[:, -1:]], 1)
        return {"values": x, "grad": torch.is_grad_enabled()}


@pytest.mark.parametrize("budget", [None, 250_000])
@pytest.mark.parametrize("wrap", [roundpipe.compile, roundpipe.RoundPipe, roundpipe.wrap_model_to_roundpipe])
def test_any_code_that_reads_weights_gets_them(wrap, budget):
    torch.manual_seed(0)
    model, x = Odd().double(), torch.randn(2, 3, 16).double()
    model.train().encoder.eval()  # its fast path reads all weights at once
    torch.manual_seed(0)
    reference = Odd().double()
    reference.load_state_dict(model.state_dict())
    reference.train().encoder.eval()
    with torch.no_grad():
        expected = reference.generate(x, 3)
    devices = ["cpu"] if budget is None else [limited(budget)]
    with wrap(model, devices=devices) as piped:
        result = piped.generate(x, steps=3)
        assert_same({"values": result["values"]}, {"values": expected["values"]})
        assert result["grad"] is False
        assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
        assert model.calls == reference.calls
        assert piped.generate.__name__ == "generate"
        assert budget is None or piped.peak_device_bytes() <= budget


def test_loops_of_ones_own_and_what_is_refused():
    model = llama(2)
    tokens = torch.randint(3, VOCAB, (2, 6))
    expected = model.generate(tokens, max_new_tokens=4, do_sample=False)[:, 6:]
    with roundpipe.compile(model, devices=[limited(2 * weight_bytes(model))]) as piped:
        with piped.streamed() as on_device:
            found, cache, step = [], None, tokens
            for _ in range(4):
                outputs = on_device(step, past_key_values=cache, use_cache=True)
                cache, step = outputs.past_key_values, outputs.logits[:, -1:].argmax(-1)
                found.append(step)
            assert torch.equal(torch.cat(found, 1), expected)
            assert on_device.device.type == "cpu" and on_device.num_parameters() == model.num_parameters()
            with pytest.raises(roundpipe.ConfigError, match=r"inside streamed\(\)"):
                piped(tokens)
            with pytest.raises(roundpipe.ConfigError, match=r"inside streamed\(\)"):
                piped.generate(tokens)
        with pytest.raises(IndexError):
            piped.generate(tokens + VOCAB, max_new_tokens=1)
        assert torch.equal(piped.generate(tokens, max_new_tokens=4)[:, 6:], expected)
        piped.forward_backward((tokens,), loss_fn=lambda outputs, _: outputs.logits.sum())
        assert torch.equal(piped.generate(tokens, max_new_tokens=4)[:, 6:], expected)
    assert torch.equal(piped.generate(tokens, max_new_tokens=4)[:, 6:], expected)  # closed: the plain model's
    with roundpipe.compile(nn.Linear(2, 2), devices=["cpu"]) as piped:
        assert not hasattr(piped, "generate")
    with roundpipe.compile(model, devices=[limited(0.05 * weight_bytes(model))]) as piped:
        with pytest.raises(roundpipe.DeviceMemoryError):
            piped.generate(tokens, max_new_tokens=1)
