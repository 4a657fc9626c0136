"""The configuration of any family of causal LMs, made tiny by the names of its fields.

A family's defaults are shrunk field by field: widths, heads, layers, vocabulary, experts, in nested
configurations too. Promises: what the defaults switch on stays on (a layer of each kind, fewer
key-value heads than heads, a window, experts), and every size is a fixed number.
Does not promise that the architecture accepts the result: fields that no rule here knows keep the
family's own values.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY, CONTEXT, WIDTH, NUM_HEADS, HEAD_WIDTH = 64, 128, 64, 4, 16
WINDOW = 8
"""Of windows and chunks: shorter than the sequences that the zoo trains on."""
MAX_LAYERS = 4
WIDE_HEAD = 32
"""The smallest that vLLM computes on a CPU."""
LATENT_WIDTHS = 512, 64
"""Of latent attention, latent and rotary: those of DeepSeek, the only ones that vLLM has."""
_NUM_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
    "num_decoder_layers", "num_encoder_layers", "num_blocks", "depth", "num_layers_per_stack",
    "conf_num_hidden_layers", "num_global_layers",
)  # fmt: skip
_NUM_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads",
    "decoder_attention_heads", "encoder_attention_heads", "num_encoder_attention_heads",
    "num_decoder_attention_heads", "swa_num_attention_heads", "index_n_heads", "linear_num_heads",
    "linear_num_value_heads", "num_query_groups",
)  # fmt: skip
_NUM_KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads",
    "linear_num_key_heads",
)  # fmt: skip
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "audio_vocab_size",
         "vocab_size_per_layer_input", "encoder_hash_byte_group_vocab", "ngram_vocab_size_base",
         "pronunciation_vocab_size", "shape_vocab_size"), VOCABULARY),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length",
         "max_target_positions", "context_length", "original_max_position_embeddings"), CONTEXT),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim",
         "word_embed_proj_dim", "hidden_size_global", "backbone_hidden_size", "lru_width",
         "input_embedding_size", "output_embedding_size", "out_hidden_size", "ple_embed_dim",
         "cross_attention_hidden_size"), WIDTH),
    **dict.fromkeys(
        ("head_dim", "kv_channels", "dim_head", "d_head", "d_kv", "qk_nope_head_dim", "v_head_dim",
         "swa_head_dim", "global_head_dim", "linear_head_dim", "linear_key_head_dim",
         "linear_value_head_dim", "attention_head_size", "mamba_d_head", "mamba_head_dim",
         "mamba_headdim", "index_head_dim", "query_pre_attn_scalar", "mamba_d_state",
         "ssm_state_size", "mamba_dt_rank", "rel_extent", "chunk_size", "mamba_chunk_size"),
        HEAD_WIDTH),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "d_rel"), HEAD_WIDTH // 2),
    "qk_head_dim": HEAD_WIDTH + HEAD_WIDTH // 2,
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "o_lora_rank", "laurel_rank", "adapter_rank", "hc_lowrank",
         "gated_norm_rank", "hidden_size_per_layer_input", "router_hidden_size"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "dim_ff",
         "dff", "n_inner", "d_inner", "feed_forward_size", "ffn_hidden_size", "mlp_dim",
         "intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size"), 96),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
         "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("mamba_d_ssm", "attention_hidden_size"), 2 * WIDTH),
    "attention_head_dim": 2 * WIDTH // NUM_HEADS,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 2 * WIDTH // HEAD_WIDTH),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_chunk_size", "local_attention",
         "attention_window_size", "window_size", "index_topk", "keep_window_size",
         "local_attention_window_len", "local_attn_chunk_length", "lsh_attn_chunk_length"), WINDOW),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
         "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(
        ("n_group", "topk_group", "num_expert_group", "first_k_dense_replace",
         "n_shared_experts", "moe_layer_start_index", "max_window_layers", "attn_layer_offset",
         "expert_layer_offset"), 1),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
}  # fmt: skip
_LAYER_INDICES = (
    "moe_layers", "full_attn_idxs", "mlp_only_layers", "hybrid_layer_ids", "cross_attention_layers",
    "ple_layer_ids",
)  # fmt: skip
_NEEDED = {
    "head_dim": HEAD_WIDTH, "num_key_value_heads": NUM_HEADS, "num_experts_per_tok": 2,
    "n_routed_experts": 4, "n_shared_experts": 1, "indexer_n_heads": NUM_HEADS,
    "indexer_kv_heads": 1, "indexer_head_dim": HEAD_WIDTH, "indexer_budget": WINDOW,
    "indexer_compress_ratio": 2,
}  # fmt: skip
"""Of what some families leave open and cannot be built without."""
_OF_CLASS: Mapping[str, Mapping[str, Any]] = {
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"head_dim": 2 * WIDTH // NUM_HEADS, "n_groups": 1},
    "DeepseekV3Config": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": CONTEXT // 2,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "ReformerConfig": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16)},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "ZambaConfig": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
}
"""By class: what its defaults contradict or leave open, or have otherwise than published models."""
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_config(model_type: str) -> PretrainedConfig:
    """The tiny configuration of a family.

    Args:
        model_type: of transformers.

    Returns:
        A new configuration of the family's own class.
    """
    return shrunk(CONFIG_MAPPING[model_type]())


def with_wide_heads(config: PretrainedConfig) -> PretrainedConfig:
    """The same configuration with heads as wide as rollout engines compute them on a CPU.

    Two heads of `WIDE_HEAD` share one of keys and values; with latent attention (MLA) the latent
    and rotary widths are the published ones.
    """
    own: Any = config
    if getattr(config, "kv_lora_rank", None) is not None:
        own.kv_lora_rank, own.qk_rope_head_dim = LATENT_WIDTHS
        own.head_dim = own.qk_rope_head_dim
        own.qk_head_dim = own.qk_nope_head_dim + own.qk_rope_head_dim
        return config
    own.num_attention_heads = WIDTH // WIDE_HEAD
    if getattr(config, "num_key_value_heads", None) is not None:
        own.num_key_value_heads = 1
    if getattr(config, "head_dim", None) is not None:
        own.head_dim = WIDE_HEAD
    return config


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """A tiny configuration of the same class; the given one is as before."""
    own = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    kept = kept_layers(own)
    changes = {name: _shrunk_value(name, value, own, kept) for name, value in own.items()}
    is_nested = {name for name, value in own.items() if isinstance(value, PretrainedConfig)}
    changed = {
        name: value
        for name, value in changes.items()
        if name in is_nested or value is not own[name]
    }
    return type(config)(**{**changed, **_OF_CLASS.get(type(config).__name__, {})})


def kept_layers(own: Mapping[str, Any]) -> list[int]:
    """The layers that stay: the first of each kind, and at least two.

    Args:
        own: fields of a configuration.

    Returns:
        Places of layers of the family's default, ascending; none where it has no layers.
    """
    num_layers = _num_layers(own)
    kinds = [
        value for value in own.values()
        if _is_per_layer(value, num_layers) and isinstance(value[0], str)
    ]  # fmt: skip
    places: dict[tuple[str, ...], list[int]] = {}
    for place in range(num_layers):
        places.setdefault(tuple(kind[place] for kind in kinds), []).append(place)
    kept = [own_places[0] for own_places in places.values()][:MAX_LAYERS]
    if own.get("num_kv_shared_layers"):  # the later ones use keys and values of the earlier ones
        kept += [own_places[-1] for own_places in places.values()][:MAX_LAYERS]
    others = (place for place in range(num_layers) if place not in kept)
    while len(kept) < min(2, num_layers):
        kept.append(next(others))
    return sorted(kept)


def _shrunk_value(name: str, value: Any, own: Mapping[str, Any], kept: Sequence[int]) -> Any:
    if isinstance(value, PretrainedConfig):
        return shrunk(value)
    if isinstance(value, Mapping) and name == "rope_parameters":
        return _shrunk_rope(value, own)
    if name in _SPECIAL_TOKENS:
        return value if value is None else _SPECIAL_TOKENS[name]
    if name in _LAYER_INDICES and value is not None:
        return [i for i, place in enumerate(kept) if place in value]
    if _is_per_layer(value, _num_layers(own)):
        of_layer = name.removesuffix("_per_layer")
        return [_tiny_number(of_layer, value[place], own) for place in kept]
    if name == "attention_types" and value:  # of GPT-Neo
        return [[kinds, 1] for kinds, _ in value]
    if name in _NUM_LAYERS and isinstance(value, int):
        return len(kept)
    if name == "num_kv_shared_layers" and value:
        return len(kept) // 2
    if name == "head_dim" and value is not None and value == own.get("qk_rope_head_dim"):
        return _SIZES["qk_rope_head_dim"]
    if value is None:
        return _NEEDED.get(name)
    if name == "is_decoder":  # of those that are encoders by themselves
        return True
    return _tiny_number(name, value, own)


def _tiny_number(name: str, value: Any, own: Mapping[str, Any]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in _NUM_HEADS:
        return NUM_HEADS
    if name in _NUM_KV_HEADS:
        all_heads = [own[heads] for heads in _NUM_HEADS if own.get(heads) is not None]
        return value if value == 1 else NUM_HEADS if value in all_heads else NUM_HEADS // 2
    if name.endswith(("_token_id", "_token_index")):
        return min(value, VOCABULARY - 1)
    return min(value, _SIZES.get(name, value))


def _shrunk_rope(rope: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters, maybe one set for each type of layers, for the tiny context and heads."""
    shrunk_rope: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            shrunk_rope[name] = _shrunk_rope(value, own)
        elif name == "original_max_position_embeddings":
            shrunk_rope[name] = CONTEXT // 2
        elif name == "mrope_section":
            share = own.get("partial_rotary_factor") or rope.get("partial_rotary_factor", 1.0)
            pairs = int(HEAD_WIDTH * share) // 2
            others = [pairs // len(value)] * (len(value) - 1)
            shrunk_rope[name] = [pairs - sum(others), *others]
        else:
            shrunk_rope[name] = value
    return shrunk_rope


def _num_layers(own: Mapping[str, Any]) -> int:
    return next((own[name] for name in _NUM_LAYERS if isinstance(own.get(name), int)), 0)


def _is_per_layer(value: Any, num_layers: int) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple) and len(value) == num_layers > 1
