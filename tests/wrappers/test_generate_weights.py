"""Which weights come and go while a model's own code runs, and what a token costs once none do."""

import pytest
import torch

import roundpipe
from roundpipe.runtime.device.cpu import CpuBackend
from roundpipe.runtime.weights.on_demand import OnDemandWeights
from tests.runtime.models import assert_same
from tests.wrappers.cases_generate import VOCAB, limited, llama, prompt, uploaded_bytes, weight_bytes

transformers = pytest.importorskip("transformers")


def decode(model, tokens, num_tokens, between=lambda: None):
    """Greedy tokens of a loop with a cache."""
    cache, step, found = None, tokens, []
    for _ in range(num_tokens):
        outputs = model(step, past_key_values=cache, use_cache=True)
        cache, step = outputs.past_key_values, outputs.logits[:, -1:].argmax(-1)
        found.append(step)
        between()
    return torch.cat(found, 1)


@pytest.mark.parametrize("share", [None, 4])
def test_weights_that_stay_cost_nothing_per_token(share, monkeypatch):
    model, reads, counts = llama(6), [], []
    read = OnDemandWeights.read
    monkeypatch.setattr(OnDemandWeights, "read", lambda self, *place: reads.append(place) or read(self, *place))
    devices = ["cpu"] if share is None else [limited(share * weight_bytes(model))]
    tokens = torch.randint(3, VOCAB, (2, 6))

    def count():
        counts.append((len(reads), uploaded_bytes(piped)))
        reads.clear()

    with roundpipe.compile(model, devices=devices) as piped, piped.streamed() as on_device:
        assert torch.equal(decode(on_device, tokens, 7, count), decode(model, tokens, 7))
        assert on_device.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()
    assert counts[0][0] > 7 * 6  # the maps of each layer
    assert counts[-1][1] == counts[2][1]
    assert all(number <= (0 if share is None else 1) for number, _ in counts[4:])


def test_what_is_in_use_is_asked_for_once_where_weights_come_and_go(monkeypatch):
    """An allocator takes as long to tell as some operators take to run."""
    model, calls = llama(6), dict.fromkeys(("_enter", "_load", "visit_peak_bytes", "begin_visit"), 0)

    def count(owner, name):
        function = getattr(owner, name)

        def counted(self, *args):
            calls[name] += 1
            return function(self, *args)

        monkeypatch.setattr(owner, name, counted)

    with roundpipe.compile(model, devices=[limited(0.7 * weight_bytes(model))]) as piped:
        tokens = torch.randint(3, VOCAB, (2, 6))
        with piped.streamed() as on_device:
            decode(on_device, tokens, 2)
            for name in calls:
                count(OnDemandWeights if name.startswith("_") else CpuBackend, name)
            found = decode(on_device, tokens, 5)
    assert torch.equal(found, decode(model, tokens, 5))
    assert calls["_load"] > 20
    assert max(calls["visit_peak_bytes"], calls["begin_visit"]) <= calls["_enter"] + 1, calls


def test_weights_give_way_to_what_the_code_makes_later():
    model = llama(6)
    budget, tokens, others = 2 * weight_bytes(model) + 200_000, torch.randint(3, VOCAB, (2, 6)), []
    with roundpipe.compile(model, devices=[limited(budget)]) as piped:
        with piped.streamed() as on_device:
            uploads = []

            def grow():
                uploads.append(uploaded_bytes(piped))
                if len(uploads) > 6:
                    others.append(torch.zeros(budget // 24, dtype=torch.uint8))

            found = decode(on_device, tokens, 22, grow)
            del others[:]
        assert torch.equal(found, decode(model, tokens, 22))
        assert uploads[2] == uploads[7] and uploads[-1] > uploads[-2] > uploads[7]
        assert piped.peak_device_bytes() <= budget


def test_code_that_puts_tensors_where_weights_were():
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    for layer in model:
        layer.register_buffer("counted", torch.zeros(20_000))
    x = torch.randn(2, 64)
    with roundpipe.RoundPipe(model, devices=["cpu"]) as piped:
        with piped.streamed() as on_device:
            for turn in range(4):
                for layer in on_device:
                    x = layer(x)
                    layer.counted.add_(1)
                    if turn == 3 and layer is on_device[2]:
                        layer.counted = torch.full((5,), 7.0)
                    if turn == 3 and layer is on_device[3]:
                        layer.weight = torch.nn.Parameter(torch.zeros(64, 64))
                        assert not layer.weight.any()
        assert piped.model is model and model[3].weight.any()
        expected = {f"{index}.counted": torch.full((20_000,), 4.0) for index in range(8)}
        assert_same(dict(model.named_buffers()), expected | {"2.counted": torch.full((5,), 7.0)})


def test_layers_that_others_replaced_since_the_last_call():
    model, other = llama(3), llama(3, rms_norm_eps=0.1)
    tokens = torch.randint(3, VOCAB, (2, 6))
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        for _ in range(2):
            expected = model.generate(tokens, max_new_tokens=3)
            assert torch.equal(piped.generate(tokens, max_new_tokens=3), expected)
            with torch.no_grad():
                other.model.layers[1].mlp.up_proj.weight.mul_(-3)
            model.model.layers[1] = other.model.layers[1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(ValueError, marks=pytest.mark.long)])
def test_after_an_interrupt_there_is_all_the_memory_and_training_goes_on(error):
    model, reference = llama(2), llama(2)
    tokens = torch.randint(3, VOCAB, (2, 6))
    batch = {"input_ids": tokens, "labels": tokens}

    def interrupt(ids, scores):
        if ids.shape[1] == 6 + 8:
            raise error
        return scores

    with roundpipe.compile(model, devices=[limited(1.5 * weight_bytes(model) + 400_000)]) as piped:
        optimizer = torch.optim.SGD(piped.optim_parameters(), lr=0.5)
        plain = torch.optim.SGD(reference.parameters(), lr=0.5)
        for _ in range(3):  # one's memory left behind would be too much for the next
            with pytest.raises(error):
                piped.generate(tokens, max_new_tokens=12, logits_processor=[interrupt])
        piped.forward_backward((), batch, loss_fn=lambda out, _: out.loss, loss_reduction="mean")
        piped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=True)
        with pytest.raises(error):
            piped.generate(tokens, max_new_tokens=12, logits_processor=[interrupt])
        reference(**batch).loss.backward()
        plain.step()
        expected = reference.generate(tokens, max_new_tokens=12)
        assert torch.equal(piped.generate(tokens, max_new_tokens=12), expected)
        assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))


@pytest.mark.parametrize("share", [None, 0.7])
def test_caches_of_other_kinds(share):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB, head_dim=8, num_key_value_heads=2, sliding_window=4, pad_token_id=0, **sizes
    )
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    model, prefix = transformers.Gemma3ForCausalLM(config).double().eval(), prompt()
    budget = share and share * weight_bytes(model) + 300_000
    with roundpipe.compile(model, devices=["cpu" if budget is None else limited(budget)]) as piped:
        for kind in ("dynamic", "static"):  # both with windows of four tokens
            options = prefix | {"max_new_tokens": 8, "min_new_tokens": 8, "cache_implementation": kind}
            assert torch.equal(piped.generate(**options), model.generate(**options)), kind
