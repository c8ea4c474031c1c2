"""Small models, and their training on ranks and in one process, step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from roundpipe.distributed import StageModule, model_outputs, partition_stages, pipeline_stage, sum_tied_gradients
from tests.equality import difference
from tests.models import ResNet, UNet

VOCAB = 64
NUM_MICROBATCHES = 4
SCHEDULES = {
    schedule.__name__: schedule
    for schedule in (
        ScheduleGPipe,
        Schedule1F1B,
        ScheduleInterleaved1F1B,
        ScheduleLoopedBFS,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
    )
}
TWO_STAGES_PER_RANK = SCHEDULES.keys() - {"ScheduleGPipe", "Schedule1F1B"}


@dataclass(frozen=True)
class Training:
    """A model, a batch for it, and a loss."""

    build: Callable[[int], nn.Module]
    """``(number of blocks) -> model``."""
    batch: Callable[[int, int], tuple[dict[str, Any], torch.Tensor]]
    """``(batch, length) -> (keyword arguments, target)``."""
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    dtype: torch.dtype = torch.float64


def make_model(name: str, num_blocks: int) -> nn.Module:
    """The same at every call."""
    torch.manual_seed(0)
    model = TRAININGS[name].build(num_blocks).to(TRAININGS[name].dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def _llama(num_blocks: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": num_blocks}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, num_attention_heads=2, use_cache=False))


def _gpt2(num_blocks: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": num_blocks, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes, use_cache=False, **dropout, **ends))


def _t5(num_blocks: int) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": (num_blocks + 1) // 2, "num_heads": 2}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes, **ends, dropout_rate=0.0, use_cache=False))


def _mixture_of_experts(num_blocks: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": num_blocks, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCAB, **sizes, **experts, **heads, use_cache=False))


def _unet(num_blocks: int) -> nn.Module:
    return UNet((num_blocks + 1) // 2)


def _text(batch: int, length: int) -> tuple[dict[str, Any], torch.Tensor]:
    ids = torch.randint(1, VOCAB, (batch, length))
    mask = torch.ones_like(ids)
    mask[::2, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}, ids


def _pairs(batch: int, length: int) -> tuple[dict[str, Any], torch.Tensor]:
    inputs, ids = _text(batch, length)
    return {**inputs, "labels": torch.randint(1, VOCAB, (batch, length - 2))}, ids


def _images(batch: int, length: int) -> tuple[dict[str, Any], torch.Tensor]:
    return {"x": torch.randn(batch, 3, 16, 16, dtype=torch.float64)}, torch.randint(0, 5, (batch,))


def _next_token(outputs: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _own_loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    return outputs.loss


def _mean_square(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


TRAININGS = {
    "llama": Training(_llama, _text, _next_token),
    "gpt2": Training(_gpt2, _text, _next_token),
    "t5": Training(_t5, _pairs, _own_loss),
    "mixture_of_experts": Training(_mixture_of_experts, _text, _next_token, torch.float32),
    "unet": Training(_unet, _images, _mean_square),
    "resnet": Training(lambda num_blocks: ResNet(), _images, _mean_square),
}


def train_on_ranks(name: str, schedule_name: str, frozen: tuple[str, ...] = (), evaluates_first: bool = False) -> float:
    """Train on this group's ranks and in this process, and compare all that this rank has.

    Two steps on microbatches of the traced shape, then two on larger and longer ones. A single argument of the model
    is positional, several are keywords. Each pair of steps may come after an evaluation by the same schedule.

    Returns:
        The largest relative difference of losses, gradients, weights and buffers.
    """
    training, kind = TRAININGS[name], SCHEDULES[schedule_name]
    rank, size = dist.get_rank(), dist.get_world_size()
    num_stages = 2 * size if schedule_name in TWO_STAGES_PER_RANK else size
    parts = _partition(name, num_stages, frozen)
    reference = _frozen(make_model(name, _num_blocks()), frozen)
    torch.manual_seed(1)
    second = num_stages - 1 - rank if kind is ScheduleZBVZeroBubble else rank + size
    stages = [pipeline_stage(parts, index, num_stages) for index in ([rank, second][: num_stages // size])]
    expected = dict(reference.named_parameters(remove_duplicate=False))
    own = [weight for stage in stages for weight in stage.submod.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(own, lr=0.1) if own else None
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)

    worst = 0.0
    for microbatch, length in ((2, 8), (3, 11)):
        schedule = kind(
            stages if num_stages > size else stages[0],
            NUM_MICROBATCHES,
            loss_fn=lambda tensors, target: training.loss(model_outputs(stages[0], tensors), target),
        )
        for is_evaluation in [True] * evaluates_first + [False] * 2:
            inputs, target = training.batch(microbatch * NUM_MICROBATCHES, length)
            args, kwargs = (tuple(inputs.values()), {}) if len(inputs) == 1 else ((), inputs)
            losses: list[torch.Tensor] = []
            has_loss = any(stage.is_last for stage in stages)
            if rank > 0:
                args, kwargs = (), {}
            run = schedule.eval if is_evaluation else schedule.step
            run(
                *args,
                **kwargs,
                target=target if has_loss else None,
                losses=losses,
                return_outputs=False,
            )
            reference_losses = _eager_losses(reference, training, inputs, target)
            if has_loss:
                worst = max(worst, difference(torch.stack(losses), reference_losses))
            if is_evaluation:
                reference_optimizer.zero_grad()
                assert all(weight.grad is None for weight in own)
                continue
            sum_tied_gradients(stages)
            for stage in stages:
                for key, weight in stage.submod.named_parameters():
                    worst = max(worst, difference(weight.grad, expected[key].grad))
            for each in (optimizer, reference_optimizer):
                if each is not None:
                    each.step()
                    each.zero_grad()
    state = reference.state_dict()
    return max(
        [
            worst,
            *(difference(value, state[key]) for stage in stages for key, value in stage.submod.state_dict().items()),
        ]
    )


@functools.cache
def _partition(name: str, num_stages: int, frozen: tuple[str, ...]) -> list[StageModule]:
    """The stages of a model, traced once per process."""
    model = _frozen(make_model(name, _num_blocks()), frozen)
    return partition_stages(model, num_stages, example_kwargs=TRAININGS[name].batch(2, 8)[0])


def _num_blocks() -> int:
    """As many as two stages per rank need, with what is before and behind the blocks."""
    return 2 * dist.get_world_size() - 1


def _frozen(model: nn.Module, frozen: tuple[str, ...]) -> nn.Module:
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and key.startswith(frozen)))
    return model


def _eager_losses(model: nn.Module, training: Training, inputs: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    """Of each microbatch; gradients are those of their mean."""
    losses = []
    pieces = {key: value.chunk(NUM_MICROBATCHES) for key, value in inputs.items()}
    for index, piece in enumerate(target.chunk(NUM_MICROBATCHES)):
        loss = training.loss(model(**{key: values[index] for key, values in pieces.items()}), piece)
        (loss / NUM_MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses)
