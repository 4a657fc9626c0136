"""Check after a weight sync that each engine computes with the new weights.

A digest proves only which bytes arrived: packed copies of a head or a prefix cache may be stale. So
every engine answers a fixed prompt, longer than a cache block, and the trainer must find the same
logprobs, up to the rounding of `mismatch.BOUNDS`.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engines.errors import WeightSyncError
from engines.trainers.guards.mismatch import MismatchGate
from engines.types import Completion, RolloutRequest, SamplingParams, TokenBatch

NUM_PROMPT_TOKENS = 160
"""Longer than a cache block: 128 tokens in vLLM on a CPU, 16 to 64 in other engines."""
NUM_NEW_TOKENS = 4
SEED = 20


class WeightProbe:
    """A `Probe` that compares with the trainer's `infer_logprobs`, at its `temperature`."""

    def __init__(
        self,
        prompt_ids: Sequence[int],
        temperature: float,
        gate: MismatchGate,
        infer_logprobs: Callable[[TokenBatch], Tensor],
    ) -> None:
        self._prompt_ids = tuple(prompt_ids)
        self._sampling = SamplingParams(NUM_NEW_TOKENS, temperature)
        self._gate, self._infer_logprobs = gate, infer_logprobs

    def request(self, place: int, version: int) -> RolloutRequest:
        """See `engines.rollout.publishing.Probe`."""
        name = f"probe/version={version}/replica={place}"
        return RolloutRequest(name, self._prompt_ids, self._sampling, (SEED,))

    def check(self, requests: Sequence[RolloutRequest], found: Sequence[Completion]) -> None:
        """See `engines.rollout.publishing.Probe`."""
        rows = list(zip(requests, found, strict=True))
        batch = TokenBatch.from_sequences(
            [(*request.prompt_ids, *said.token_ids.tolist()) for request, said in rows],
            rollout_logprobs=[
                [0.0] * len(request.prompt_ids) + said.logprobs.tolist() for request, said in rows
            ],
        )
        differences_T = (self._infer_logprobs(batch) - batch.columns["rollout_logprobs"]).abs()
        per_replica = differences_T.split(batch.lengths_B.tolist())
        for (request, _), difference_T in zip(rows, per_replica, strict=True):
            # The median, because in bfloat16 single tokens may differ by nats.
            typical = float(difference_T[len(request.prompt_ids) :].median())
            if not typical <= self._gate.mean:
                raise WeightSyncError(
                    f"{request.request_id}: after the sync its logprobs are {typical:.3g} from the "
                    f"trainer's (median), above rl.mismatch.mean {self._gate.mean:.3g}: the bytes "
                    "arrived, and the engine computes with something else"
                )


def probe_prompt(hf_dir: Path, max_length: int) -> tuple[int, ...]:
    """Return random token ids for a model, without special ones and with room for the answer."""
    config = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    special = [value for name, value in config.items() if name.endswith("_token_id")]
    text = config.get("text_config", config)
    ids = [i for i in range(int(text["vocab_size"])) if i not in special]
    size = max(1, min(NUM_PROMPT_TOKENS, max_length - NUM_NEW_TOKENS))
    places = torch.randint(len(ids), (size,), generator=torch.Generator().manual_seed(SEED))
    return tuple(ids[place] for place in places.tolist())
