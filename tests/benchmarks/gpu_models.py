"""Models and sizes of the GPU benchmarks: Qwen3 shapes with random weights, and their FLOPs."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging

EOS_TOKEN_ID = 1


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with tied embeddings, and the batch of full rows that SFT trains it on."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    sequence_length: int
    num_sequences: int

    def config(self) -> Qwen3Config:
        """The configuration, in float32."""
        config = Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            max_position_embeddings=self.sequence_length,
            tie_word_embeddings=True,
            eos_token_id=EOS_TOKEN_ID,
            pad_token_id=0,
        )
        config.architectures = ["Qwen3ForCausalLM"]
        config.dtype = torch.float32
        return config

    @property
    def num_weights(self) -> int:
        """Weights that multiply; the tied embedding counts once, as the output layer."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * layer + self.hidden_size * self.vocab_size

    def flops_per_token(self, sequence_length: int | None = None) -> float:
        """Of a forward and a backward pass over full rows, without recomputation.

        `sequence_length` is by default that of the SFT batch. Causal attention sees half of it on
        average.
        """
        length = sequence_length or self.sequence_length
        scores = self.num_layers * 2 * self.num_heads * self.head_dim * length / 2
        return 6.0 * (self.num_weights + scores)

    def cache_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Bytes of the keys and values of so many tokens."""
        return num_tokens * self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize


SHAPES = {
    "qwen3-0.6b": Shape(151_936, 1024, 28, 16, 8, 128, 3072, 2048, 8),
    "qwen3-0.6b-narrow": Shape(512, 64, 28, 4, 2, 16, 128, 2048, 8),
    "tiny": Shape(512, 64, 2, 4, 2, 32, 128, 128, 4),
    "tiny-narrow": Shape(512, 16, 2, 1, 1, 32, 32, 128, 4),
}
"""By name. A `-narrow` model has as many tensors as the other, and few bytes."""


def write_model(directory: Path, shape: Shape, device: torch.device, seed: int = 0) -> None:
    """Write configuration and random weights as a Hugging Face directory, without a tokenizer."""
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    with device:
        AutoModelForCausalLM.from_config(shape.config()).save_pretrained(directory)
