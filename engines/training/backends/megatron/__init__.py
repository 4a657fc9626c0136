"""Megatron-Core: tensor, pipeline, context and expert parallelism."""
