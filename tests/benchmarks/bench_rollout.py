"""Rollout speed: our engine against `model.generate` on the same weights, prompts and limits.

Two workloads of the quickstart's model (0.4 M parameters, Qwen3 architecture): short answers of
about equal length, and 16 prompts x 8 samples of uneven length, where a sample ends when it
draws the end-of-sequence token. Both sides sample at temperature 1 and report logprobs of the
sampled tokens. A token counts when it was sampled before or at the end of its sequence; padding
behind it does not. Both sides run in this process, so seconds are its CPU seconds.

Run: python tests/benchmarks/bench_rollout.py [--repeats N] [--threads N]
"""

import argparse
import platform
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlhf.testing.rollout_calls import generate_all, send_weights
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from engines.config.rollout import RolloutConfig
from engines.rollout.base import RolloutEngine, create_rollout_engine
from engines.types import RolloutRequest, SamplingParams
from hardware.cpu import CPUPlatform

EOS_TOKEN_ID = 3
VOCAB_SIZE = 64


@dataclass(frozen=True)
class Workload:
    """Prompts to sample from; lengths are drawn uniformly between the two bounds."""

    name: str
    num_prompts: int
    num_samples: int
    min_prompt_tokens: int
    max_prompt_tokens: int
    max_new_tokens: int

    def requests(self, seed: int) -> list[RolloutRequest]:
        draw = random.Random(seed)
        return [
            RolloutRequest(
                request_id=f"prompt={index}",
                prompt_ids=tuple(
                    draw.randrange(EOS_TOKEN_ID + 1, VOCAB_SIZE)
                    for _ in range(draw.randint(self.min_prompt_tokens, self.max_prompt_tokens))
                ),
                sampling=SamplingParams(self.max_new_tokens),
                seeds=tuple(draw.getrandbits(64) for _ in range(self.num_samples)),
            )
            for index in range(self.num_prompts)
        ]


WORKLOADS = (
    Workload("short answers, 32 x 16", 32, 16, 10, 10, 6),
    Workload("uneven lengths, 16 x 8", 16, 8, 8, 64, 256),
)


@dataclass(frozen=True)
class Measurement:
    """Median and spread (largest - smallest, over the median) of tokens per CPU second."""

    tokens_per_s: float
    spread: float

    @staticmethod
    def of(rates: list[float]) -> "Measurement":
        median = statistics.median(rates)
        return Measurement(median, (max(rates) - min(rates)) / median)


def build(directory: Path) -> tuple[PreTrainedModel, RolloutEngine]:
    """The reference model and our engine, with the same weights."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
    )
    config.save_pretrained(directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    rollout = RolloutConfig(max_num_sequences=512)
    engine = create_rollout_engine("transformers", directory, rollout, "float32", CPUPlatform())
    send_weights(engine, model.named_parameters(), 0)
    return model, engine


def time_ours(engine: RolloutEngine, requests: list[RolloutRequest]) -> float:
    """Tokens per CPU second of our engine."""
    start = time.process_time()
    completions = generate_all(engine, requests)
    return sum(len(c.token_ids) for c in completions) / (time.process_time() - start)


@torch.inference_mode()
def time_generate(model: PreTrainedModel, requests: list[RolloutRequest], seed: int) -> float:
    """Tokens per CPU second of `generate` on the left-padded batch of all samples."""
    torch.manual_seed(seed)
    start = time.process_time()
    width = max(len(r.prompt_ids) for r in requests)
    padded = [[0] * (width - len(r.prompt_ids)) + [*r.prompt_ids] for r in requests]
    ids = torch.tensor(padded)
    generate: Any = model.generate  # a decorated method that type checkers take for a tensor
    output = generate(
        input_ids=ids,
        attention_mask=(ids != 0).long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=requests[0].num_samples,
        max_new_tokens=requests[0].sampling.max_new_tokens,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new_tokens = output.sequences[:, width:]
    logits = torch.stack(output.logits, dim=1)
    logits.log_softmax(-1).gather(2, new_tokens[:, :, None])
    num_after_eos = (new_tokens == EOS_TOKEN_ID).cumsum(1) - (new_tokens == EOS_TOKEN_ID).long()
    num_tokens = int((num_after_eos == 0).sum())
    return num_tokens / (time.process_time() - start)


def compare(
    model: PreTrainedModel, engine: RolloutEngine, workload: Workload, repeats: int
) -> tuple[Measurement, Measurement]:
    """Ours and `generate`, in turns, so that a busy machine slows both."""
    ours: list[float] = []
    theirs: list[float] = []
    for repeat in range(-1, repeats):
        requests = workload.requests(seed=repeat + 1)
        pair = time_ours(engine, requests), time_generate(model, requests, seed=repeat + 1)
        if repeat >= 0:  # the first turn warms both up
            ours.append(pair[0])
            theirs.append(pair[1])
    return Measurement.of(ours), Measurement.of(theirs)


def main() -> None:
    """Print one line per workload."""
    parser = argparse.ArgumentParser(description="Rollout speed against model.generate.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{platform.machine()}, {arguments.threads} thread(s), torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as directory:
        model, engine = build(Path(directory))
        for workload in WORKLOADS:
            ours, theirs = compare(model, engine, workload, arguments.repeats)
            print(
                f"{workload.name}: ours {ours.tokens_per_s:,.0f} tokens/CPU-s "
                f"(spread {ours.spread:.0%}), generate {theirs.tokens_per_s:,.0f} "
                f"(spread {theirs.spread:.0%}), ratio {ours.tokens_per_s / theirs.tokens_per_s:.2f}"
            )


if __name__ == "__main__":
    main()
