"""Bytes of one rank from shapes: what the audit has to count, written down independently of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, lcm

FLOAT, INDEX = 4, 8
"""Bytes of a float32 and of an int64."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with an output head of its own."""

    vocabulary: int = 128
    width: int = 64
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 192

    @property
    def config(self) -> dict[str, int | bool]:
        """Settings of transformers."""
        return {
            "vocab_size": self.vocabulary, "hidden_size": self.width,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.inner, "max_position_embeddings": 4096, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 1, "tie_word_embeddings": False,
        }  # fmt: skip

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Numbers in one layer."""
        attention = self.width * (2 * self.queries + 2 * self.keys) + 2 * self.head_dim
        return attention + 3 * self.width * self.inner + 2 * self.width

    @property
    def root_weights(self) -> int:
        """Numbers of the embedding, the last norm and the head."""
        return 2 * self.vocabulary * self.width + self.width

    @property
    def weights(self) -> int:
        return self.layers * self.layer_weights + self.root_weights

    @property
    def megatron_buffer(self) -> tuple[int, int]:
        """Numbers in Megatron's buffer of weights over 1 rank, and per layer the padding.

        Each tensor starts at a multiple of 64.
        """
        padding = 2 * (ceil(self.head_dim / 64) * 64 - self.head_dim)
        return self.weights + self.layers * padding, padding

    def padded(self, num_ranks: int) -> int:
        """The buffer's end is a multiple of 128 and of the ranks."""
        whole = lcm(num_ranks, 128)
        return ceil(self.megatron_buffer[0] / whole) * whole


def layer_bytes(shape: Shape, num_bytes: int) -> int:
    """Saved per token by a layer of transformers' Qwen3 that computes in `num_bytes`.

    Norms (twice over the width): input in float32, 1 / rms, normalized, weighted; of queries and
    keys without the weighted ones, which the rotation does not save. Attention: queries, keys,
    values, output, log of the sums. Feed-forward layer: gate, silu(gate), up, their product.
    """
    width, queries, keys = shape.width, shape.queries, shape.keys
    norms = 2 * ((FLOAT + 2 * num_bytes) * width + FLOAT)
    of_heads = (FLOAT + num_bytes) * (queries + keys) + FLOAT * (shape.heads + shape.kv_heads)
    attention = num_bytes * 2 * (queries + keys) + FLOAT * shape.heads
    return norms + of_heads + attention + num_bytes * 4 * shape.inner


def megatron_layer_bytes(shape: Shape) -> int:
    """Saved per token by a layer of Megatron-Core in float32.

    Norms as above. Queries are copied out of the joint projection, whose storage stays for keys
    and values. Cosines and sines are made anew for queries and for keys. The feed-forward layer
    keeps gate and up (one storage), silu(gate), up once more, and their product.
    """
    width, queries, keys = shape.width, shape.queries, shape.keys
    norms = 2 * (3 * width + 1)
    of_heads = 2 * queries + (queries + 2 * keys) + keys + shape.heads + shape.kv_heads
    attention = 2 * queries + keys + shape.heads + 4 * shape.head_dim
    return FLOAT * (norms + of_heads + attention + 5 * shape.inner)


def torchtitan_layer_bytes(shape: Shape) -> int:
    """Saved per token by a layer of TorchTitan in float32.

    As of transformers, and the cosines and sines that each layer takes from its own table.
    """
    return layer_bytes(shape, FLOAT) + 2 * FLOAT * shape.head_dim


LAYER_BYTES = {"megatron": megatron_layer_bytes, "torchtitan": torchtitan_layer_bytes}
"""Backends whose layers are not those of transformers, in float32."""
KNOWN = ("fsdp2", "fsdp", "megatron", "veomni", "automodel", "torchtitan")
"""Backends that the formulas describe."""


def saved_bytes(
    shape: Shape, backend: str, *, tokens: int, predicted: int, recompute: bool, num_bytes: int = 4
) -> int:
    """Return the most that autograd keeps for one micro-batch, whatever their number.

    Behind the layers: the input of the last norm and what it makes of it; the head's hidden states
    and, per predicted token, its place (twice), its id, the log of the sum of exponentials and the
    mask; the loss keeps the mask. With recomputation, either the inputs of all layers and this, or
    the inputs and all of the last layer, whose own input is among the inputs.
    """
    if backend in LAYER_BYTES:
        layer, rotation = LAYER_BYTES[backend](shape), 0
    else:
        layer, rotation = layer_bytes(shape, num_bytes), 2 * num_bytes * shape.head_dim
    behind = tokens * ((FLOAT + num_bytes) * shape.width + FLOAT + FLOAT)
    behind += predicted * (num_bytes * shape.width + 3 * INDEX + 2 * FLOAT)
    if not recompute:
        return tokens * (INDEX + rotation + shape.layers * layer) + behind
    inputs = tokens * (INDEX + shape.layers * num_bytes * shape.width)
    # Further inputs of each layer: Megatron's angles, TorchTitan's places.
    inputs += tokens * {"megatron": FLOAT * shape.head_dim, "torchtitan": INDEX}.get(backend, 0)
    return inputs + max(behind, tokens * (rotation + layer - num_bytes * shape.width))


def state_bytes(shape: Shape, backend: str, num_ranks: int) -> Mapping[str, int]:
    """Return parameters, gradients and moments of a rank; Megatron's moments are summed over ranks.

    FSDP shards all three. Megatron shards the moments only.
    """
    own = FLOAT * shape.weights // num_ranks
    if backend != "megatron":
        return {"parameter_bytes": own, "gradient_bytes": own, "moment_bytes": 2 * own}
    buffer = FLOAT * shape.padded(num_ranks)
    moments = 2 * FLOAT * shape.weights
    return {"parameter_bytes": buffer, "gradient_bytes": buffer, "moment_bytes": moments}


def hidden_bytes(shape: Shape, backend: str, num_ranks: int, *, recompute: bool) -> int:
    """Return what is there in float32 at the peak of a step, and no hook sees.

    fsdp's weights of a unit are views of one tensor. Autograd holds the gradient of the head's view
    until the embedding's joins it. With recomputed layers the peak lies between the two.
    """
    is_held = backend == "fsdp" and num_ranks > 1 and recompute
    return FLOAT * shape.vocabulary * shape.width if is_held else 0


def bucket_bytes(shape: Shape, backend: str, num_ranks: int, num_bytes: int = FLOAT) -> int:
    """Return the largest buckets of a step that shards by FSDP2 and computes in `num_bytes`.

    They are the largest in the backward pass, while the first layer's weights are copied out of
    what was gathered: both are there, and the float32 input of the collective that reduced the
    gradients of the layer behind. What was reduced counts here until the first micro-batch ends.
    Embedding, last norm and head are one unit: the weights stay gathered, and the gradients of norm
    and head wait for the embedding's. TorchTitan's norm and head are a unit, which was reduced at
    once.

    Automodel gathers two layers ahead, so the peak is one layer earlier: while the second layer's
    weights are copied out, what was gathered for the first is there, too. Its head is a unit,
    reduced at once; the last norm is the root, whose weight and gradient wait for the end.

    One rank copies its weights without a collective. The peak is where the gradients of a layer,
    whose weights FSDP2 has freed, are copied into the float32 input: both are there.
    """
    layer, norm, table = shape.layer_weights, shape.width, shape.vocabulary * shape.width
    copies, reduced, root = 2, (shape.layers - 1) * layer, shape.root_weights + norm + table
    if num_ranks == 1:
        copies, reduced = 1, 0
    elif backend == "torchtitan":
        reduced, root = reduced + norm + table, 0
    elif backend == "automodel":
        copies, reduced, root = 3, reduced - layer + table, 2 * norm
    return num_bytes * (copies * layer + root) + FLOAT * (layer + reduced // num_ranks)
