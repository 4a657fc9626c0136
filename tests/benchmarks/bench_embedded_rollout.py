"""The embedded engine against vLLM, eager, by tokens per CPU second, at 4.9 M parameters.

The same weights, requests and dtype on both sides, one thread each; every sample with the logprobs
of its tokens. CPU seconds are those of all processes of a side. vLLM runs bare, in its job
environment: `make env-vllm`.

Run: python tests/benchmarks/bench_embedded_rollout.py [--repeats N] [--threads N]
"""

import itertools
import sys
import tempfile
import time
from pathlib import Path

from measure import Peer, arguments, machine, ratio_line, take_turns, turn_by_turn
from rlhf.testing.rollout_calls import generate_all, send_weights
from sampled_workload import (
    MAX_NUM_SEQUENCES,
    MAX_PREFILL_TOKENS,
    WORKLOADS,
    Workload,
    ask_peer,
    start_peer,
    write_model,
)

from engines.config.rollout import RolloutConfig
from engines.rollout.base import RolloutEngine, create_rollout_engine
from hardware.cpu import CPUPlatform
from infra.job_environments import interpreter_of

GOALS = {"bfloat16": 0.95, "float32": 0.8}
START_DEADLINE_S = 600.0


def compare(
    engine: RolloutEngine, peer: Peer, workload: Workload, repeats: int, goal: float
) -> None:
    """Print what both reach."""
    turns = {name: itertools.count() for name in ("embedded", "vllm")}

    def embedded() -> float:
        requests = workload.requests(next(turns["embedded"]))
        start = time.process_time()
        found = generate_all(engine, requests)
        return sum(len(each.token_ids) for each in found) / (time.process_time() - start)

    def vllm() -> float:
        turn = next(turns["vllm"])
        found = ask_peer(peer, workload.requests(turn), turn)
        return found["tokens"] / found["cpu_seconds"]

    found = take_turns({"embedded": embedded, "vllm": vllm}, repeats)
    for name, measured in found.items():
        print(f"  {workload.name}, {name}: {measured.text('tokens/CPU-s')}", flush=True)
    ratio = turn_by_turn(found["embedded"], found["vllm"])
    print(ratio_line(workload.name, ratio, goal), flush=True)


def main() -> int:
    """Print one line per dtype and workload."""
    chosen = arguments(__doc__ or "", peer=False)
    python = interpreter_of("vllm")
    if python is None:
        print("needs vLLM's job environment: make env-vllm")
        return 1
    print(machine())
    for dtype, goal in GOALS.items():
        print(dtype, flush=True)
        with (
            tempfile.TemporaryDirectory() as directory,
            Peer(python, "engine_peer.py", chosen.threads, START_DEADLINE_S) as peer,
        ):
            path = Path(directory)
            model = write_model(path, dtype)
            start_peer(peer, "vllm", path, dtype)
            rollout = RolloutConfig(
                max_num_sequences=MAX_NUM_SEQUENCES,
                options={"max_prefill_tokens": MAX_PREFILL_TOKENS},
            )
            engine = create_rollout_engine("transformers", path, rollout, dtype, CPUPlatform())
            send_weights(engine, model.named_parameters(), 0, dtype)
            for workload in WORKLOADS:
                compare(engine, peer, workload, chosen.repeats, goal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
