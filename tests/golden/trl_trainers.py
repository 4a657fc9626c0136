"""TRL's trainers around a tiny model whose weights no random number decides."""

import os
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # before TRL is imported

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl_inputs import fill

MODEL = {
    "vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16, "eos_token_id": 1,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
TRAINERS = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "gmpo": (GMPOTrainer, GMPOConfig),
    "rloo": (RLOOTrainer, RLOOConfig),
}
MAX_LENGTH = 8


def write_model(directory):
    """A Qwen3 of a few thousand parameters and a tokenizer of words."""
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 16)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(directory)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**MODEL))
    fill(model)
    model.save_pretrained(directory)


def make_trainer(directory, kind, settings, num_answers, group_size, rewards=None, parts=1):
    """TRL's trainer, in training mode as inside of its loop."""
    trainer_class, config_class = TRAINERS[kind]
    config = config_class(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        gradient_checkpointing=False, per_device_train_batch_size=num_answers // parts,
        gradient_accumulation_steps=parts, num_generations=group_size,
        max_completion_length=MAX_LENGTH, **settings,
    )  # fmt: skip
    trainer = trainer_class(
        model=str(directory),
        reward_funcs=rewards or [lambda completions, **_: [0.0] * len(completions)],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["w2"]}),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = parts
    return trainer


def make_sft_trainer(directory):
    """TRL's, likewise."""
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [[2, 3, 4]]})
    trainer = SFTTrainer(str(directory), args=config, train_dataset=rows)
    trainer.model.train()
    return trainer


def padded(rows, fill, dtype=torch.float64):
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


def ragged(values, rows):
    return [row[: len(like)] for row, like in zip(values.tolist(), rows, strict=True)]
