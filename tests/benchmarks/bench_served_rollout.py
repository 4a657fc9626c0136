"""vLLM and SGLang behind our service, in Ray actors, against the bare engine in a child process.

The same weights, requests, seeds, capacity and dtype on both sides, one after the other on the same
cores; every sample with the logprobs of its tokens. Ours adds routing, the way through Ray, the
version of every token and the ledger. Bare vLLM gets one request per sample of its `AsyncLLM`, bare
SGLang one call of its server for all. Each engine in its job environment: `make env-vllm`,
`make env-sglang`.

Run: python tests/benchmarks/bench_served_rollout.py [--repeats N] [--threads N]
"""

import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from measure import Peer, arguments, machine, ratio_line, take_turns, turn_by_turn
from sampled_workload import (
    CACHE_BYTES,
    MAX_NUM_SEQUENCES,
    MAX_PREFILL_TOKENS,
    WORKLOADS,
    Workload,
    ask_peer,
    start_peer,
    write_model,
)

from engines.config.rollout import RolloutConfig
from engines.controller.launch import connect_ray, launch_engines, reserve_replicas
from engines.controller.replica import ReplicaSpec
from engines.rollout.service import RolloutService
from infra import env
from infra.host import servers
from infra.job_environments import interpreter_of
from infra.ray.cluster import ensure_cluster

GOAL = 0.97
ENGINES = ("vllm", "sglang")
DTYPE, START_DEADLINE_S = "float32", 600.0


@contextmanager
def ray_cluster(home: Path) -> Iterator[None]:
    """On loopback, and this process connected to it."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    env.set_for_process("RAY_ADDRESS", ensure_cluster(home, num_cpus=4).gcs_address)
    import ray
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    connect_ray()
    try:
        yield
    finally:
        ray.shutdown()
        servers.end(home, "ray")


@contextmanager
def service_of(engine: str, root: Path, num_threads: int) -> Iterator[RolloutService]:
    """Over one replica in its own environment, with weights."""
    model = write_model(root / "model", DTYPE)
    options = {"kv_cache_bytes": CACHE_BYTES, "max_prefill_tokens": MAX_PREFILL_TOKENS}
    rollout = RolloutConfig(
        engine=engine,
        placement="disaggregated",
        max_num_sequences=MAX_NUM_SEQUENCES,
        timeout_s=600.0,
        options=options,
    )
    spec = ReplicaSpec(root / "model", rollout, DTYPE, "cpu", None, num_threads, root)
    pool = reserve_replicas([spec])
    with closing(pool):
        launched = launch_engines(spec, pool.places(0, 1))
        with closing(launched.service()) as service:
            weights = dict(model.named_parameters())
            service.sync(launched.new_transport, lambda way: way.send(iter(weights.items())), 0)
            yield service


def compare(service: RolloutService, peer: Peer, workload: Workload, repeats: int) -> None:
    """Print what both reach."""
    turns = {name: itertools.count() for name in ("ours", "bare")}

    def ours() -> float:
        requests = workload.requests(next(turns["ours"]))
        start = time.perf_counter()
        rows = service.generate(requests)
        seconds = time.perf_counter() - start
        return sum(len(each.token_ids) for row in rows for each in row) / seconds

    def bare() -> float:
        turn = next(turns["bare"])
        found = ask_peer(peer, workload.requests(turn), turn)
        return found["tokens"] / found["seconds"]

    found = take_turns({"ours": ours, "bare": bare}, repeats)
    for name, measured in found.items():
        print(f"  {workload.name}, {name}: {measured.text('tokens/s')}", flush=True)
    ratio = turn_by_turn(found["ours"], found["bare"])
    print(ratio_line(workload.name, ratio, GOAL), flush=True)


def main() -> None:
    """Print one line per engine and workload."""
    chosen = arguments(__doc__ or "", peer=False)
    print(machine())
    with tempfile.TemporaryDirectory() as directory, ray_cluster(Path(directory) / "ray"):
        for engine in ENGINES:
            python = interpreter_of(engine)
            if python is None:
                print(f"{engine}: left out, it needs its job environment: make env-{engine}")
                continue
            print(engine, flush=True)
            root = Path(directory) / engine
            root.mkdir()
            with (
                service_of(engine, root, chosen.threads) as service,
                Peer(python, "engine_peer.py", chosen.threads, START_DEADLINE_S) as peer,
            ):
                start_peer(peer, engine, root / "model", DTYPE)
                for workload in WORKLOADS:
                    compare(service, peer, workload, chosen.repeats)


if __name__ == "__main__":
    main()
