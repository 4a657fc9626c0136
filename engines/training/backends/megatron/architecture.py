"""Maps Hugging Face architectures to Megatron-Core by mbridge.

Adds settings that transformers 5 moved, and layers without TransformerEngine. Architectures that
the mapping would change are refused before by `engines.training.supported_models`.
"""

import re
from typing import Any, cast

import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from mbridge.core.llm_bridge import LLMBridge
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engines.attention_needs import rotary_type
from engines.training.backends.megatron.layout import Layout
from infra.errors import ConfigError

_LOCAL_NAMES = (
    (re.compile(r"(layers\.\d+)\.input_layernorm\."), r"\1.self_attention.linear_qkv.layer_norm_"),
    (
        re.compile(r"(experts)\.local_experts\.(\d+)\.(linear_fc\d)\.weight$"),
        r"\1.\3.weight\2",
    ),
)
"""Parameter names of layers without TransformerEngine -> names that mbridge knows."""
_DENSE_NORM = (
    re.compile(r"(layers\.\d+)\.pre_mlp_layernorm\."), r"\1.mlp.linear_fc1.layer_norm_",
)  # fmt: skip


def head_size(config: PretrainedConfig) -> int:
    """Return the width of one attention head."""
    explicit = getattr(config, "head_dim", None)
    return explicit or config.hidden_size // config.num_attention_heads


def rotary_frequencies(config: PretrainedConfig, device: torch.device) -> Tensor:
    """Return (head size / 2,) float32 angles per position, as in transformers."""
    kind = rotary_type(config.to_dict())
    if kind == "default":
        exponents = torch.arange(0, head_size(config), 2, dtype=torch.int64).float()
        theta = cast(Any, config).rope_parameters["rope_theta"]
        return (1.0 / (theta ** (exponents / head_size(config)))).to(device)
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    if scaling != 1.0:
        raise ConfigError(
            "model.path",
            f"got rotary embeddings that scale attention by {scaling}; need 1.0, for the megatron "
            "backend does not; choose another, or set training.backend: fsdp2",
        )
    return frequencies.to(device)


class Architecture:
    """One model's settings and names in Megatron-Core, optionally with recomputed layers."""

    def __init__(
        self,
        config: PretrainedConfig,
        layout: Layout,
        dtype: torch.dtype,
        *,
        recompute: bool = False,
    ) -> None:
        self.hub = config
        self.is_mixture = bool(getattr(config, "num_experts", 0))
        self._bridge = _make_bridge(config, dtype)
        self._bridge.set_extra_args(
            **_settings(config, layout),
            **({"recompute_granularity": "full", "recompute_method": "uniform",
                "recompute_num_layers": 1} if recompute else {}),
        )  # fmt: skip

    @property
    def config(self) -> TransformerConfig:
        """Megatron-Core's configuration."""
        return cast(TransformerConfig, self._bridge.config)

    def hub_names(self, name: str) -> list[str]:
        """Return the hub weights (q, k, v; gate, up; or one) of a parameter of the whole model."""
        for pattern, replacement in _LOCAL_NAMES:
            name = pattern.sub(replacement, name)
        if not self.is_mixture:
            name = _DENSE_NORM[0].sub(_DENSE_NORM[1], name)
        return self._bridge._weight_name_mapping_mcore_to_hf(name)


def _make_bridge(config: PretrainedConfig, dtype: torch.dtype) -> LLMBridge:
    """Return a bridge of its own class, because mbridge writes tied weights into the class."""
    base = _MODEL_REGISTRY[config.model_type]
    names = dict(LLMBridge._DIRECT_MAPPING)
    if config.tie_word_embeddings:
        names["output_layer.weight"] = names["embedding.word_embeddings.weight"]
    return type(base.__name__, (base,), {"_DIRECT_MAPPING": names})(config, dtype=dtype)


def _settings(config: PretrainedConfig, layout: Layout) -> dict[str, Any]:
    """Return settings where mbridge needs TransformerEngine or differs from transformers."""
    settings: dict[str, Any] = {
        "kv_channels": head_size(config),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "sequence_parallel": layout.sequence_parallel,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "perform_initialization": False,
        # The engine divides by global counts: gradients are plain sums.
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        # With virtual pieces, two stages would send to each other in one batch.
        "batch_p2p_comm": layout.virtual == 1,
        "overlap_p2p_comm": layout.virtual > 1,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall",
    }
    if getattr(config, "num_experts", 0):
        settings |= {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            # With `norm_topk_prob`, probabilities of the chosen experts are normalised to 1.
            "moe_router_pre_softmax": not cast(Any, config).norm_topk_prob,
        }
    return settings
