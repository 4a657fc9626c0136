"""Extension of vLLM's workers: reads a weight source in the worker's process.

Promises: those of `engines.rollout.served.weight_receiver`; vLLM must report every weight as
loaded; after an error the model can take the next update. Errors travel as text, since vLLM would
reduce them to a bare `Exception`.
"""

from typing import Any

from engines.errors import WeightSyncError
from engines.rollout.served.weight_receiver import NamedTensors, carry_out
from infra.faults import fault

_BASE = ".base_layer."


class WorkerExtension:
    """Mixed into vLLM's worker class, whose attributes it uses."""

    get_model: Any
    model_config: Any
    vllm_config: Any
    rank: int

    def receive_weights(self, order: str) -> str:
        """Execute an order of `served.weight_receiver.order_of`; return the reply for `agreed`."""
        from vllm.config import set_current_vllm_config

        def load(tensors: NamedTensors) -> None:
            with set_current_vllm_config(self.vllm_config):
                _reload(self.get_model(), self.model_config, tensors)

        return carry_out(order, load, self.rank)


def _reload(model: Any, model_config: Any, tensors: NamedTensors) -> None:
    """Load a whole checkpoint into a model that was processed for its kernels.

    `model.load_weights` alone is not enough: on a CPU the original parameters are gone.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    held = {name for name, _ in model.named_parameters()}
    if on_cpu:
        _forget_expert_kernels(model)
    initialize_layerwise_reload(model)
    # Computed parameters are gone now, and tied ones are held once. An adapter's layer holds its
    # base layer as `base_layer`, but weights are loaded under its own name.
    held &= {name for name, _ in model.named_parameters()}
    wanted = {name.replace(_BASE, ".") for name in held}
    try:
        loaded = model.load_weights(tensors)
    finally:
        # After an error too: else the next update would find leftovers of this one.
        finalize_layerwise_reload(model, model_config)
    if missing := sorted(wanted - (wanted if loaded is None else loaded)):
        raise WeightSyncError(f"vLLM got no weights for {', '.join(missing[:3])}")
    if on_cpu and not fault("vllm.head_refresh"):
        _refresh_packed_heads(model)


def _forget_expert_kernels(model: Any) -> None:
    """Have the expert kernels rebuilt on a CPU, as at the first load.

    vLLM 0.32 packs experts when it builds their kernel; with an existing kernel it silently writes
    the new weights unpacked. No graph on a CPU has captured a kernel.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            module.quant_method.moe_kernel = None


def _refresh_packed_heads(model: Any) -> None:
    """Pack the output heads anew, on a CPU.

    vLLM 0.32 omits this: a head that is tied to the embedding would keep a packed copy of the old
    weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
