"""What rollout engines are asked in the benchmarks that compare them: a model, prompts, seeds."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import Peer
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from engines.types import RolloutRequest, SamplingParams

EOS_TOKEN_ID, VOCAB_SIZE, CONTEXT_LENGTH = 3, 512, 512
MAX_NUM_SEQUENCES, MAX_PREFILL_TOKENS = 128, 2048
CACHE_BYTES = 2**28
TOKEN_BYTES = 2 * 6 * 4 * 32 * 4
"""Keys and values of one token in float32."""


@dataclass(frozen=True)
class Workload:
    """Prompts of 8 to 64 tokens; few samples end early."""

    name: str
    num_prompts: int
    num_samples: int
    max_new_tokens: int

    def requests(self, turn: int) -> list[RolloutRequest]:
        """Of a turn; the seeds are of 31 bits, for every engine takes those."""
        draw = random.Random(turn)
        return [
            RolloutRequest(
                f"turn={turn}/prompt={index}",
                tuple(draw.randrange(4, VOCAB_SIZE) for _ in range(draw.randint(8, 64))),
                SamplingParams(self.max_new_tokens),
                tuple(draw.getrandbits(31) for _ in range(self.num_samples)),
            )
            for index in range(self.num_prompts)
        ]


WORKLOADS = (Workload("16 x 8, 128 tokens", 16, 8, 128), Workload("32 x 16, 6 tokens", 32, 16, 6))


def write_model(directory: Path, dtype: str) -> PreTrainedModel:
    """A Qwen3 of 4.9 M parameters, which is also written."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=768,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT_LENGTH,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    model.save_pretrained(directory)
    return model


def start_peer(peer: Peer, engine: str, hf_dir: Path, dtype: str) -> None:
    """Have a peer of `engine_peer.py` start its engine."""
    peer.ask(
        engine=engine,
        hf_dir=str(hf_dir),
        dtype=dtype,
        max_model_len=CONTEXT_LENGTH,
        max_num_sequences=MAX_NUM_SEQUENCES,
        max_prefill_tokens=MAX_PREFILL_TOKENS,
        max_num_cached_tokens=CACHE_BYTES // TOKEN_BYTES,
    )


def ask_peer(peer: Peer, requests: list[RolloutRequest], turn: int) -> dict[str, float]:
    """Have it sample; tokens, seconds, CPU seconds."""
    return peer.ask(
        turn=turn,
        samples=[(request.prompt_ids, request.seeds) for request in requests],
        max_new_tokens=requests[0].sampling.max_new_tokens,
        eos_token_id=EOS_TOKEN_ID,
    )
