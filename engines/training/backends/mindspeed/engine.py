"""The Megatron engine on Ascend NPUs: MindSpeed replaces parts of Megatron-Core.

The platform imports `mindspeed.megatron_adaptor` before Megatron-Core; each engine then gives
MindSpeed the layout and the fused operators, before any layer is built. Never run on the device:
only the registration and the translation of arguments are tested.
"""

import importlib

from engines.config.training import TrainingConfig
from engines.training.backends.megatron.engine import MegatronEngine
from engines.training.backends.options import MindSpeedOptions
from infra.errors import ConfigError

Argument = bool | int | str


class MindSpeedMegatronEngine(MegatronEngine):
    """Megatron engine under MindSpeed."""

    def initialize(self, *, load_weights: bool = True) -> None:
        """Patch Megatron-Core by MindSpeed, then build this rank's part of the model."""
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
    """Return the arguments of MindSpeed's `repatch`, named as its command line options.

    They do not cover attention, which is this project's packed attention.

    Raises:
        ConfigError: TransformerEngine is requested, which does not exist for this device.
    """
    options = MindSpeedOptions.model_validate(training.options)
    if options.transformer_engine:
        raise ConfigError(
            "training.options.transformer_engine", "got true; npu lacks it; set it to false"
        )
    return {
        "tensor_model_parallel_size": training.tensor_parallel_size,
        "pipeline_model_parallel_size": training.pipeline_parallel_size,
        "context_parallel_size": training.context_parallel_size,
        "expert_model_parallel_size": training.expert_parallel_size,
        "sequence_parallel": training.sequence_parallel and training.tensor_parallel_size > 1,
        # Unused: the packed attention does its own context parallelism.
        "context_parallel_algo": "megatron_cp_algo",
        "use_flash_attn": False,
        "use_fused_rmsnorm": options.fused_rms_norm,
        "use_fused_swiglu": options.fused_swiglu,
        "use_fused_rotary_pos_emb": options.fused_rotary,
        "use_ascend_mc2": options.overlap_tensor_parallel,
    }
