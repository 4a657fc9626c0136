"""Translates a Hugging Face configuration into a TorchTitan decoder with packed attention.

TorchTitan's Qwen3 decoder matches that of transformers for dense models; without the norms of
queries and keys it is Llama's. Other architectures are refused: experts, scaled rotary embeddings,
biases, sliding windows.

Import it inside the platform's scope for TorchTitan.
Promises: the decoder is sharded over the ranks; its weights are undefined.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.protocols.module import Module
from transformers import AutoConfig

from engines.architecture import text_settings
from engines.training.backends.transformers.build import recompute
from engines.training.model.attention import Packing, packed_attention
from engines.training.spec import EngineSpec
from engines.training.supported_models import TITAN_HEAD_NORMS, check_torchtitan

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
    check_torchtitan(hf_dir, text_settings(config))
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
            qk_norm=_norm(head_dim, eps) if TITAN_HEAD_NORMS[config.model_type] else None,
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


_SPMD_BACKEND = "partial_dtensor"
"""TorchTitan's form of tensor parallelism whose parameters are DTensors."""


def sharded_decoder(spec: EngineSpec, reshard_after_forward: str) -> tuple[nn.Module, list[str]]:
    """Build and shard the decoder; return it and its parameters' hub names. Collective."""
    training, device = spec.training, spec.platform.device()
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=training.replicate_size,
        tensor_parallel_degree=training.tensor_parallel_size,
        enable_sequence_parallel=training.sequence_parallel,
        spmd_backend=_SPMD_BACKEND,
    )
    config = decoder_config(spec.hf_dir, sequence_parallel=training.sequence_parallel)
    set_spmd_backend(_SPMD_BACKEND)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = config.build()
    named = dict(model.named_parameters())
    on_hub = Qwen3StateDictAdapter(config, None).to_hf(dict(named))
    hub_names = {id(parameter): name for name, parameter in on_hub.items()}
    names = [hub_names[id(parameter)] for parameter in named.values()]
    model = parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        skip_dp=True,
    )
    for layer in model.layers.values() if training.recomputes_layers else ():
        recompute(layer)
    # Tensor parallelism unties tied weights. FSDP would treat them as two, and update only one
    # of them if the shards are uneven.
    _tie(model)
    replicate = ["dp_replicate"] if training.replicate_size > 1 else []
    apply_fsdp_to_decoder(
        model,
        dims.get_mesh([*replicate, "fsdp"]),
        param_dtype=getattr(torch, training.dtype),
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy=reshard_after_forward,
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A plain sum: gloo lacks the scaled sum that TorchTitan requests.
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    _tie(model)
    with torch.no_grad():
        model.init_states(buffer_device=device)
    return model, names


def _tie(model: Any) -> None:
    """Tie the head's weight to the embedding, so that FSDP sees one parameter."""
    if model.enable_weight_tying:
        model.lm_head.weight = model.tok_embeddings.weight
