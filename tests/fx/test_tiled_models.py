"""Models of transformers in tiles, beside the same layers run whole, in float64 but for the loss, which they upcast."""

import pytest
import torch

from roundpipe.core import trees
from tests.fx.inputs import Case, causal_inputs
from tests.fx.models import _MOE, _TEXT, CASES, _transformers  # the settings of the models there
from tests.fx.test_tiles import chain_of, leaves_of, regions_of, train

SMALL = {**_TEXT, "num_hidden_layers": 2, "use_cache": False}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "llama": _transformers("LlamaConfig", "LlamaForCausalLM", **GROUPED),
    "qwen3": _transformers("Qwen3Config", "Qwen3ForCausalLM", **GROUPED),
    "gemma2": _transformers("Gemma2Config", "Gemma2ForCausalLM", **GROUPED),
    "phi": _transformers("PhiConfig", "PhiForCausalLM", **SMALL),
    "gpt2": CASES["gpt2_tied"].build,
}


def largest_difference(build, inputs, number):
    torch.manual_seed(0)
    model = build().double().eval()  # dropout draws otherwise in tiles
    inputs = trees.map_tensors(inputs, lambda t: t.double() if t.is_floating_point() else t)
    chain = chain_of(model, **inputs)
    whole = train(chain, model, 1, **inputs)
    tiled = train(chain, model, number, **inputs)
    assert all((a is None) == (b is None) for a, b in zip(whole, tiled, strict=True))
    pairs = [(a, b) for a, b in zip(whole, tiled, strict=True) if a is not None]
    return chain, max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) for a, b in pairs)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_causal_models(name):
    torch.manual_seed(1)
    chain, difference = largest_difference(MODELS[name], causal_inputs(3, 9), 5)
    assert difference < 1e-6
    inside = [target for region in regions_of(chain) for target in region]
    assert any("lm_head" in target for target in inside)
    paths = [path for leaf in leaves_of(chain) for path in leaf]
    assert any("mlp" in target for target in (*inside, *paths))


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "t5", "vit"])
def test_other_models(name):
    case: Case = CASES[name]
    torch.manual_seed(1)
    chain, difference = largest_difference(case.build, case.inputs(3, case.lengths[0]), 5)
    assert difference < 1e-6 and regions_of(chain)


def test_routing_to_experts_is_no_region():
    options = {key: value for key, value in _MOE.items() if key not in ("num_experts", "moe_intermediate_size")}
    options |= {"num_hidden_layers": 2, "num_local_experts": 4}
    build = _transformers("MixtralConfig", "MixtralForCausalLM", **options)
    torch.manual_seed(1)
    model, inputs = build(), causal_inputs(3, 9)
    chain = chain_of(model, **inputs)
    whole, tiled = (train(chain, model, number, **inputs) for number in (1, 5))
    for a, b in zip(whole, tiled, strict=True):
        assert a is b or (a - b).abs().max() <= 1e-5 * a.abs().max().clamp(min=1)
    assert not any("experts" in target for region in regions_of(chain) for target in region)
