"""What makes a tiny model fit to be compared: weights, a tokenizer, sequences of its tokens."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_config import VOCABULARY
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from engines.checkpoint.hub_names import named_state

SEED = 11
MATRIX_RMS = 0.1
"""Of every matrix: with a width of 64 a layer hands on 0.8 of its input's scale."""


@torch.no_grad()
def spread_weights(model: nn.Module) -> None:
    """Give every matrix one scale, and move what starts at 0 or 1 alike: it would hide mistakes."""
    for name, tensor in named_state(model):
        if not tensor.is_floating_point():
            continue
        if tensor.dim() < 2:
            tensor.add_(0.1 * torch.sin(torch.arange(tensor.numel()) + len(name)).view_as(tensor))
        elif not bool(tensor.any()):
            tensor.normal_(std=MATRIX_RMS)
        else:
            tensor.mul_(MATRIX_RMS / tensor.square().mean().sqrt())


def write_tokenizer(directory: Path) -> None:
    """Save a tokenizer of as many words as the tiny vocabulary has."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"t{i}": i for i in range(3, VOCABULARY)}}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    ).save_pretrained(directory)


def random_sequences(lengths: Sequence[int]) -> list[list[int]]:
    """Token ids that are no special ones, the same at every call."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randint(3, VOCABULARY - 8, (n,), generator=generator).tolist() for n in lengths]
