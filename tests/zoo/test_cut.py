"""Where models of transformers are cut, and what is carried over the cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.core.layers import LayerChain
from roundpipe.core.module_tree import weight_bytes_of
from roundpipe.fx.graph.traced import TracedGraph
from roundpipe.fx.passes.codegen import generate
from roundpipe.fx.passes.cost import measure
from roundpipe.fx.passes.partition import partition
from roundpipe.fx.trace.tracer import trace
from tests.repeats import repeats
from tests.zoo.build import build
from tests.zoo.catalog import Row, transformers_rows
from tests.zoo.compare import EXAMPLE
from tests.zoo.cuts import cuts_between_blocks

pytest.importorskip("transformers", reason="the models are those of transformers")


def row(key: str) -> Row:
    return next(row for row in transformers_rows() if row.key == key)


def compiled(
    model: nn.Module, inputs: dict[str, Any], max_leaf_bytes: int | None = None
) -> tuple[TracedGraph, LayerChain]:
    traced = trace(model, (), inputs, max_leaf_bytes=max_leaf_bytes)
    costs = measure(traced)
    return traced, generate(traced, partition(traced, costs), costs)


def carried(traced: TracedGraph, chain: LayerChain, cut: int) -> list[str]:
    """Names of the values made in front of a cut that are read behind it."""
    made = {name for spec in chain.specs[:cut] for name in spec.makes}
    read = {name for spec in chain.specs[cut:] for name in spec.reads} | set(chain.exit.reads)
    return sorted(made & read)


@pytest.mark.parametrize(
    "key",
    repeats(
        [
            "causal-lm/LlamaForCausalLM",
            "causal-lm/Gemma3ForCausalLM",
            "causal-lm/MixtralForCausalLM",
            "masked-lm/BertForMaskedLM",
            "masked-lm/ModernBertForMaskedLM",
            "image-classification/ViTForImageClassification",
        ],
        [
            "causal-lm/Gemma3ForCausalLM",
            "masked-lm/ModernBertForMaskedLM",
            "image-classification/ViTForImageClassification",
        ],
    ),
)
def test_one_hidden_tensor_crosses_from_block_to_block(key: str) -> None:
    """No mask, no rotary table and no second copy of the hidden state, and at least a layer per block."""
    specimen = build(row(key))
    traced, chain = compiled(specimen.model, specimen.inputs_for(EXAMPLE, 1))
    num_blocks, most_carried = cuts_between_blocks(specimen.model, chain)
    assert num_blocks >= 3
    assert len(chain) >= num_blocks
    assert most_carried == 1
    hidden = specimen.model.config.get_text_config().hidden_size
    nodes = {node.name: node for node in traced.graph.nodes}
    for cut in range(1, len(chain)):
        for name in carried(traced, chain, cut):
            value = nodes[name].meta["value"]
            assert value.shape[-1] == hidden or cut == len(chain) - 1, f"{name} crosses cut {cut}"


def test_the_encoder_output_is_carried_once() -> None:
    specimen = build(row("seq2seq-lm/BartForConditionalGeneration"))
    traced, chain = compiled(specimen.model, specimen.inputs_for(EXAMPLE, 1))
    in_decoder = [
        cut
        for cut in range(1, len(chain))
        if "decoder.layers" in chain.specs[cut - 1].module_names[-1]
        and "decoder.layers" in chain.specs[cut].module_names[0]
    ]
    over_cuts = [carried(traced, chain, cut) for cut in in_decoder]
    assert len(over_cuts) >= 2
    assert all(len(names) == 2 for names in over_cuts)  # the decoder's hidden state, and the encoder's output
    assert len(set.intersection(*map(set, over_cuts))) == 1


def llama(**options: Any) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_cache": False,
            **options,
        }
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def test_a_large_embedding_and_a_large_head_are_layers_of_their_own() -> None:
    ids = torch.ones(2, 8, dtype=torch.long)
    _, chain = compiled(llama(vocab_size=4096), {"input_ids": ids, "labels": ids})
    assert chain.specs[0].module_names == ("model.embed_tokens",)
    assert chain.specs[-1].module_names[-1] == "lm_head"
    assert not any("layers" in name for name in chain.specs[-1].module_names)


@pytest.mark.long
def test_blocks_larger_than_the_limit_are_looked_into() -> None:
    """Sixteen equal blocks stay whole unless they are too large; then each is several layers."""
    ids = torch.ones(2, 8, dtype=torch.long)
    model = llama(num_hidden_layers=16)
    block = weight_bytes_of(model.model.layers[0])
    whole, few = compiled(model, {"input_ids": ids, "labels": ids})
    inside, many = compiled(model, {"input_ids": ids, "labels": ids}, max_leaf_bytes=block // 2)

    def largest(traced: TracedGraph) -> int:
        leaves = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
        return max(weight_bytes_of(model.get_submodule(name)) for name in leaves if "layers" in name)

    assert largest(whole) == block
    assert largest(inside) <= block // 2
    assert len(many) > len(few) >= 16
