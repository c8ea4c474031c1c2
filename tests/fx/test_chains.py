"""Whole models, traced, cut and generated: equal to eager at several sizes, and cut where they should be."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.core.layers import LayerChain
from roundpipe.fx.graph.traced import lint
from roundpipe.fx.passes.codegen import generate
from roundpipe.fx.passes.cost import measure
from roundpipe.fx.passes.partition import partition
from roundpipe.fx.trace.tracer import trace
from tests.fx.layerwise import assert_equals_eager, total
from tests.repeats import repeats

transformers = pytest.importorskip("transformers")

Inputs = Callable[[int, int], dict[str, torch.Tensor]]
SIZES = ((4, 16), (2, 24), (1, 16))
NUM_BLOCKS = 4


def compiled(model: nn.Module, inputs: dict[str, Any], **options: Any) -> LayerChain:
    traced = trace(model, (), inputs)
    lint(traced)
    costs = measure(traced)
    return generate(traced, partition(traced, costs, **options), costs)


def text(batch: int, length: int, masked: bool = False, **more: Any) -> dict[str, Any]:
    ids = torch.randint(5, 100, (batch, length))
    mask = torch.ones_like(ids)
    if masked:
        mask[-1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids, **more}


def decoder_text(batch: int, length: int) -> dict[str, Any]:
    return text(batch, length, use_cache=False)


def pictures(batch: int, length: int) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(batch, 3, 16, 16, dtype=torch.float64),
        "labels": torch.randint(0, 3, (batch,)),
    }


def small(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        **more,
    }


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small(num_key_value_heads=2)))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=NUM_BLOCKS, n_head=4, vocab_size=100, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = small(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**config))


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=NUM_BLOCKS, num_heads=4, vocab_size=100, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = small(image_size=16, patch_size=4, num_labels=3)
    config = {key: value for key, value in config.items() if key not in ("vocab_size", "max_position_embeddings")}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config))


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **small(num_key_value_heads=2), head_dim=8, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=1,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("eager")  # grouped matmul kernels don't know float64
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs, int, str]] = {
    "llama": (llama, decoder_text, NUM_BLOCKS, r"model\.layers\.\d+"),
    "gpt2": (gpt2, decoder_text, NUM_BLOCKS, r"transformer\.h\.\d+"),
    "bert": (bert, text, NUM_BLOCKS, r"bert\.encoder\.layer\.\d+"),
    "t5": (t5, decoder_text, 2 * NUM_BLOCKS, r"(?:en|de)coder\.block\.\d+"),
    "vit": (vit, pictures, NUM_BLOCKS, r"vit\.(?:encoder\.layer|layers)\.\d+"),
    "qwen3_moe": (qwen3_moe, decoder_text, NUM_BLOCKS, r"model\.layers\.\d+"),
}


@cache
def make(name: str) -> tuple[nn.Module, LayerChain, Inputs]:
    build, inputs, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = build().double()
    return model, compiled(model, inputs(4, 16)), inputs


@pytest.fixture(scope="module", params=repeats(MODELS, set(MODELS) - {"qwen3_moe", "bert", "t5", "vit"}))
def case(request: pytest.FixtureRequest) -> tuple[str, nn.Module, LayerChain, Inputs]:
    return request.param, *make(request.param)


@pytest.mark.parametrize("size", SIZES)
def test_equals_eager(case: tuple[str, nn.Module, LayerChain, Inputs], size: tuple[int, int]) -> None:
    _, model, chain, inputs = case
    assert_equals_eager(model, chain, loss_of=lambda outputs: outputs.loss, **inputs(*size))


def test_every_block_has_a_layer_of_its_own(case: tuple[str, nn.Module, LayerChain, Inputs]) -> None:
    name, _, chain, _ = case
    _, _, num_blocks, pattern = MODELS[name]
    assert len(chain) >= num_blocks
    blocks_of = [set(re.findall(pattern, " ".join(spec.module_names))) for spec in chain.specs]
    assert max(map(len, blocks_of)) == 1
    assert len(set().union(*blocks_of)) == num_blocks


def made_between(chain: LayerChain) -> list[set[str]]:
    """For each cut, the values that layers made and that are read behind it."""
    cuts = []
    for cut in range(1, len(chain)):
        made = {name for spec in chain.specs[:cut] for name in spec.makes}
        read = {name for spec in chain.specs[cut:] for name in spec.reads} | set(chain.exit.reads)
        cuts.append(made & read)
    return cuts


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_one_hidden_tensor_between_blocks(name: str) -> None:
    _, chain, _ = make(name)
    assert [len(names) for names in made_between(chain)] == [1] * (len(chain) - 1)


def test_encoder_output_and_position_biases_are_carried_once() -> None:
    _, chain, _ = make("t5")
    decoder = [spec for spec in chain.specs if spec.module_names[0].startswith("decoder.block")]
    cross = [spec for spec in decoder if spec.module_names[0].endswith("layer.1")]
    assert len(cross) == NUM_BLOCKS
    made = {name for spec in chain.specs for name in spec.makes}
    shared = set.intersection(*(set(spec.reads) for spec in cross[1:])) & made
    assert len(shared) == 2  # the encoder's output, and the first block's position bias
    later = [spec for spec in decoder if not spec.module_names[0].startswith("decoder.block.0")]
    assert [len(spec.makes) for spec in later] == [1] * len(later)


def test_padding_masks_are_not_carried() -> None:
    torch.manual_seed(0)
    model = llama().double()
    inputs = text(4, 16, masked=True, use_cache=False)
    chain = compiled(model, inputs)
    num_masked = 0 if transformers.__version__ >= "5" else len(chain) - 3  # masks of 4.57 are, up to the last attention
    assert [len(names) for names in made_between(chain)] == [2] * num_masked + [1] * (len(chain) - 1 - num_masked)
    assert_equals_eager(model, chain, loss_of=lambda out: out.loss, **text(2, 20, masked=True, use_cache=False))


def test_dropout_is_marked_and_recomputed() -> None:
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64)
    ).double()
    chain = compiled(model, decoder_text(4, 16))
    assert any(spec.draws_random for spec in chain.specs)
    assert_equals_eager(model, chain, loss_of=lambda out: out.loss, **decoder_text(3, 8))
    model.eval()
    assert not any(spec.draws_random for spec in compiled(model, decoder_text(4, 16)).specs)


def test_deepcopy_of_a_chain_is_independent() -> None:
    torch.manual_seed(0)
    model, inputs = gpt2().double(), decoder_text
    chain = compiled(model, inputs(4, 16))
    clone = copy.deepcopy(chain)
    batch = inputs(2, 16)
    want = chain.run(**batch).loss
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(clone.run(**batch).loss, want)


def test_balance_by_size_and_by_function() -> None:
    torch.manual_seed(0)
    model = llama().double()
    by_size = compiled(model, decoder_text(4, 16), balance="size")
    costs = by_size.costs
    assert all(c.forward_s == pytest.approx(c.weight_bytes / 1e12) for c in costs)
    by_function = compiled(model, decoder_text(4, 16), balance=lambda module: 1.0)
    assert {c.backward_s / c.forward_s for c in by_function.costs} == {2.0}


def test_sizes_that_depend_on_data() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x[x > 0]

    torch.manual_seed(0)
    model = Model().double()
    chain = compiled(model, {"x": torch.randn(4, 6, dtype=torch.float64)})
    assert len(chain) >= 3
    assert_equals_eager(model, chain, torch.randn(3, 6, dtype=torch.float64))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layer_1 = nn.Sequential(Residual(8), Residual(8))
        self.down = nn.Conv2d(8, 16, 2, stride=2)
        self.layer_2 = nn.Sequential(Residual(16), Residual(16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer_2(self.down(self.layer_1(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        widths = [4 * 2**level for level in range(depth + 1)]
        self.inward = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(widths, widths[1:], strict=False))
        self.up = nn.ModuleList(
            nn.Conv2d(a + b, b, 3, padding=1) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=False)
        )
        self.outward = nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        x = self.inward(x)
        for layer in self.down:
            skips.append(x)
            x = F.gelu(layer(F.avg_pool2d(x, 2)))
        for layer in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = F.gelu(layer(torch.cat([x, skips.pop()], 1)))
        return self.outward(x)


class SharedTwice(nn.Module):
    """A shared block with BatchNorm, several outputs, an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.shared = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        auxiliary = x.new_zeros(())
        states = []
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + x
            auxiliary = auxiliary + x.square().mean()
            if index in (0, 2):
                x = self.shared(x)
                states.append(x)
        return {"x": x, "auxiliary": auxiliary, "states": tuple(states), "nothing": None, "name": "shared"}


class InPlace(nn.Module):
    """Views written in place, aliases read later, a detached branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            y = layer(x)
            left = y[:, :3]
            left *= 2
            y[:, 3:] += 1
            x = y + x
        return x, x.detach() * 2


PLAIN: dict[str, tuple[type[nn.Module], tuple[int, ...], int]] = {
    "resnet": (ResNet, (3, 8, 8), 4),
    "unet": (UNet, (3, 16, 16), 3),
    "shared": (SharedTwice, (6,), 3),
    "in_place": (InPlace, (6,), 3),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models_equal_eager(name: str) -> None:
    build, shape, least_layers = PLAIN[name]
    torch.manual_seed(0)
    model = build().double()
    chain = compiled(model, {"x": torch.randn(4, *shape, dtype=torch.float64)})
    assert len(chain) >= least_layers
    for batch in (4, 6, 3):
        x = torch.randn(batch, *shape, dtype=torch.float64, requires_grad=True)
        before = x.detach().clone()
        assert_equals_eager(model, chain, x, loss_of=total)
        assert torch.equal(x, before)
