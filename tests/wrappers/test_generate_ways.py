"""`generate` of models and in ways of many kinds: what the plain model gives, with room for all weights or for some."""

import pytest
import torch

import roundpipe
from roundpipe.runtime.device.cpu import CpuBackend
from tests.wrappers.cases_generate import VOCAB, limited, llama, prompt, weight_bytes

transformers = pytest.importorskip("transformers")


def sizes(**more):
    return {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4} | more


def causal(name, **options):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(vocab_size=VOCAB, pad_token_id=0, **options)).double().eval()


def mistral():
    return causal("MistralForCausalLM", **sizes(num_key_value_heads=2, sliding_window=4))


def mixtral():
    return causal("MixtralForCausalLM", **sizes(num_key_value_heads=2, num_local_experts=4)).float()


def gpt2():
    return causal("GPT2LMHeadModel", n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)


def mamba():
    return causal("MambaForCausalLM", hidden_size=32, num_hidden_layers=3, state_size=4, bos_token_id=1, eos_token_id=2)


def lora():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(3), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return model.double().eval()


def half():
    return llama(3).bfloat16()


def bart():
    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2}
    layers = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}
    config = transformers.BartConfig(vocab_size=VOCAB, max_position_embeddings=64, **tokens, **layers, **heads)
    return transformers.BartForConditionalGeneration(config).double().eval()


@pytest.mark.parametrize("share", [None, 0.6])
@pytest.mark.parametrize("build", [mistral, mixtral, gpt2, mamba, lora, half, bart])
def test_models_of_many_kinds(build, share):
    model, options = build(), prompt() | {"max_new_tokens": 7, "min_new_tokens": 7}
    total, room = weight_bytes(model), {mamba: 600_000, gpt2: 400_000}.get(build, 300_000)
    budget = None if share is None else max(share * total, 4 * max(p.nbytes for p in model.parameters())) + room
    ways = {"greedy": {}, "sampled": {"do_sample": True, "top_k": 20, "num_return_sequences": 2}}
    if build is not mamba:  # whose state is not reordered
        ways["beams"] = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    with roundpipe.compile(model, devices=["cpu" if budget is None else limited(budget)]) as piped:
        for way, more in ways.items():
            torch.manual_seed(3)
            expected = model.generate(**options, **more)
            torch.manual_seed(3)
            assert torch.equal(piped.generate(**options, **more), expected), way
        assert budget is None or piped.peak_device_bytes() <= budget


class Listener:
    """Keeps what a streamer is given."""

    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.tokens.append("end")


@pytest.mark.parametrize("share", [None, 0.7])
def test_assistants_streamers_and_criteria(share):
    model, assistant = llama(4), llama(1)
    tokens = torch.randint(3, VOCAB, (1, 6))
    budget = share and share * weight_bytes(model) + 300_000
    ways = [
        {"assistant_model": assistant},
        {"prompt_lookup_num_tokens": 3},
        {"stopping_criteria": [lambda ids, _: torch.full((len(ids),), ids.shape[1] >= 15)]},
        {"logits_processor": [lambda ids, scores: scores - 9.0 * torch.nn.functional.one_hot(ids[:, -1], VOCAB)]},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [7, 8]]},
        {"prefill_chunk_size": 4},
    ]
    with roundpipe.compile(model, devices=["cpu" if budget is None else limited(budget)]) as piped:
        for more in ways:
            expected = model.generate(tokens, max_new_tokens=16, do_sample=False, **more)
            assert torch.equal(piped.generate(tokens, max_new_tokens=16, do_sample=False, **more), expected), more
        heard = Listener(), Listener()
        model.generate(tokens, max_new_tokens=5, streamer=heard[0])
        piped.generate(tokens, max_new_tokens=5, streamer=heard[1])
        assert heard[1].tokens == heard[0].tokens and heard[1].tokens[-1] == "end"


def test_an_assistant_that_is_wrapped_too():
    model, assistant = llama(4), llama(1)
    tokens = torch.randint(3, VOCAB, (1, 6))
    with roundpipe.compile(model, devices=["cpu"]) as piped, roundpipe.compile(assistant, devices=["cpu"]) as helping:
        found = piped.generate(tokens, max_new_tokens=16, assistant_model=helping)
        assert torch.equal(found, model.generate(tokens, max_new_tokens=16))


def test_the_device_begins_after_what_the_caller_s_stream_makes(monkeypatch):
    order = []
    upload = CpuBackend.upload
    monkeypatch.setattr(CpuBackend, "follow_caller", lambda self: order.append("follow"))
    monkeypatch.setattr(CpuBackend, "upload", lambda self, *each: order.append("upload") or upload(self, *each))
    with roundpipe.compile(llama(1), devices=["cpu"]) as piped:
        piped.generate(torch.randint(3, VOCAB, (1, 6)), max_new_tokens=2)
        assert order[0] == "follow" and "upload" in order
        del order[:]
        with piped.streamed():
            assert order[0] == "follow"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_arguments_that_a_card_is_still_making():
    model = llama(2)
    tokens = torch.randint(3, VOCAB, (2, 6))
    with roundpipe.compile(model, devices=["cuda:0"]) as piped:
        expected = piped.generate(tokens, max_new_tokens=5)
        late = torch.zeros_like(tokens, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        late += tokens.to("cuda", non_blocking=True)
        assert torch.equal(piped.generate(late, max_new_tokens=5), expected)


def test_what_is_said_where_the_code_takes_more_than_the_device_has():
    model = llama(2)
    with roundpipe.compile(model, devices=[limited(0.7 * weight_bytes(model))]) as piped:
        tokens = torch.randint(3, VOCAB, (40, 60))
        with pytest.raises(roundpipe.DeviceMemoryError, match="fewer or shorter prompts") as caught:
            piped.generate(tokens, max_new_tokens=5)
        assert "microbatches" not in str(caught.value)  # there are none
        options = {"max_new_tokens": 2, "min_new_tokens": 2}
        assert torch.equal(piped.generate(tokens[:1, :4], **options), model.generate(tokens[:1, :4], **options))


@pytest.mark.parametrize("share", [None, 0.7])
def test_many_tokens_and_calls_of_other_lengths(share):
    model = llama(3, max_position_embeddings=512)
    budget = share and share * weight_bytes(model) + 1_500_000
    with roundpipe.compile(model, devices=["cpu" if budget is None else limited(budget)]) as piped:
        for batch, length, new in ((1, 5, 300), (4, 40, 3), (2, 9, 1), (3, 70, 20)):
            tokens = torch.randint(3, VOCAB, (batch, length))
            options = {"max_new_tokens": new, "min_new_tokens": new}
            assert torch.equal(piped.generate(tokens, **options), model.generate(tokens, **options)), length
        assert budget is None or piped.peak_device_bytes() <= budget


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_whatever_grad_mode_the_caller_has(mode):
    model, tokens = llama(2), torch.randint(3, VOCAB, (2, 6))
    with roundpipe.compile(model, devices=["cpu"]) as piped:
        for _ in range(2):
            with mode():
                expected = model.generate(tokens, max_new_tokens=5)
                found = piped.generate(tokens, max_new_tokens=5)
            assert torch.equal(found, expected)
            assert torch.equal(piped.generate(tokens, max_new_tokens=5), expected)
        piped.forward_backward((tokens,), loss_fn=lambda outputs, _: outputs.logits.sum())
        assert all(parameter.grad is not None for parameter in model.parameters())
