"""Models of timm, peft and torchao, as data."""

from __future__ import annotations

from typing import Any

_SMALL_VIT = {"embed_dim": 32, "depth": 3, "num_heads": 4}

TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("beit_base_patch16_224", _SMALL_VIT),
    "byobnet": ("test_byobnet", {}),
    "cait": ("cait_xxs24_224", _SMALL_VIT),
    "coat": ("coat_tiny", {"embed_dims": (16, 16, 16, 16), "serial_depths": (1, 1, 1, 1), "parallel_depth": 1}),
    "convit": ("convit_tiny", {"embed_dim": 32, "depth": 3, "num_heads": 4, "local_up_to_layer": 2}),
    "convnext": ("test_convnext", {}),
    "cpubone": ("cpubone_nano", {}),
    "cspnet": ("cs3darknet_focus_s", {}),
    "cspnext": ("cspnext_tiny", {}),
    "davit": ("davit_tiny", {"embed_dims": (16, 32, 32, 64), "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 4)}),
    "deit": ("deit_tiny_patch16_224", _SMALL_VIT),
    "densenet": ("densenet121", {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    "dla": ("dla46x_c", {}),
    "dpn": ("dpn48b", {"k_sec": (1, 1, 1, 1)}),
    "edgenext": ("edgenext_xx_small", {}),
    "efficientformer_v2": ("efficientformerv2_s0", {}),
    "efficientnet": ("test_efficientnet", {}),
    "efficientvim": ("efficientvim_m1", {}),
    "efficientvit_mit": ("efficientvit_b0", {}),
    "efficientvit_msra": ("efficientvit_m0", {}),
    "eva": ("vit_tiny_patch16_dinov3_qkvb", _SMALL_VIT),
    "fasternet": ("fasternet_t0", {}),
    "fastvit": ("fastvit_t8", {"layers": (1, 1, 1, 1)}),
    "gcvit": ("gcvit_xxtiny", {}),
    "ghostnet": ("ghostnet_050", {}),
    "hardcorenas": ("hardcorenas_b", {}),
    "hgnet": ("hgnetv2_b0", {}),
    "hiera": ("hiera_tiny_224", {"embed_dim": 16, "num_heads": 1, "stages": (1, 1, 1, 1)}),
    "hrnet": ("hrnet_w18_small", {}),
    "iformer": ("iformer_t", {}),
    "inception_next": ("inception_next_atto", {}),
    "lcnetv2": ("lcnetv2_small", {}),
    "levit": ("levit_128s", {"embed_dim": (32, 48, 64), "num_heads": (2, 3, 4), "key_dim": 16, "depth": (1, 1, 1)}),
    "mambaout": ("test_mambaout", {}),
    "maxxvit": ("test_coatnet", {}),
    "metaformer": ("poolformerv2_s12", {}),
    "mlp_mixer": ("gmlp_ti16_224", {}),
    "mobilenetv3": ("lcnet_035", {}),
    "mobilevit": ("mobilevit_xxs", {}),
    "naflexvit": ("naflexvit_base_patch16_parfac_gap", _SMALL_VIT),
    "nfnet": ("test_nfnet", {}),
    "pit": ("pit_ti_224", {}),
    "pvt_v2": ("pvt_v2_b0", {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 40, 64)}),
    "regnet": ("regnetx_002", {}),
    "repghost": ("repghostnet_050", {}),
    "repvit": ("repvit_m1", {"depth": (1, 1, 2, 1), "embed_dim": (16, 32, 48, 64)}),
    "res2net": ("res2net50_14w_8s", {"layers": (1, 1, 1, 1)}),
    "resnest": ("resnest14d", {}),
    "resnet": ("resnet10t", {}),
    "resnetv2": ("resnetv2_18", {}),
    "rexnet": ("rexnet_100", {"width_mult": 0.5}),
    "senet": ("legacy_seresnet18", {}),
    "shvit": ("shvit_s1", {}),
    "sknet": ("skresnet18", {}),
    "starnet": ("starnet_s1", {}),
    "swiftformer": ("swiftformer_l1", {"layers": (1, 1, 2, 1), "embed_dims": (16, 32, 48, 64)}),
    "swin_transformer": (
        "swin_tiny_patch4_window7_224",
        {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8), "window_size": 2},
    ),
    "swin_transformer_v2": (
        "swinv2_tiny_window8_256",
        {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8), "window_size": 2},
    ),
    "swin_transformer_v2_cr": (
        "swinv2_cr_tiny_224",
        {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8)},
    ),
    "tiny_vit": (
        "tiny_vit_5m_224",
        {"depths": (1, 1, 2, 1), "embed_dims": (16, 32, 32, 64), "num_heads": (1, 2, 2, 4)},
    ),
    "tnt": (
        "tnt_s_patch16_224",
        {"embed_dim": 32, "inner_dim": 8, "depth": 3, "num_heads_inner": 2, "num_heads_outer": 4},
    ),
    "twins": ("twins_pcpvt_small", {"embed_dims": (16, 32, 40, 64), "depths": (1, 1, 1, 1)}),
    "visformer": ("visformer_tiny", {"embed_dim": 48, "depth": (2, 2, 2)}),
    "vision_transformer": ("vit_tiny_patch16_224", _SMALL_VIT),
    "vision_transformer_relpos": ("test_vit_relpos", {}),
    "vovnet": ("ese_vovnet19b_slim_dw", {}),
    "xcit": ("xcit_nano_12_p16_224", {"embed_dim": 32, "depth": 3, "num_heads": 4}),
}
"""Family -> a model of it, and options that make it smaller."""

_ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "dora": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "use_dora": True}),
    "loha": ("LoHaConfig", {"r": 4, "target_modules": "all-linear"}),
    "ia3": ("IA3Config", {}),
    "prompt-tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "prefix-tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
}
_BASES: tuple[tuple[str, str, str], ...] = (
    ("causal-lm", "LlamaForCausalLM", "CAUSAL_LM"),
    ("causal-lm", "GPT2LMHeadModel", "CAUSAL_LM"),
    ("causal-lm", "Qwen3ForCausalLM", "CAUSAL_LM"),
    ("causal-lm", "BloomForCausalLM", "CAUSAL_LM"),
    ("seq2seq-lm", "T5ForConditionalGeneration", "SEQ_2_SEQ_LM"),
    ("sequence-classification", "BertForSequenceClassification", "SEQ_CLS"),
    ("sequence-classification", "RobertaForSequenceClassification", "SEQ_CLS"),
)
PEFT: dict[str, dict[str, Any]] = {
    f"{adapter}-{model}": {"task": task, "model": model, "task_type": task_type, "config": config, "options": options}
    for adapter, (config, options) in _ADAPTERS.items()
    for task, model, task_type in _BASES
    if (adapter, model) != ("loha", "GPT2LMHeadModel")  # its linear layers are of a class that this adapter lacks
}
"""Adapter and base model -> how they are put together."""

TORCHAO: dict[str, str] = {
    f"{config}-{model}": config
    for config in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig")
    for model in ("LlamaForCausalLM", "Qwen3ForCausalLM")
}
"""Configuration of torchao and base model, which is trained through adapters -> the configuration."""
