"""The Megatron engine on Ascend NPUs: MindSpeed replaces parts of Megatron-Core.

The platform imports `mindspeed.megatron_adaptor` before Megatron-Core is first imported; then
MindSpeed is told the layout and which fused operators to put in.
Promises: MindSpeed is told before any layer is built, and told once per engine.
Does not promise that it computes: no machine with the device was at hand. Only the registration
and the translation of arguments are tested.
"""

import importlib

from engines.config.training import TrainingConfig
from engines.training.backends.megatron.engine import MegatronEngine
from engines.training.backends.mindspeed.options import MindSpeedOptions
from infra.errors import ConfigError

Argument = bool | int | str


class MindSpeedMegatronEngine(MegatronEngine):
    """`MegatronEngine` under MindSpeed."""

    def initialize(self, *, load_weights: bool = True) -> None:
        """Tell MindSpeed what to replace, then build this rank's part of the model."""
        arguments = mindspeed_arguments(self.spec.training)
        with self.spec.platform.library_scope("megatron"):
            try:
                adaptor = importlib.import_module("mindspeed.megatron_adaptor")
            except ImportError as error:
                raise ConfigError(
                    "training.backend", f"megatron on npu needs MindSpeed ({error})"
                ) from error
            adaptor.repatch(arguments)
        super().initialize(load_weights=load_weights)


def mindspeed_arguments(training: TrainingConfig) -> dict[str, Argument]:
    """What MindSpeed is told, by the names of its own command line.

    Attention is not among them: it is this project's packed attention.

    Args:
        training: layout and options.

    Returns:
        Arguments of `repatch`.

    Raises:
        ConfigError: TransformerEngine was asked for, which there is none of on this device.
    """
    options = MindSpeedOptions.model_validate(training.options)
    if options.transformer_engine:
        raise ConfigError(
            "training.options.transformer_engine", "got true; there is none on npu; set it to false"
        )
    return {
        "tensor_model_parallel_size": training.tensor_parallel_size,
        "pipeline_model_parallel_size": training.pipeline_parallel_size,
        "context_parallel_size": training.context_parallel_size,
        "expert_model_parallel_size": training.expert_parallel_size,
        "sequence_parallel": training.sequence_parallel and training.tensor_parallel_size > 1,
        # Tokens are exchanged for heads around the packed attention: MindSpeed has no part in it.
        "context_parallel_algo": "megatron_cp_algo",
        "use_flash_attn": False,
        "use_fused_rmsnorm": options.fused_rms_norm,
        "use_fused_swiglu": options.fused_swiglu,
        "use_fused_rotary_pos_emb": options.fused_rotary,
        "use_ascend_mc2": options.overlap_tensor_parallel,
    }
