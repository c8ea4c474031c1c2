"""What the rules of the zoo can't know about a model, as data.

Keys are names of model classes or config classes of transformers; a class's own entry is merged over its config's.
"""

from __future__ import annotations

from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    "BambaConfig": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "GraniteMoeHybridConfig": {
        "mamba_n_heads": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "Mamba2Config": {"num_heads": 8},
    "Gemma3nTextConfig": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "intermediate_size": 48,
    },
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "Qwen4ExpTextConfig": {
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
    },
    "DbrxConfig": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "ZambaConfig": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "GraniteSpeechEncoderConfig": {"context_size": 8},
    "GraniteSpeechPlusEncoderConfig": {"context_size": 8},
    "VibeVoiceAsrConfig": {"acoustic_tokenizer_chunk_size": 6400},
    "CvtConfig": {"depth": (1, 2, 3)},
    "BitConfig": {"num_groups": 4},
    "SwinConfig": {"window_size": 2},
    "DonutSwinConfig": {"window_size": 2},
    "EfficientNetConfig": {"width_coefficient": 0.25, "hidden_dim": 320},
    "AlignConfig": {"projection_dim": 640},
    "HGNetV2Config": {
        "stem_channels": (3, 16, 16),
        "stage_in_channels": (16, 32, 64, 64),
        "stage_mid_channels": (8, 8, 16, 16),
        "stage_out_channels": (32, 64, 64, 128),
    },
    "LevitConfig": {"patch_size": 16},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationConvProcessing": {"num_cross_attention_heads": 1},
    "TextNetConfig": {"stem_out_channels": 16},
    "Wav2Vec2BertForCTC": {"vocab_size": 96},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 96},
    "TimmBackboneConfig": {"backbone": "resnet10t"},
    "DPTConfig": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "DepthAnythingForDepthEstimation": {
        "backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
    },
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "Data2VecVisionForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "GraniteSpeech5EncoderConfig": {"input_dim": 80},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention", "conv"]},
    "NemotronHConfig": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "n_groups": 2,
    },
    "ReformerConfig": {"axial_pos_embds": False, "hash_seed": 0, "num_buckets": 2},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "XmodConfig": {"default_language": "en_XX"},
    "EsmConfig": {"vocab_size": 96},
    "NeoMMEConfig": {"head_dim": 16},
    "NystromformerConfig": {"segment_means_seq_len": 16, "num_landmarks": 16},
    "PerceiverForMaskedLM": {"max_position_embeddings": 16},
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4},
    "LiltConfig": {"hidden_size": 48},
    "MarkupLMConfig": {"max_xpath_tag_unit_embeddings": 256, "max_xpath_subs_unit_embeddings": 1024},
}
"""Fields of configs; nested ones by nested mappings."""

INPUTS: dict[str, dict[str, Any]] = {
    "GitForCausalLM": {"pixel_values": "pixels"},
    "LayoutLMv3Config": {"bbox": "boxes"},
    "LiltConfig": {"bbox": "boxes"},
    "LayoutLMConfig": {"bbox": "boxes"},
    "BrosConfig": {"bbox": ("B L 8", "uniform")},
    "ASTForAudioClassification": {"input_values": "spectrogram"},
    "WhisperForAudioClassification": {"input_features": "mel_bands_first"},
    "MusicgenForCausalLM": {"input_ids": ("4B L", 90), "labels": ("B L 4", 90), "attention_mask": None},
    "MusicgenMelodyForCausalLM": {"input_ids": ("4B L", 90), "labels": ("B L 4", 90), "attention_mask": None},
    "Siglip2ForImageClassification": {
        "pixel_values": ("B 64 192",),
        "pixel_attention_mask": ("B 64", "ones"),
        "spatial_shapes": ("B 2", "eights"),
    },
    "Siglip2Model": {
        "pixel_values": ("B 64 192",),
        "pixel_attention_mask": ("B 64", "ones"),
        "spatial_shapes": ("B 2", "eights"),
    },
    "ImageGPTConfig": {"input_ids": ("B 16", 90), "pixel_values": None},
}
"""Inputs beyond those of the task, as `inputs.make` takes them; None: leave the task's own out."""

NOT_TRACED: dict[str, str] = {
    "seq2seq-lm/ProphetNetForConditionalGeneration": "its forward asks whether an activation is contiguous",
    "causal-lm/BltForCausalLM": "a small model inside decides from its activations where the input is split",
    "causal-lm/ReformerModelWithLMHead": "its layers reseed torch in the forward",
    "masked-lm/ReformerForMaskedLM": "its layers reseed torch in the forward",
    "sequence-classification/ReformerForSequenceClassification": "its layers reseed torch in the forward",
}
"""Rows whose own code can't be captured, with why; they run by the fallback."""
