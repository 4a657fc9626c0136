"""Megatron-Core on Ascend NPUs through MindSpeed."""
