"""Translates a Hugging Face configuration into a TorchTitan decoder with packed attention.

TorchTitan's Qwen3 decoder matches transformers for dense models with rotary embeddings in halves;
without the norms of queries and keys it is Llama's. Other architectures are refused: experts,
scaled rotary embeddings, biases, sliding windows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.protocols.module import Module
from transformers import AutoConfig

from engines.architecture import text_settings
from engines.training.backends.torchtitan.supported import HAS_HEAD_NORMS, check_model
from engines.training.model.attention import Packing, packed_attention

# Weights are read from files: no initialization is needed.
_INIT = {"weight": skip_param_init}


class PackedAttention(Module):
    """Inner attention over packed sequences; TorchTitan's own trains on GPUs only."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Empty configuration."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Packing,
        scale: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend within each sequence: (1, T, heads, head_dim) of this rank's heads in and out."""
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out, _ = packed_attention(self, q, k, v, None, packing=attention_masks, scaling=scale)
        return out


def decoder_config(hf_dir: Path, *, sequence_parallel: bool) -> Qwen3Model.Config:
    """Return the configuration whose `build` creates TorchTitan's decoder for a model.

    Raises:
        ConfigError: TorchTitan's decoder would compute differently from transformers.
    """
    config = AutoConfig.from_pretrained(hf_dir, trust_remote_code=False)
    check_model(hf_dir, text_settings(config))
    dim, vocabulary = config.hidden_size, config.vocab_size
    decoder = Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=_norm(dim, config.rms_norm_eps),
        enable_weight_tying=config.tie_word_embeddings,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init=_INIT
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=_INIT),
        # One object per layer: `set_qwen3_sharding_config` modifies each.
        layers=[_block(config) for _ in range(config.num_hidden_layers)],
    )
    set_qwen3_sharding_config(decoder, enable_sp=sequence_parallel, enable_ep=False)
    return decoder


def _block(config: Any) -> Qwen3TransformerBlock.Config:
    dim, eps = config.hidden_size, config.rms_norm_eps
    head_dim = getattr(config, "head_dim", None) or dim // config.num_attention_heads
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(dim, eps),
        ffn_norm=_norm(dim, eps),
        attention=make_gqa_config(
            dim=dim,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            wqkv_param_init=_INIT,
            wo_param_init=_INIT,
            inner_attention=PackedAttention.Config(),
            rope=CosSinRoPE.Config(
                dim=head_dim,
                max_seq_len=config.max_position_embeddings,
                theta=config.rope_parameters["rope_theta"],
            ),
            qk_norm=_norm(head_dim, eps) if HAS_HEAD_NORMS[config.model_type] else None,
        ),
        feed_forward=make_ffn_config(
            dim=dim,
            hidden_dim=config.intermediate_size,
            w1_param_init=_INIT,
            w2w3_param_init=_INIT,
        ),
    )


def _norm(dim: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=dim, eps=eps, param_init=_INIT)
