"""The models of the benchmarks: Qwen3 of about 0.85 M parameters and a word-level tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils import logging

PAD_TOKEN_ID, EOS_TOKEN_ID, NUM_SPECIAL = 0, 1, 2


def word(token_id: int) -> str:
    """The word whose token id is `token_id`."""
    return f"w{token_id}"


def write_model(
    directory: Path,
    *,
    vocab_size: int,
    intermediate_size: int,
    max_length: int,
    never_stops: bool,
    hidden_size: int = 128,
    num_layers: int = 4,
) -> int:
    """Write weights, configuration and tokenizer.

    Args:
        directory: created.
        vocab_size: of the model; with a small one a random model soon draws the end token.
        intermediate_size: of the feed-forward layers.
        max_length: context in tokens.
        never_stops: make the end token one that the model cannot draw, for equal lengths.
        hidden_size: width of the model.
        num_layers: of the model.

    Returns:
        Number of parameters.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a value head that no file holds is no news
    eos_token_id = vocab_size if never_stops else EOS_TOKEN_ID
    directory.mkdir(parents=True)
    words = {"<pad>": PAD_TOKEN_ID, "<eos>": EOS_TOKEN_ID}
    words |= {word(i): i for i in range(NUM_SPECIAL, vocab_size)} | {"<never>": vocab_size}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<never>" if never_stops else "<eos>",
    ).save_pretrained(directory)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=intermediate_size,
        tie_word_embeddings=True,
        max_position_embeddings=max_length,
        eos_token_id=eos_token_id,
        pad_token_id=PAD_TOKEN_ID,
    )
    config.dtype = torch.float32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = eos_token_id
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())
