"""Models of a few thousand weights on disk, one per shape that has its own traps."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

NUM_WORDS = 38
_SHAPE = {
    "vocab_size": NUM_WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
SHAPES = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": {"tie_word_embeddings": False, **_MIXTURE},
}
"""Model type -> what is peculiar to it; 38 words do not divide over four ranks."""


def write_tiny_models(root: Path) -> None:
    """Write `root/<model type>/` for every shape, with a tokenizer.

    Args:
        root: an existing directory.
    """
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"t{i}" for i in range(36))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    for model_type, peculiar in SHAPES.items():
        config = AutoConfig.for_model(model_type, **_SHAPE, **peculiar)
        config.dtype = torch.float32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # Norms of 1 would hide a norm that is applied twice or not at all.
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel()) + len(name)))
        model.save_pretrained(root / model_type)
        fast.save_pretrained(root / model_type)
