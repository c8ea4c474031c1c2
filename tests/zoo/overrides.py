"""What the rules of the zoo can't know about a model, as data.

Keys are names of model classes or config classes of transformers; a class's own entry is merged over its config's,
and inputs for one row only over both.
"""

from __future__ import annotations

from typing import Any

_INTRACLASS_BLOCK = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{
        f"{shape}_{ratio}ratio": [
            [size if high else 1, size if wide else 1],
            1,
            [pad if high else 0, pad if wide else 0],
        ]
        for shape, high, wide in (
            ("vertical_long_to_small_conv", True, False),
            ("horizontal_small_to_long_conv", False, True),
            ("symmetric_conv_long", True, True),
        )
        for ratio, size, pad in (("long", 7, 3), ("mid", 5, 2), ("short", 3, 1))
    },
}
_TEXT_DETECTOR = {
    "intraclass_block_config": _INTRACLASS_BLOCK,
    "kernel_list": [3, 2, 2],
    "scale_factor_list": [1, 2, 4, 8],
}

_FOUR_STAGES = {
    "stem_channels": [3, 8, 16],
    "block_configs": [
        [[3, 16, 16, 1, True]],
        [[3, 16, 32, 2, False], [3, 32, 32, 1, False]],
        [[3, 32, 48, 2, True]],
        [[3, 48, 64, 2, False]],
    ],
    "out_indices": [1, 2, 3, 4],
}

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
        "hidden_sizes": (32, 64, 64, 128),
    },
    "PPOCRV5ServerDetConfig": _TEXT_DETECTOR,
    "PPOCRV6MediumDetConfig": {**_TEXT_DETECTOR, "backbone_config": _FOUR_STAGES},
    "PPOCRV6SmallDetConfig": {"backbone_config": _FOUR_STAGES, "layer_list_out_channels": [16, 32, 48, 64]},
    "LwDetrConfig": {"projector_scale_factors": [1.0]},
    "Mask2FormerConfig": {"feature_size": 32},
    "DINOv3ViTConfig": {"pos_embed_rescale": None},
    "EomtDinov3Config": {"pos_embed_rescale": None},
    "Sapiens2Config": {"pos_embed_rescale": None},
    "Sapiens2HeadConfig": {"upsample_out_channels": [32, 16], "conv_out_channels": [16, 16]},
    "DepthProConfig": {
        "patch_size": 64,
        "intermediate_hook_ids": [2, 1],
        "intermediate_feature_dims": [32, 32],
        "scaled_images_feature_dims": [32, 32, 32],
        "merge_padding_value": 1,
    },
    "LevitConfig": {"patch_size": 16},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationConvProcessing": {"num_cross_attention_heads": 1},
    "TextNetConfig": {"stem_out_channels": 16},
    "Wav2Vec2BertForCTC": {"vocab_size": 96},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 96},
    "TimmBackboneConfig": {"backbone": "resnet10t"},
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "Data2VecVisionForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "DetrForSegmentation": {"d_model": 128, "encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "BrosConfig": {"hidden_size": 128},
    "VoxtralConfig": {"audio_token_id": 5},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "VoxtralEncoderConfig": {"intermediate_size": 128},
    "ShieldGemma2Config": {"mm_tokens_per_image": 16, "yes_token_index": 17, "no_token_index": 18},
    "VibeVoiceAcousticTokenizerConfig": {"num_filters": 2},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"num_filters": 2},
    "PPDocLayoutV2Config": {"class_thresholds": [0.5] * 3, "class_order": [0, 1, 2]},
    "GraniteSpeechConfig": {"window_size": 15},
    "GraniteSpeechPlusConfig": {"window_size": 15},
    "Qwen3ASREncoderConfig": {"n_window": 50, "n_window_infer": 100},
    "SpeechEncoderDecoderConfig": {"pad_token_id": 0, "decoder_start_token_id": 1},
    "Blip2ForImageTextRetrieval": {"qformer_config": {"use_qformer_text_input": True}},
    "FunAsrNanoConfig": {"adaptor_config": {"intermediate_size": 8}},
    "KyutaiSpeechToTextConfig": {"codec_config": {"upsample_groups": 32}},
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
    "DepthProConfig": {"pixel_values": ("B 3 256 256",)},
    "GraniteSpeech5CTCConfig": {"input_features": ("B 4L 320",)},
    "Speech2TextForConditionalGeneration": {"input_features": "mel_bands_last"},
    "SeamlessM4TForSpeechToText": {"input_features": "mel_bands_last"},
    "speech-seq2seq/FunAsrNanoForConditionalGeneration": {
        "input_features": ("B 4L 560",),
        "input_features_mask": ("B 4L", "ones"),
    },
    "speech-seq2seq/Qwen3ASRForConditionalGeneration": {
        "input_features": ("B 128 200",),
        "input_features_mask": ("B 200", "ones"),
    },
    "GraniteSpeechForConditionalGeneration": {"input_features_mask": None},
    "GraniteSpeechPlusForConditionalGeneration": {"input_features_mask": None},
    "VoxtralRealtimeForConditionalGeneration": {"input_features": ("B 128 8L",), "input_ids": "token_ids"},
    "KyutaiSpeechToTextForConditionalGeneration": {"input_ids": ("B L 33", 90), "labels": "target_ids"},
    "DiaForConditionalGeneration": {
        "decoder_input_ids": ("B L 9", 90),
        "labels": ("9B L", 90),
        "input_features": None,
    },
    "Pop2PianoForConditionalGeneration": {"input_features": ("B L 32",), "input_ids": None},
    "VibeVoiceAsrForConditionalGeneration": {"sample": False},
    "speech-seq2seq/VibeVoiceAsrForConditionalGeneration": {"input_values": ("B 1 12800",)},
    "VibeVoiceForConditionalGeneration": {"input_values": None, "input_ids": "token_ids"},
    "ShieldGemma2ForImageClassification": {"input_ids": "ids_with_media", "labels": None},
    "OneFormerConfig": {"task_inputs": ("B 77", 90)},
    "PromptDepthAnythingConfig": {"prompt_depth": ("B 1 16 16", "uniform")},
    "GitForCausalLM": {"pixel_values": "pixels"},
    "LongformerForQuestionAnswering": {"global_attention_mask": ("B L", "ones")},
    "LongformerForMultipleChoice": {"global_attention_mask": ("B 2 L", "ones")},
    "LxmertForQuestionAnswering": {
        "visual_feats": ("B 4 32",),
        "visual_pos": ("B 4 4", "uniform"),
        "start_positions": None,
        "end_positions": None,
    },
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
    "causal-lm/BltForCausalLM": "a small model inside decides from its activations where the input is split",
    "causal-lm/ReformerModelWithLMHead": "its layers reseed torch in the forward",
    "masked-lm/ReformerForMaskedLM": "its layers reseed torch in the forward",
    "sequence-classification/ReformerForSequenceClassification": "its layers reseed torch in the forward",
    "question-answering/ReformerForQuestionAnswering": "its layers reseed torch in the forward",
    "multiple-choice/ModernBertForMultipleChoice": "it indexes with a tensor of no dimensions, which reads its number",
}
"""Rows whose own code can't be captured, with why; they run by the fallback."""
