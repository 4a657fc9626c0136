"""The VeOmni engine: VeOmni's own model code and its FSDP2, on any platform that VeOmni supports.

Promises: the model is VeOmni's patched class with packed attention; weights are read slice by
slice, and a missing one is an error (VeOmni itself would leave it random). Ulysses is that of the
packed attention; VeOmni's needs flash-attn.
Not covered: expert parallelism (VeOmni's fused kernels need a GPU) and architectures other than
causal text models. Needs the job environment veomni.
"""

import logging
from typing import cast

import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from engines.training.backends.fsdp.engine import FSDP2Engine
from engines.training.backends.options import VeOmniOptions
from engines.training.backends.transformers.build import build_model
from engines.training.model.attention import ATTENTION_NAME
from infra.errors import ConfigError


class VeOmniEngine(FSDP2Engine):
    """Engine on VeOmni's models and `parallelize_model_fsdp2`."""

    def _is_sharded(self) -> bool:
        return True

    def _build_model(self, *, load_weights: bool) -> PreTrainedModel:
        _set_parallel_state(self.spec.platform.device_name, self.spec.training.replicate_size)
        return build_model(
            self.spec, self._shard, load_weights=load_weights, architecture=self._architecture
        )

    def _architecture(self, config: PretrainedConfig) -> PreTrainedModel:
        """Return VeOmni's model for the configuration, on the meta device."""
        from veomni.models import build_foundation_model
        from veomni.models.loader import MODELING_REGISTRY

        if config.model_type not in MODELING_REGISTRY.valid_keys():
            known = ", ".join(sorted(MODELING_REGISTRY.valid_keys()))
            raise ConfigError("model.path", f"got a {config.model_type}; veomni has: {known}")
        head = "TokenClassification" if self.spec.model_type == "value_model" else "CausalLM"
        config.architectures = [f"For{head}"]
        return cast(
            PreTrainedModel,
            build_foundation_model(
                config,
                torch_dtype="float32",
                init_device="meta",
                ops_implementation=_kernels(self._options),
            ),
        )

    @property
    def _options(self) -> VeOmniOptions:
        return VeOmniOptions.model_validate(self.spec.training.options)

    def _shard(self, model: PreTrainedModel) -> None:
        """Shard by VeOmni's FSDP2: one unit per decoder layer, one for the rest."""
        # `build_parallelize_model` would not apply FSDP and its casts to a single rank.
        from veomni.arguments import MixedPrecisionConfig
        from veomni.distributed.torch_parallelize import parallelize_model_fsdp2

        parallelize_model_fsdp2(
            model,
            weights_path=None,
            should_skip_hf_weight_load=True,
            enable_reshard_after_forward=self._options.reshard_after_forward,
            mixed_precision=MixedPrecisionConfig(
                param_dtype=self.spec.training.dtype, reduce_dtype="float32"
            ),
            init_device="meta",
        )


def _set_parallel_state(device_name: str, replicate_size: int) -> None:
    """Set VeOmni's global layout of the ranks."""
    # VeOmni logs on import, and warns of intended differences: another attention, and buffers
    # that are filled later.
    logging.disable(logging.WARNING)
    try:
        from veomni.distributed.parallel_state import clear_parallel_state, init_parallel_state
    finally:
        logging.disable(logging.NOTSET)
    logging.getLogger("veomni").setLevel(logging.ERROR)
    # A stored layout may belong to a closed process group.
    clear_parallel_state()
    size = dist.get_world_size()
    init_parallel_state(
        dp_size=size,
        dp_replicate_size=replicate_size,
        dp_shard_size=size // replicate_size,
        dp_mode="fsdp2",
        device_type=device_name,
    )


def _kernels(options: VeOmniOptions) -> object:
    """Return VeOmni's kernel settings: packed attention, those of the options, else eager."""
    from dataclasses import fields

    from veomni.arguments.arguments_types import OpsImplementationConfig

    kept = {"attn_implementation", "qat_implementation"}
    names = {field.name for field in fields(OpsImplementationConfig)} - kept
    chosen = dict.fromkeys((name for name in names if name.endswith("_implementation")), "eager")
    chosen |= {
        "rms_norm_implementation": options.rms_norm,
        "swiglu_mlp_implementation": options.swiglu_mlp,
        "rotary_pos_emb_implementation": options.rotary_pos_emb,
    }
    return OpsImplementationConfig(attn_implementation=ATTENTION_NAME, **chosen)
