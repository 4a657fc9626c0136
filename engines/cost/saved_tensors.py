"""Bytes that the backward pass of a micro-batch needs, besides parameters.

Counted for the decoder layers of transformers as autograd saves them: a norm keeps its input in
float32, its normalized value and its result; attention its query, key, value and result; a gated
feed-forward layer its two inner products, the activation and their product. Fused kernels and
compiled layers keep less.
"""

from engines.config.training import TrainingConfig
from engines.cost.model_shape import ModelShape

_FLOAT = 4
TILE_BYTES = 3 * 2**26
"""Tiles of logits that exist at a time with `chunked_logprobs`, in float32."""
TILE_COLUMNS = 1 << 15
"""Tokens of the vocabulary in a tile, whose weight gradients are summed in float32."""


def saved_bytes(shape: ModelShape, training: TrainingConfig, num_tokens: int) -> int:
    """Return the bytes of a micro-batch of `num_tokens` on one rank, at the peak."""
    layer = layer_bytes(shape, training)
    num_layers = shape.num_layers
    kept = layer * num_layers
    if training.activation_offload:
        kept = layer
    elif training.gradient_checkpointing:
        # The input of each layer, and everything of the one that is computed again.
        kept = num_layers * _stream(shape.hidden_size * dtype_bytes(training), training) + layer
    return int(num_tokens * kept) + head_bytes(shape, training, num_tokens)


def dtype_bytes(training: TrainingConfig) -> int:
    """Return the bytes of a number in `training.dtype`."""
    return 2 if training.dtype == "bfloat16" else _FLOAT


def layer_bytes(shape: ModelShape, training: TrainingConfig) -> float:
    """Return the bytes of one token in the largest layer."""
    number = dtype_bytes(training)
    is_fused = training.use_liger or training.use_torch_compile
    hidden = shape.hidden_size
    # Input (in float32 unless a kernel is fused), normalized value, result.
    norm = number * 2 * hidden if is_fused else (_FLOAT + 2 * number) * hidden
    heads = shape.query_width + shape.key_width
    attention = number * (2 * shape.query_width + shape.key_width + shape.value_width)
    attention += _FLOAT * shape.num_heads  # the log of the softmax's sum
    if shape.has_qk_norm:
        attention += number * 2 * heads if is_fused else (_FLOAT + number) * heads
    num_inner = 3 if is_fused else 4
    inner = number * num_inner * shape.mlp_width
    if shape.num_sparse_layers:
        # Each chosen expert has its own copy of the token and its own result.
        width = num_inner * shape.expert_width + 2 * hidden
        sparse = number * shape.num_chosen * width + 3 * _FLOAT * shape.num_experts
        shared = shape.linears["gate_proj"][1] if "gate_proj" in shape.linears else 0
        inner = max(inner, sparse + number * num_inner * shared)
    parts = training.tensor_parallel_size
    return _stream(2 * norm, training) + (attention + inner) / parts


def _stream(num_bytes: float, training: TrainingConfig) -> float:
    """Return the part on one rank of tensors between matrices."""
    is_shared = training.sequence_parallel and training.tensor_parallel_size > 1
    return num_bytes / training.tensor_parallel_size if is_shared else num_bytes


def head_bytes(shape: ModelShape, training: TrainingConfig, num_tokens: int) -> int:
    """Return the bytes of the last norm, the output head and its gradients."""
    number, hidden = dtype_bytes(training), shape.hidden_size
    # The norm's three, the predicting rows, and their gradient in float32.
    rows = num_tokens * hidden * (2 * _FLOAT + 3 * number)
    if shape.num_outputs == 1:
        return rows
    if not training.chunked_logprobs:
        # Logits, their copy in float32, and its gradient.
        return rows + num_tokens * shape.vocab_size * (number + 2 * _FLOAT)
    columns = min(shape.vocab_size, TILE_COLUMNS) // training.tensor_parallel_size
    tiles = min(TILE_BYTES, 3 * _FLOAT * num_tokens * shape.vocab_size)
    return rows + tiles + _FLOAT * columns * hidden
