"""vLLM behind our engine class against bare vLLM, in turns, and its start with warm caches.

Each lives in a process of vLLM's job environment (`gpu_vllm_peer.py`), both on the same device:
the same weights, requests, seeds, cache and graphs. Ours adds the service and the adapter with its
logprobs and versions; Ray is not between them.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from gpu_figures import Figure, Goal, NeedsError, Setup
from gpu_training import requests_of
from measure import Measurement, Peer, turn_by_turn

from engines.types import RolloutRequest
from hardware.detection import planned
from infra.job_environments import interpreter_of

RATIO_GOAL, START_GOAL = Goal(0.97), Goal(30.0, at_most=True)
PEER = "gpu_vllm_peer.py"
DEADLINE_S = 400.0
MAX_NUM_TURNS, NUM_WARM_UP_TOKENS = 3, 16
SPARE = 1.25
"""Cache over what the samples of a turn fill, so that none is preempted."""


def vllm(setup: Setup) -> Iterator[Figure]:
    """Start, weight sync, tokens per second of both sides, and the start once more."""
    python = interpreter_of("vllm")
    if python is None:
        raise NeedsError("vLLM's environment: make env-vllm")
    with ExitStack() as stack:
        ours = stack.enter_context(started(python))
        first = start(ours, "ours", setup)
        yield Figure("vllm", "first start", "s", Measurement((first["start_s"],)))
        for transport in ("shared memory", *(["device IPC"] if has_ipc(setup) else [])):
            synced = ours.ask(task="sync", transport=transport, times=setup.num_repeats)
            rate = synced["num_bytes"] / 1e9 / synced["seconds"]
            yield Figure("vllm", f"sync, {transport}", "GB/s", Measurement((rate,)))
        bare = stack.enter_context(started(python))
        start(bare, "bare", setup)
        yield from turns(setup, ours, bare)
        for peer in (ours, bare):  # their memory is the next one's
            peer.ask(task="close")
    with started(python) as again:
        warm = start(again, "ours", setup)
        again.ask(task="close")
        yield Figure("vllm", "start, caches warm", "s", Measurement((warm["start_s"],)), START_GOAL)


def has_ipc(setup: Setup) -> bool:
    """Whether processes can share the device's memory; does not open it."""
    return planned(setup.platform).supports_ipc


def turns(setup: Setup, ours: Peer, bare: Peer) -> Iterator[Figure]:
    """The same requests to both, one after the other."""
    found: dict[str, list[float]] = {"ours": [], "bare": []}
    for turn in range(min(setup.num_repeats, MAX_NUM_TURNS) + 1):
        limit = None if turn else NUM_WARM_UP_TOKENS
        requests = requests_of(setup, turn, max_new_tokens=limit)
        for name, peer in (("ours", ours), ("bare", bare)):
            answer = sample(peer, requests)
            if turn:
                found[name].append(answer["num_tokens"] / answer["seconds"])
    sides = Measurement(tuple(found["ours"])), Measurement(tuple(found["bare"]))
    yield Figure("vllm", "behind our engine", "tokens/s", sides[0])
    yield Figure("vllm", "bare", "tokens/s", sides[1])
    yield Figure("vllm", "ours over bare", "", turn_by_turn(*sides), RATIO_GOAL)


def started(python: Path) -> Peer:
    """A process of vLLM's environment; its engine is started by `start`."""
    return Peer(python, PEER, torch.get_num_threads(), DEADLINE_S)


def start(peer: Peer, kind: str, setup: Setup) -> dict[str, float]:
    """Have it start `ours` or `bare`; `start_s` is that of the engine."""
    num_tokens = int(setup.num_samples * setup.sample_length * SPARE)
    return peer.ask(
        task="start",
        kind=kind,
        platform=setup.platform,
        hf_dir=str(setup.hf_dir),
        dtype=setup.dtype,
        max_model_len=setup.sample_length + 8,
        max_num_sequences=setup.num_samples,
        cache_bytes=setup.shape.cache_bytes(num_tokens, getattr(torch, setup.dtype).itemsize),
    )


def sample(peer: Peer, requests: list[RolloutRequest]) -> dict[str, float]:
    """Have it sample; number of tokens and seconds."""
    return peer.ask(
        task="sample",
        names=[request.request_id for request in requests],
        prompts=[request.prompt_ids for request in requests],
        seeds=[request.seeds for request in requests],
        max_new_tokens=requests[0].sampling.max_new_tokens,
    )
