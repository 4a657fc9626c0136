"""The training backend on Megatron-Core on Ascend through MindSpeed."""
