"""What the tests beside it share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data"


QWEN = DATA / "qwen3_8b_config.json"


Output = Callable[..., tuple[int, str, str]]


def json_of(result: tuple[int, str, str]) -> Any:
    assert result[0] == 0, result
    return json.loads(result[1])


def even_layers(number: int, **changes: Any) -> dict[str, Any]:
    """A chain of like layers."""
    layer = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "weight_bytes": 100,
        "activation_bytes": 10,
        "carry_bytes": 1,
        **changes,
    }
    return {"layers": [{"name": f"block{index}", **layer} for index in range(number)], "device_memory_bytes": 10**6}


H100 = ("--device-profile", "H100")


TINY = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def num_tiny_parameters() -> int:
    attention = 32 * 8 * (4 + 2 + 2) + 4 * 8 * 32 + 2 * 8
    return 2 * 97 * 32 + 32 + 6 * (attention + 3 * 32 * 64 + 2 * 32)


FACTORY = """
import torch
from torch import nn

def with_example():
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), {"input": torch.zeros(4, 64)}

def alone():
    return nn.Linear(2, 2)

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, input):
        hidden = self.inner(input)
        return hidden + 1 if hidden.sum() > 0 else hidden

def untraceable():
    return Branches(), {"input": torch.zeros(4, 64)}

def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 4), nn.ReLU()), {"input": torch.zeros(4, 64, device="cpu")}

def misnamed():
    return nn.Linear(64, 4), {"inputs": torch.zeros(4, 64)}

def raises():
    raise ValueError("no such\\nweights")

def exits():
    raise SystemExit("enough")
"""
