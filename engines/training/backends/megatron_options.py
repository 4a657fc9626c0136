"""`training.options` of the backend megatron, without torch."""

from engines.config.base import StrictModel


class MegatronOptions(StrictModel):
    """`training.options` of the backend megatron."""

    transformer_engine: bool = False
    """Use layers of TransformerEngine (which must be installed), not Megatron-Core's own."""
    router_replay: bool = False
    """Train a mixture on the experts that `infer_batch` chose for the same sequences."""
