"""`torch.compile` around, inside and before a wrapper; generation and adapters after training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ConfigError
from tests.equality import assert_same_gradients
from tests.repeats import repeats
from tests.wrappers.cases_forwarding import DEVICES, Model, assert_trains_like, inputs, made


def test_torch_compile_of_the_original() -> None:
    model, pipe = made("compiled")
    with pipe, torch.no_grad():
        pipe.eval()
        x = inputs()
        fast = torch.compile(model, backend="eager")
        torch.testing.assert_close(fast(x), pipe(x))
        with pytest.raises(ConfigError, match="before it is wrapped"):
            pipe.compile()
        torch.testing.assert_close(model(x), pipe(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", repeats(["eager", "aot_eager"], ["aot_eager"]))
def test_torch_compile_of_the_wrapper_runs_it_as_it_is(backend: str) -> None:
    """Called by itself, and in the middle of a compiled function."""
    model, pipe = made("compiled")
    reference = copy.deepcopy(model).eval()
    with pipe.eval():
        x = inputs()
        fast = torch.compile(pipe, backend=backend)

        @torch.compile(backend=backend)
        def function(x: torch.Tensor) -> torch.Tensor:
            return (pipe(2 * x) - 1).sin()

        torch.testing.assert_close(fast(x), reference(x))
        torch.testing.assert_close(fast(x[:3]), reference(x[:3]))
        torch.testing.assert_close(function(x), (reference(2 * x) - 1).sin())
        (fast(x) ** 2).sum().backward()
        function(x).sum().backward()
        pipe.synchronize()
        (reference(x) ** 2).sum().backward()
        (reference(2 * x) - 1).sin().sum().backward()
        assert_same_gradients(model, reference, 1e-10)
        torch.testing.assert_close(pipe(x), reference(x))
    torch._dynamo.reset()


def test_torch_compile_of_a_wrapper_in_parts() -> None:
    model, x = Model().double().eval(), inputs()
    reference = copy.deepcopy(model)
    with roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=False, devices=DEVICES) as pipe:
        torch.testing.assert_close(torch.compile(pipe, backend="eager")(x), reference(x))
    torch._dynamo.reset()


def test_modules_compiled_before_are_wrapped() -> None:
    model = Model().double()
    reference = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(backend="eager")
    with roundpipe.compile(model, example_args=(inputs(),), devices=DEVICES) as pipe:
        assert_trains_like(pipe, reference, steps=1)
    torch._dynamo.reset()


def test_a_model_compiled_by_torch_is_wrapped() -> None:
    model = Model().double().eval()
    fast = torch.compile(model, backend="eager")
    x = inputs()
    with roundpipe.compile(fast, example_args=(x,), devices=DEVICES) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(x), model(x))
    torch._dynamo.reset()


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def language_loss(outputs: Any, label: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), label[:, 1:].flatten())


def trained(pipe: Any, ids: torch.Tensor, steps: int = 6, lr: float = 0.5) -> None:
    optimizer = torch.optim.SGD(pipe.optim_parameters(), lr=lr)
    for _ in range(steps):
        pipe.forward_backward(input_kwargs={"input_ids": ids, "use_cache": False}, label=ids, loss_fn=language_loss)
        pipe.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    pipe.synchronize()


def test_generate_after_synchronize_is_the_trained_models() -> None:
    model = tiny_llama()
    ids = torch.arange(1, 25).reshape(1, 24).repeat(4, 1)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with roundpipe.compile(model, devices=DEVICES) as pipe:
        untrained = pipe.generate(ids[:1, :4], **options)
        trained(pipe, ids, steps=25)
        pipe.eval()
        found = pipe.generate(ids[:1, :4], **options)
        assert torch.equal(found, copy.deepcopy(model).generate(ids[:1, :4], **options))
        assert not torch.equal(found, untrained)
        assert pipe.config is model.config and pipe.device.type == "cpu" and pipe.dtype is torch.float32
        assert pipe.num_parameters() == sum(one.numel() for one in model.parameters())
        pipe.train()
        trained(pipe, ids, steps=1)  # and training goes on


def test_adapters_are_merged_after_synchronize() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_llama()
    plain = copy.deepcopy(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    ids = torch.randint(1, 64, (4, 8))
    with roundpipe.compile(model, devices=DEVICES) as pipe:
        trained(pipe, ids, steps=3)
        pipe.eval()
        with torch.no_grad():
            expected = pipe(input_ids=ids, use_cache=False).logits
            assert not torch.allclose(expected, plain(input_ids=ids).logits, atol=1e-4)
        assert pipe.peft_config is model.peft_config
        assert pipe.get_nb_trainable_parameters() == model.get_nb_trainable_parameters()
        generated = pipe.generate(input_ids=ids[:1], max_new_tokens=2, do_sample=False)
        assert generated.shape == (1, 10)
    merged = model.merge_and_unload()
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
