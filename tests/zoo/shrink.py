"""Makes configs of published models tiny, by the names of their fields.

A config class has the sizes of some published checkpoint as defaults. A field that holds a size, and that the
table below knows by its name, becomes small; lists with one entry per layer keep one of each kind; lists with one
entry per stage keep their length and their proportions; configs inside a config are shrunk the same way. Fields
that a config derives from others are left to it.

Invariant: nothing here knows a model; what a model needs beyond the rules is data, in `overrides`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.zoo.overrides import CONFIGS

HIDDEN = 32
NUM_HEADS = 4
HEAD_DIM = 8
NUM_LAYERS = 3
VOCAB = 96
FIRST_TOKEN = 16
"""Token ids below this one have a meaning of their own in some model."""
MAX_POSITIONS = 128
STAGE_WIDTH = 16
"""Width of the first of several stages of growing width."""

IMAGE_CHANNELS = 3
NO_LIMIT = 1 << 40

LIMITS: tuple[tuple[str, int], ...] = (
    (
        r"num_encoder_blocks|num_stages|n_langs|langs|num_labels|num_channels|num_frames|seed|.*sampl(e|ing)_rate",
        NO_LIMIT,
    ),
    (r"type_vocab_size|task_type_vocab_size", 2),
    (r".*vocab.*", VOCAB),
    (r".*(position|context_length|n_ctx|seq_len|seq_length|max_length).*(?<!bins)(?<!buckets)", MAX_POSITIONS),
    (r".*hash_buckets", 64),
    (r".*(buckets|bins|max_distance|max_rel.*)", NO_LIMIT),
    (r".*(num_key_value_heads|kv_heads|num_query_groups)", 2),
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|num_.*_heads|.*_n_heads?|nhead|heads)", NUM_HEADS),
    (r".*(head_dim|head_size|d_kv|dim_head|d_head|_headdim|key_dim|value_dim|kv_channels|rotary_dim)", HEAD_DIM),
    (r"(encoder_|decoder_)?hidden_dim|.*(fpn|mask)_feature_size", HIDDEN),
    (r".*(intermediate|ffn_?dim|ffn_hidden|d_ff|dim_ff|dff|n_inner|feed_?forward|mlp_dim|hidden_dim|d_inner).*", 48),
    (r".*experts?_per_tok(en)?|.*topk|.*top_k|moe_k|num_selected_experts|index_topk.*", 2),
    (r".*(n_group|topk_group|num_expert_group)", 1),
    (r"first_k_dense.*|.*offset|moe_layer_start_index", 1),
    (r".*(period|interval|every).*|decoder_sparse_step|layer_group_size", 2),
    (r".*shared_experts?|.*num_zero_experts|zero_expert_num", 1),
    (r".*(num|n)_(local_|routed_)?experts|.*num_experts|.*experts", 4),
    (r".*(rank|lora_r)", 16),
    (r"(.*_)?(num_)?(hidden_|encoder_|decoder_|mid_)?(layers|n_layers?|blocks|depth|layer)", NUM_LAYERS),
    (r".*(layers|depth|num_self_attends_per_block)", NUM_LAYERS),
    (r"window_sizes?", 4),
    (r"num_windows.*", NO_LIMIT),
    (r"chunk_length", 16),
    (r".*(window|chunk|local_radius|block_size).*", 8),
    (r"(.*_)?image_size|input_size|pretrain_img_size", 64),
    (r".*patch_size", 8),
    (r".*(state_size|d_state|ssm_state)", 8),
    (r".*(num_mel_bins|feature_size|num_mels)", 16),
    (r".*(num_queries|num_latents|query_length|num_query_tokens|num_landmarks|segment_means.*)", 8),
    (r".*(hidden|embed|emb|width|dim|d_model|channels|latents|filters|units|bottleneck_features).*", HIDDEN),
)
"""Field names (all of the name must match) and the largest value that a field of that name keeps; first match."""

UNKNOWN_LIMIT = 512
"""Numbers larger than this are taken for sizes, whatever their name."""
OFF = "use_cache|use_mems_train|use_mems_eval"
"""Fields that serve generation, and make a training step return what nobody reads."""
RANDOM = re.compile(
    r".*(dropout|drop_?rate|drop_?path|layerdrop|drop_prob|pdrop|jitter_noise|stochastic_depth|survival).*|"
    r"mask_time_prob|mask_feature_prob|apply_spec_augment|noise.*"
)
"""Fields that make a forward random; they are switched off, since the draws differ from eager's by contract."""
_TOKEN = re.compile(r".*(token_id|token_index|_index|token)s?$")
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
_NEEDED = re.compile(r"head_dim|num_key_value_heads|.*experts|.*experts_per_tok|moe_intermediate_size")
"""Fields that a model can't do without, even though the class has no default for them."""
_DEPTHS = re.compile(r"(?!encode_proj).*(depth|layers|blocks|repeats|levels).*")


def limit_of(name: str) -> int | None:
    """The largest value that a field of this name keeps; None if no rule knows it."""
    return next((limit for pattern, limit in LIMITS if re.fullmatch(pattern, name)), None)


def shrunk(cls: type, overrides: Mapping[str, Any], base: Any = None) -> Any:
    """A tiny config.

    Args:
        cls: the config's class.
        overrides: fields to set as given; a mapping for a config inside is merged into what the rules give for it.
        base: the config to shrink; None: the class's defaults.

    Raises:
        Exception: whatever the config's own validation raises.
    """
    if base is None:
        return cls(**shrunk_fields(cls(), overrides))
    return type(base)(**undeclared(base), **shrunk_fields(base, overrides))


def declared_fields(cls: type) -> dict[str, Any]:
    """What a config's constructor takes, and the defaults: of a dataclass, as from transformers 5 on, or by name."""
    if dataclasses.is_dataclass(cls):
        return {field.name: field.default for field in dataclasses.fields(cls)}
    parameters = inspect.signature(cls).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is not each.VAR_KEYWORD}


def _is_config(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or hasattr(cls, "model_type")


def shrunk_fields(base: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a tiny config's constructor."""
    declared = declared_fields(type(base))
    nested = _nested(base)
    picked = _picked_layers(base)
    tokens = iter(range(3, FIRST_TOKEN))
    fields: dict[str, Any] = {}
    for name, default in declared.items():
        if name.startswith("_") or name in overrides and not isinstance(overrides[name], Mapping):
            continue
        value = _value(base, name)
        inner = overrides.get(name, {})
        if name in nested and isinstance(inner, Mapping):
            inner = {**CONFIGS.get(type(value).__name__, {}), **inner}
        if value is None and _NEEDED.fullmatch(name):
            fields[name] = limit_of(name)
        elif name in nested:
            fields[name] = shrunk(type(value), inner, value) if value is not None else _made(nested[name], inner)
        elif isinstance(inner, Mapping) and inner:
            fields[name] = dict(inner)
        elif name in picked:
            fields[name] = picked[name]
        elif default is not None or (isinstance(value, int) and _is_token(name)):
            small = _small(name, value, tokens)
            if small is not None:
                fields[name] = small
            elif isinstance(value, (str, bool, int, float)) and value != default:
                fields[name] = value
        elif isinstance(value, str):
            fields[name] = value
    fields |= _rotary(base, fields)
    fields |= _equal_heads(base, fields)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if name in declared and name not in fields:
            fields[name] = _SPECIAL[name]
    fields |= {name: value for name, value in overrides.items() if not isinstance(value, Mapping) or name not in fields}
    num_layers = next((len(values) for values in picked.values()), None)
    if num_layers is not None:
        counted = _field_of_layers(base)
        if counted is not None and counted not in overrides:
            fields[counted] = num_layers
    fields |= _widths_of_backbone(base, fields, overrides)
    return fields | _outputs(base, fields, overrides)


def undeclared(base: Any) -> dict[str, Any]:
    """Switches that a config has beyond what its class declares: a config around it gave them."""
    known = {*declared_fields(type(base)), *vars(type(base)())}
    return {name: value for name, value in vars(base).items() if isinstance(value, bool) and name not in known}


def _made(cls: type, overrides: Mapping[str, Any]) -> Any:
    """A config for a field that has none by default; None if its class is not fixed and none is named."""
    kind = overrides.get("model_type")
    if kind is not None:
        from transformers import CONFIG_MAPPING

        cls = CONFIG_MAPPING[kind]
    if not _is_config(cls) or cls.__name__ == "AutoConfig":
        return None
    return shrunk(cls, {name: value for name, value in overrides.items() if name != "model_type"})


def _nested(base: Any) -> dict[str, Any]:
    """Fields that hold a config, with the class that is expected there."""
    found: dict[str, Any] = dict(getattr(base, "sub_configs", {}))
    for name in declared_fields(type(base)):
        value = _value(base, name)
        if hasattr(value, "model_type") and _is_config(type(value)):
            found[name] = type(value)
    return found


def _is_token(name: str) -> bool:
    return _TOKEN.fullmatch(name) is not None


def _small(name: str, value: Any, tokens: Iterable[int]) -> Any:
    """The value a field gets; None to leave it as it is."""
    if RANDOM.fullmatch(name) or re.fullmatch(OFF, name):
        return _zero(value)
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        if name in _SPECIAL:
            return _SPECIAL[name]
        if _is_token(name):
            return next(iter(tokens)) if value >= FIRST_TOKEN else None
        return _small_number(name, value)
    if isinstance(value, (list, tuple)) and value:
        return _small_list(name, value)
    return None


def _zero(value: Any) -> Any:
    if isinstance(value, bool):
        return False
    if isinstance(value, (int, float)):
        return type(value)(0)
    if isinstance(value, (list, tuple)):
        return type(value)(_zero(item) for item in value)
    return None


def _small_number(name: str, value: int) -> int | None:
    limit = limit_of(name)
    if limit is None:
        limit = HIDDEN if value > UNKNOWN_LIMIT else value
    return limit if value > limit else None


def _small_list(name: str, values: Sequence[Any]) -> Any:
    """A list of sizes, one per stage: depths of one, widths and heads in proportion."""
    kind: Any = type(values)
    if name in _SPECIAL or _is_token(name):
        return _SPECIAL.get(name)
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return None
    if _DEPTHS.fullmatch(name):
        return kind(min(value, 1 if len(values) > 2 else 2) for value in values)
    if len(values) > 2 and values[0] == IMAGE_CHANNELS < values[1] and "channels" in name:  # starts with the image
        return kind([values[0], *(_small_list(name, values[1:]) or values[1:])])
    limit = limit_of(name)
    if "in_channels" in name and len(set(values)) == 1:
        return kind(min(value, HIDDEN) for value in values)
    if "heads" in name:
        least = max(min(values), 1)
        return kind(max(value // least, 1) for value in values)
    if limit == HIDDEN and max(values) > HIDDEN and min(values) > 0:
        least = min(values)
        return kind(8 * max(round(value * STAGE_WIDTH / least / 8), 1) for value in values)
    if limit is not None and max(values) > limit:
        return kind(min(value, limit) for value in values)
    return None


# Per-layer lists


def _field_of_layers(base: Any) -> str | None:
    """The field that says how many layers there are."""
    names = declared_fields(type(base))
    mapped = getattr(base, "attribute_map", {}).get("num_hidden_layers")
    return next((name for name in ("num_hidden_layers", mapped, "num_layers", "n_layers") if name in names), None)


def _picked_layers(base: Any) -> dict[str, list[Any]]:
    """Lists with one entry per layer, cut to layers that show every kind there is; empty if all are of one kind."""
    counted = _field_of_layers(base)
    num_layers = getattr(base, counted) if counted else None
    if not isinstance(num_layers, int) or num_layers <= NUM_LAYERS:
        return {}
    lists = {
        name: list(value)
        for name in declared_fields(type(base))
        if isinstance(value := _value(base, name), (list, tuple))
        and len(value) == num_layers
        and all(isinstance(item, (str, int, float)) for item in value)
        and not RANDOM.fullmatch(name)
    }
    kinds = list(zip(*lists.values(), strict=True))
    if len(set(kinds)) < 2:
        return {}
    if len(set(kinds)) > NUM_LAYERS + 2:  # numbers that differ from layer to layer: kinds are what words say
        words = {name: values for name, values in lists.items() if isinstance(values[0], str)}
        kinds = list(zip(*words.values(), strict=True)) if words else kinds[:NUM_LAYERS]
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)][: NUM_LAYERS + 2]
    more = [index for index in range(num_layers) if index not in first]
    chosen = sorted([*first, *more[: max(NUM_LAYERS - len(first), 0)]])
    return {name: [_per_layer(name, values[index]) for index in chosen] for name, values in lists.items()}


def _per_layer(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    small = _small_number(name.removesuffix("_per_layer"), value)
    return value if small is None else small


def _equal_heads(base: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """As many heads of keys and values as of queries, where the published model has as many."""
    found = {}
    for name in fields:
        if name in ("num_key_value_heads", "num_kv_heads"):
            heads = next((h for h in ("num_attention_heads", "n_heads", "num_heads") if _value(base, h)), None)
            if heads is not None and _value(base, heads) == _value(base, name):
                found[name] = fields.get(heads, _value(base, heads))
    return found


def _value(base: Any, name: str) -> Any:
    """A field's value; one that differs from layer to layer has a common default, too."""
    try:
        return getattr(base, name, None)
    except RuntimeError as error:
        if "per_layer" not in str(error):
            raise
    except AttributeError:
        pass
    return vars(base).get(name)


# Backbones


def _outputs(base: Any, fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """As many outputs of a backbone as the published model has, at the last of its layers; more layers if need be."""
    found: dict[str, Any] = {}
    counted = _field_of_layers(base)
    num_published = getattr(base, counted, None) if counted else None
    for name in ("out_indices", "backbone_out_indices"):
        indices = getattr(base, name, None)
        if name in overrides or not isinstance(indices, (list, tuple)) or len(indices) < 2:
            continue
        kind: Any = type(indices)
        if counted is None or num_published not in (indices[-1], indices[-1] + 1):  # of stages, which are all kept
            found[name] = kind(indices)
            continue
        num_layers = max(fields.get(counted, num_published), len(indices))
        last = num_layers - (num_published - indices[-1])
        found |= {counted: num_layers, name: kind(range(last - len(indices) + 1, last + 1))}
    return found


def _widths_of_backbone(base: Any, fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of the widths that a backbone hands over, as wide as its stages became."""
    published, small = getattr(base, "backbone_config", None), fields.get("backbone_config")
    before, after = getattr(published, "hidden_sizes", None), getattr(small, "hidden_sizes", None)
    if not before or not after:
        return {}
    became = dict(zip(before, after, strict=True))
    lists = {name: getattr(base, name, None) for name in fields if "channels" in name and name not in overrides}
    return {
        name: type(widths)(became[width] for width in widths)
        for name, widths in lists.items()
        if isinstance(widths, (list, tuple)) and set(widths) <= set(became) and len(set(widths)) > 1
    }


# Rotary embeddings


def _rotary(base: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary sections, which must add up to half of what is rotated of a head."""
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value: Any = getattr(base, name, None)
        sections = value.get("mrope_section") if isinstance(value, Mapping) else None
        if sections and name in declared_fields(type(base)):
            head_dim = fields.get("head_dim") or HEAD_DIM
            half = int(head_dim * value.get("partial_rotary_factor", 1.0)) // 2
            small = [max(int(section * half / sum(sections)), 1) for section in sections]
            small[-1] += half - sum(small)
            found[name] = {**value, "mrope_section": small}
    return found
