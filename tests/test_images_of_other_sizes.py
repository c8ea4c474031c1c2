"""Vision-language models of transformers whose images have other sizes in each batch train as in eager mode."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import roundpipe
from tests.equality import assert_same_gradients

transformers = pytest.importorskip("transformers")

VOCABULARY, IMAGE, BREAK = 100, 90, 91
Batch = dict[str, torch.Tensor]


def with_texts(prefixes: list[list[int]], draws: torch.Generator) -> Batch:
    """Images' tokens, each with a text of some length behind it, padded."""
    lengths = torch.randint(4, 9, (len(prefixes),), generator=draws).tolist()
    texts = [torch.randint(5, 80, (length,), generator=draws).tolist() for length in lengths]
    rows = [prefix + text for prefix, text in zip(prefixes, texts, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill((mask == 0) | (ids >= IMAGE), -100)}


def compare(model: nn.Module, batches: list[Batch]) -> tuple[int, list[str]]:
    """Steps with each batch, which give eager's losses and gradients; the number of traces, and what was warned of."""
    model.train()
    reference = copy.deepcopy(model)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=1, loss_reduction="mean")
    with (
        roundpipe.compile(model, devices=["cpu"], model_run_config=config) as piped,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for batch in batches:
            loss = piped.forward_backward(input_kwargs=batch, loss_fn=lambda out, _: out.loss)
            expected = reference(**batch).loss
            expected.backward()
            assert_close(loss, expected.detach())
        piped.synchronize()
        assert_same_gradients(model, reference, 1e-5)
        return piped.trace_count, [str(warning.message) for warning in caught]


def text_config(kind: str, **more: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, num_hidden_layers=2, bos_token_id=1, eos_token_id=2, **sizes, **more
    )


def vision_config(kind: str, **more: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.AutoConfig.for_model(kind, **sizes, **more)


def pixtral() -> nn.Module:
    """A model whose tower cuts images to their sizes."""
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=vision_config("pixtral", image_size=112, patch_size=14),
            text_config=text_config("mistral", head_dim=16),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
    )


def batch_of_pixtral(sizes: list[tuple[int, int]]) -> Batch:
    """Texts with an image each, of these patches along its sides."""
    draws = torch.Generator().manual_seed(sum(map(sum, sizes)))
    most = [14 * max(size[side] for size in sizes) for side in (0, 1)]
    pixels = torch.zeros(len(sizes), 3, *most)
    for image, (height, width) in zip(pixels, sizes, strict=True):
        image[:, : 14 * height, : 14 * width] = torch.randn(3, 14 * height, 14 * width, generator=draws)
    prefixes = [[1] + ([IMAGE] * width + [BREAK]) * height for height, width in sizes]
    return with_texts(prefixes, draws) | {"pixel_values": pixels, "image_sizes": 14 * torch.tensor(sizes)}


def test_a_tower_that_cuts_images_to_their_sizes() -> None:
    batches = [
        batch_of_pixtral(sizes) for sizes in ([(4, 6), (3, 5)], [(4, 5), (2, 3)], [(2, 2), (4, 3)], [(5, 6), (3, 3)])
    ]
    num_traces, said = compare(pixtral(), batches)
    assert num_traces == 2
    assert sum("where no trace serves a batch" in text for text in said) == 1
    assert not any("runs on the CPU from now on" in text for text in said)


def test_a_number_of_images_that_is_checked_with_a_message() -> None:
    torch.manual_seed(0)
    model = transformers.InternVLForConditionalGeneration(
        transformers.InternVLConfig(
            vision_config=vision_config("internvl_vision", image_size=[28, 28], patch_size=[7, 7]),
            text_config=text_config("qwen2"),
            image_token_id=IMAGE,
            image_seq_length=4,
            downsample_ratio=0.5,
        )
    )

    def batch_of(*numbers: int) -> Batch:
        draws = torch.Generator().manual_seed(sum(numbers))
        texts = with_texts([[1, *[IMAGE] * 4 * number] for number in numbers], draws)
        return texts | {"pixel_values": torch.randn(sum(numbers), 3, 28, 28, generator=draws)}

    num_traces, _ = compare(model, [batch_of(1, 2), batch_of(2, 3), batch_of(3, 1), batch_of(2, 2)])
    assert num_traces == 1


def qwen(kind: str) -> Callable[[], nn.Module]:
    text = text_config(
        f"{kind}_text",
        rope_parameters={"mrope_section": [2, 3, 3], "rope_type": "default", "rope_theta": 1e4},
        **({"head_dim": 16} if kind == "qwen3_vl" else {}),
    )
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"deepstack_visual_indexes": [0]} if kind == "qwen3_vl" else {"fullatt_block_indexes": [1]}
    vision |= {"num_position_embeddings": 16, "patch_size": 14} if kind == "qwen3_vl" else {"window_size": 56}
    tokens = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.AutoConfig.for_model(kind, text_config=text.to_dict(), vision_config=vision, **tokens)
    return lambda: transformers.AutoModelForImageTextToText.from_config(config)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_whose_code_goes_by_a_grid(kind: str) -> None:
    torch.manual_seed(0)
    model = qwen(kind)()

    def batch_of(seed: int) -> Batch:
        draws = torch.Generator().manual_seed(seed)
        sides = (2 * torch.randint(2, 6, (3, 2), generator=draws)).tolist()
        texts = with_texts([[92, *[IMAGE] * (height * width // 4), 93] for height, width in sides], draws)
        grid = torch.tensor([[1, *pair] for pair in sides])
        pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14, generator=draws)
        kinds = (texts["input_ids"] == IMAGE).long()
        return texts | {"mm_token_type_ids": kinds, "pixel_values": pixels, "image_grid_thw": grid}

    num_traces, said = compare(model, [batch_of(seed) for seed in range(5)])
    assert num_traces == 2
    assert sum("where no trace serves a batch" in text for text in said) == 1
