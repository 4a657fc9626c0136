"""TRL as a peer; runs in the environment of `requirements-trl.txt` and imports no code of ours.

Reads one JSON request per line and answers each with one line. Trainers run with what TRL
chooses, except: float32 on the CPU, no gradient checkpointing, no logging, no saving.
"""

import json
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peak_saved import saved_bytes
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

ANSWER = "ANSWER "
WARM_UP_STEPS = 1


class StepTimes(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())

    def seconds_per_step(self):
        timed = self.ends[WARM_UP_STEPS - 1 :]
        return (timed[-1] - timed[0]) / (len(timed) - 1)


class CountTokens:
    """Counts the real tokens of the batches that a collator makes."""

    def __init__(self, collator):
        self.collator = collator
        self.counts = []

    def __call__(self, examples):
        self.counts.append(sum(len(example["input_ids"]) for example in examples))
        return self.collator(examples)


def shared_settings(request, steps):
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": steps + WARM_UP_STEPS,
        "learning_rate": request["lr"],
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": request["seed"],
    }


def train(trainer, request):
    """Train; with `saved` in the request also the most bytes that autograd held at a time."""
    if not request.get("saved"):
        trainer.train()
        return {}
    with saved_bytes() as saved:
        trainer.train()
    return {"saved_bytes": saved.peak}


def load(request):
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(request["model"])


def sft(request):
    """Tokens per second of SFTTrainer with packing."""
    model, tokenizer = load(request)
    with open(request["rows"], encoding="utf-8") as file:
        rows = Dataset.from_dict({"input_ids": json.load(file)})
    settings = SFTConfig(
        **shared_settings(request, request["steps"]),
        per_device_train_batch_size=request["rows_per_pass"],
        gradient_accumulation_steps=request["rows_per_step"] // request["rows_per_pass"],
        max_length=request["row_tokens"],
        packing=True,
        packing_strategy=request["strategy"],
    )
    times = StepTimes()
    trainer = SFTTrainer(
        model, args=settings, train_dataset=rows, processing_class=tokenizer, callbacks=[times]
    )
    counter = trainer.data_collator = CountTokens(trainer.data_collator)
    saved = train(trainer, request)
    passes = request["rows_per_step"] // request["rows_per_pass"]
    timed = counter.counts[WARM_UP_STEPS * passes : (WARM_UP_STEPS + request["steps"]) * passes]
    tokens_per_s = sum(timed) / request["steps"] / times.seconds_per_step()
    return {"tokens_per_s": tokens_per_s, "tokens_per_pass": max(timed), **saved}


def pairs(request):
    """Prompt, chosen and rejected answers as text, and the settings of a step."""
    with open(request["rows"], encoding="utf-8") as file:
        prompts, chosen, rejected = zip(*json.load(file), strict=True)
    settings = {
        **shared_settings(request, request["steps"]),
        "per_device_train_batch_size": request["pairs_per_pass"],
        "gradient_accumulation_steps": request["pairs_per_step"] // request["pairs_per_pass"],
        "max_length": None,
    }
    return prompts, chosen, rejected, settings


def pairs_per_s(trainer, request, times):
    saved = train(trainer, request)
    return {"pairs_per_s": request["pairs_per_step"] / times.seconds_per_step(), **saved}


def dpo(request):
    """Pairs per second of DPOTrainer, whose reference is the model as it was."""
    model, tokenizer = load(request)
    prompts, chosen, rejected, settings = pairs(request)
    # The words of an answer follow those of the prompt.
    rows = {
        "prompt": list(prompts),
        "chosen": [f" {text}" for text in chosen],
        "rejected": [f" {text}" for text in rejected],
    }
    times = StepTimes()
    trainer = DPOTrainer(
        model,
        ref_model=load(request)[0],
        args=DPOConfig(**settings),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        callbacks=[times],
    )
    return pairs_per_s(trainer, request, times)


def reward_model(request):
    """Pairs per second of RewardTrainer."""
    _, tokenizer = load(request)
    model = AutoModelForSequenceClassification.from_pretrained(
        request["model"], num_labels=1, dtype=torch.float32
    )
    prompts, chosen, rejected, settings = pairs(request)
    rows = {
        name: [f"{prompt} {text}" for prompt, text in zip(prompts, answers, strict=True)]
        for name, answers in (("chosen", chosen), ("rejected", rejected))
    }
    times = StepTimes()
    trainer = RewardTrainer(
        model,
        args=RewardConfig(**settings),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        callbacks=[times],
    )
    return pairs_per_s(trainer, request, times)


class DistinctWords:
    """The reward; also notes how many tokens each sampled completion has."""

    __name__ = "distinct_words"

    def __init__(self):
        self.lengths = []

    def __call__(self, completions, completion_ids, **_):
        self.lengths += map(len, completion_ids)
        return [len(set(text.split())) / 64 for text in completions]


def grpo(request):
    """Seconds of one GRPO step, and the mean number of sampled tokens."""
    model, tokenizer = load(request)
    num_samples = request["num_prompts"] * request["group_size"]
    settings = GRPOConfig(
        **shared_settings(request, request["steps"]),
        per_device_train_batch_size=num_samples,
        num_generations=request["group_size"],
        max_completion_length=request["max_new_tokens"],
        temperature=1.0,
        beta=0.0,
    )
    times, reward = StepTimes(), DistinctWords()
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": request["prompts"]}),
        processing_class=tokenizer,
        callbacks=[times],
    )
    trainer.train()
    timed = reward.lengths[WARM_UP_STEPS * num_samples :]
    return {"seconds": times.seconds_per_step(), "mean_tokens": sum(timed) / len(timed)}


def rl_row(columns):
    """A row of GSM8K as an RL row."""
    answer = columns["answer"].strip()
    found = re.search(r"####\s*(-?[\d,]*\.?\d+)\s*$", answer)
    asked = "Reason step by step and put the final answer in \\boxed{}."
    prompt = [{"role": "user", "content": f"{columns['question'].strip()}\n{asked}"}]
    truth = found.group(1).replace(",", "")
    return {
        "data_source": "openai/gsm8k",
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": None,
    }


def preprocess(request):
    """Rows per second of reading, mapping and writing."""
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        rows = load_dataset("json", data_files=request["source"], split="train", cache_dir=cache)
        rows = rows.map(rl_row, remove_columns=["question", "answer"])
        rows.to_parquet(str(Path(cache) / "rows.parquet"))
        return {"rows_per_s": len(rows) / (time.perf_counter() - start)}


def main():
    warnings.simplefilter("ignore", FutureWarning)  # TRL's own use of older settings
    tasks = {task.__name__: task for task in (sft, dpo, reward_model, grpo, preprocess)}
    for line in sys.stdin:
        request = json.loads(line)
        print(ANSWER + json.dumps(tasks[request["task"]](request)), flush=True)


if __name__ == "__main__":
    main()
