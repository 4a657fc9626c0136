"""`training.options` of the backend megatron. No torch: the plan reads them."""

from engines.config.base import StrictModel


class MegatronOptions(StrictModel):
    """`training.options` of the backend megatron."""

    transformer_engine: bool = False
    """Layers of TransformerEngine, which must be installed, instead of Megatron-Core's own."""
    router_replay: bool = False
    """Train a mixture on the experts that `infer_batch` chose for the same sequences."""
