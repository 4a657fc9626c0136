"""Builds pipeline stages of a hub model in Megatron-Core, with settings and names by mbridge.

Adds settings that transformers 5 moved, and layers without TransformerEngine. Architectures that
would be computed differently are refused earlier, by `engines.training.supported_models`.

Attention is `packed_attention`, with Ulysses (arXiv:2309.14509) for context parallelism; the other
layers are Megatron-Core's or TransformerEngine's. The last stage returns readouts of the requested
positions; `chunked_logprobs` avoids whole logits.
"""

import re
from dataclasses import dataclass
from typing import Any, cast

import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from mbridge.core.llm_bridge import LLMBridge
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engines.attention_needs import rotary_type
from engines.training.backends.megatron.layout import Layout
from engines.training.backends.megatron.parallel import Place
from engines.training.backends.megatron.router_replay import LayerRoutes, RowRoutes
from engines.training.model.attention import Packing, packed_attention
from engines.training.model.linear_logprobs import Targets, head_rows
from engines.training.model.linear_tiles import tile_elements
from engines.training.model.logprobs import float32_linear
from engines.training.spec import ModelType
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
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


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
            f"got rotary embeddings that scale attention by {scaling}; need 1.0, because the "
            "megatron backend cannot scale it; choose another, or set training.backend: fsdp2",
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
        # A class of its own, because mbridge writes tied weights into the class.
        base, names = _MODEL_REGISTRY[config.model_type], dict(LLMBridge._DIRECT_MAPPING)
        if config.tie_word_embeddings:
            names["output_layer.weight"] = names["embedding.word_embeddings.weight"]
        kind = type(base.__name__, (base,), {"_DIRECT_MAPPING": names})
        self._bridge: LLMBridge = kind(config, dtype=dtype)
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


def _settings(config: PretrainedConfig, layout: Layout) -> dict[str, Any]:
    """Return replacements of mbridge's settings that need TransformerEngine or alter the model."""
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


@dataclass(frozen=True)
class PackedRow:
    """Input of a pipeline stage besides the activations.

    Attributes:
        input_ids_S: int64, this context rank's slice of the padded row.
        packing: sequences of the whole padded row.
        rows_N: int64, places in the slice whose hidden states predict `targets`.
        routes: choices of experts to record or repeat; None: routers choose.
        qkv_format: makes Megatron-Core ignore packing, like `cp_group`.
    """

    input_ids_S: Tensor
    position_ids_S: Tensor
    packing: Packing
    rows_N: Tensor
    targets: Targets
    chunked_logprobs: bool
    routes: RowRoutes | None = None
    qkv_format: str = "sbhd"
    cp_group: None = None


class PackedCoreAttention(MegatronModule):
    """Softmax attention of a packed row, between the projections of a layer."""

    routes: LayerRoutes | None = None
    """Expert choices of the layer's router; `forward` sets their row."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self._scaling = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedRow,
        **unused: Any,
    ) -> Tensor:
        """Attend: (S, 1, heads, head_dim) of this rank to (S, 1, heads * head_dim)."""
        if self.routes is not None:
            self.routes.row = packed_seq_params.routes
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out, _ = packed_attention(
            self, q, k, v, attention_mask, packing=packed_seq_params.packing, scaling=self._scaling
        )
        return out.squeeze(0).flatten(1).unsqueeze(1)


class RowNorm(nn.RMSNorm):
    """RMS norm whose gradient Megatron-Core sums over slices of the sequence."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        device = torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel


class ValueHead(nn.Module):
    """Head that maps a hidden state to one value, initially 0."""

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.new_zeros(1, width))
        self.bias = nn.Parameter(like.new_zeros(1))

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Return (1, N) float32 values of the hidden states."""
        return float32_linear(hidden_ND, self.weight, self.bias).T


class PackedModel(GPTModel):
    """One pipeline stage, or one of its virtual pieces; `piece` is None for a whole stage."""

    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        place: Place,
        model_type: ModelType,
        *,
        first: bool,
        last: bool,
        piece: int | None,
        use_transformer_engine: bool = False,
    ) -> None:
        hub, config = architecture.hub, architecture.config
        is_tied = bool(hub.tie_word_embeddings) and model_type == "language_model"
        spec = _layers(config, piece, use_transformer_engine=use_transformer_engine)
        super().__init__(
            config=config,
            transformer_layer_spec=cast(Any, spec),
            vocab_size=layout.padded_vocabulary(hub.vocab_size),
            max_sequence_length=cast(Any, hub).max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=is_tied,
            position_embedding_type="none",
            vp_stage=piece,
        )
        like = next(self.parameters())
        self._frequencies = rotary_frequencies(hub, like.device)
        self._place = place
        self._vocab_size = hub.vocab_size
        self.score: ValueHead | None = None
        if last and model_type == "value_model":
            del self.output_layer
            self.score = ValueHead(config.hidden_size, like)

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        row: PackedRow = kwargs["packed_seq_params"]
        hidden, _, *rest = super()._preprocess(*args, **kwargs)
        if hidden is not None:
            # Plain strides: others change the kernel of products with frozen weights.
            hidden = hidden.squeeze(1).unsqueeze(1)
            if torch.is_grad_enabled() and not hidden.requires_grad:
                hidden.requires_grad_()  # recomputed layers over frozen ones need it to train
        angles = row.position_ids_S[:, None].float() * self._frequencies
        return hidden, torch.cat([angles, angles], dim=1)[:, None, None, :], *rest

    def _postprocess(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedRow, **unused: Any
    ) -> Tensor:
        """Return (K, N) float32 on the last stage, activations on the others."""
        if not self.post_process:
            return hidden_states
        row, config = packed_seq_params, self.config
        is_value = self.score is not None
        if config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=not is_value
            )
        elif not is_value:
            hidden_states = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
        hidden_ND = hidden_states.squeeze(1)[row.rows_N]
        if self.score is not None:
            return self.score(hidden_ND)
        # This rank's (V / t, D) rows of the language model's head.
        weight_VD = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else cast(Any, self.output_layer).weight
        )
        first = self._place.tensor * weight_VD.shape[0]
        return head_rows(
            hidden_ND,
            weight_VD[: max(0, min(weight_VD.shape[0], self._vocab_size - first))],
            row.targets,
            group=self._place.tensor_group,
            first_token=first,
            chunk_elements=tile_elements(hidden_ND, chunked=row.chunked_logprobs),
        )


def _layers(
    config: TransformerConfig, piece: int | None, *, use_transformer_engine: bool
) -> TransformerBlockSubmodules:
    kind: dict[str, Any] = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": False,
        "qk_layernorm": config.qk_layernorm,
    }
    if use_transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(**kind)
    else:
        spec = get_gpt_layer_local_spec(**kind, normalization="RMSNorm")
    layer = cast(Any, spec.submodules)
    attention = layer.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if not use_transformer_engine:
        layer.input_layernorm = layer.pre_mlp_layernorm = RowNorm
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RowNorm
    return TransformerBlockSubmodules(
        layer_specs=[spec] * get_num_layers_to_build(config, vp_stage=piece),
        layer_norm=cast(Any, RowNorm),
    )
