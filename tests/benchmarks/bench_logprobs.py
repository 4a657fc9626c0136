"""Log-probabilities in tiles against full logits, at a vocabulary of 151,936: memory and time.

Each way takes hidden states and the weights of an output head to log-probabilities and entropies
and their gradients, in a process of its own, whose largest resident size is measured over what
it was before the first pass (the gradients are in it). `full logits` is log_softmax as one writes
it; `full logits, one function` is `token_logprobs`, which keeps the logits but no second copy in
float32; `in tiles` is `linear_token_logprobs`: four matrix products instead of three. CPU time is
printed beside wall time, since a busy machine cannot distort it as much.

Run: python tests/benchmarks/bench_logprobs.py [--repeats N] [--threads N]
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from measure import ANSWER, Measurement, machine, ratio_line, turn_by_turn
from torch import Tensor
from torch.nn.functional import linear

from engines.training.model.linear_logprobs import linear_token_logprobs
from engines.training.model.logprobs import token_logprobs

VOCAB_SIZE, HIDDEN_SIZE, NUM_TOKENS = 151_936, 256, 1024
DEADLINE_S = 600.0

LogprobFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def full_logits(hidden_ND: Tensor, weight_VD: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """The textbook way."""
    log_probs_NV = linear(hidden_ND, weight_VD).float().log_softmax(dim=-1)
    entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(dim=-1)
    return log_probs_NV.gather(1, ids_N[:, None]).squeeze(1), entropy_N


def one_function(
    hidden_ND: Tensor, weight_VD: Tensor, ids_N: Tensor
) -> tuple[Tensor, Tensor | None]:
    """All logits, one autograd function on top."""
    return token_logprobs(linear(hidden_ND, weight_VD), ids_N, entropy=True)[:2]


def in_tiles(hidden_ND: Tensor, weight_VD: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor | None]:
    """Never all logits."""
    return linear_token_logprobs(hidden_ND, weight_VD, ids_N, entropy=True)[:2]


WAYS: dict[str, LogprobFn] = {
    "full logits": full_logits,
    "full logits, one function": one_function,
    "in tiles": in_tiles,
}


@dataclass(frozen=True)
class Cost:
    """What one process measured."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    peak_bytes: int
    loss: float


def resident_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_here(way: str, dtype: str, repeats: int) -> Cost:
    """Run one way in this process, an uncounted pass first."""
    generator = torch.Generator().manual_seed(0)
    element = getattr(torch, dtype)
    hidden_ND = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator).to(element)
    weight_VD = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator).to(element)
    weight_VD = weight_VD.mul_(HIDDEN_SIZE**-0.5).requires_grad_()
    hidden_ND.requires_grad_()
    ids_N = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    before = resident_bytes()
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    loss = 0.0
    for repeat in range(-1, repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        logprobs_N, entropy_N = WAYS[way](hidden_ND, weight_VD, ids_N)
        assert entropy_N is not None
        total = -(logprobs_N + 0.01 * entropy_N).mean()
        total.backward()
        if repeat >= 0:
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
        hidden_ND.grad = weight_VD.grad = None
        loss = float(total.detach())
        del logprobs_N, entropy_N, total
    return Cost(tuple(seconds), tuple(cpu_seconds), resident_bytes() - before, loss)


def measure_apart(way: str, dtype: str, repeats: int, threads: int) -> Cost:
    """Run one way in a process of its own."""
    done = subprocess.run(
        [
            sys.executable, __file__, "--way", way, "--dtype", dtype, "--repeats", str(repeats),
            "--threads", str(threads),
        ],
        check=True, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    line = next(x for x in done.stdout.splitlines() if x.startswith(ANSWER))
    fields = json.loads(line.removeprefix(ANSWER))
    return Cost(
        tuple(fields["seconds"]), tuple(fields["cpu_seconds"]), fields["peak_bytes"], fields["loss"]
    )


def compare(dtype: str, repeats: int, threads: int) -> None:
    """Measure all ways, in turn, and print the ratios."""
    turns = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, costs in turns.items():
            costs.append(measure_apart(way, dtype, 1, threads))
    losses = {way: costs[0].loss for way, costs in turns.items()}
    if max(losses.values()) - min(losses.values()) > 0.01:
        raise SystemExit(f"the ways do not compute the same: {losses}")
    logits_mib = NUM_TOKENS * VOCAB_SIZE * getattr(torch, dtype).itemsize / 2**20
    print(f" {dtype}: all logits are {logits_mib:,.0f} MiB")
    seconds = {
        way: Measurement(tuple(s for cost in costs for s in cost.seconds))
        for way, costs in turns.items()
    }
    cpu_seconds = {
        way: Measurement(tuple(s for cost in costs for s in cost.cpu_seconds))
        for way, costs in turns.items()
    }
    peaks = {
        way: Measurement(tuple(cost.peak_bytes / 2**20 for cost in costs))
        for way, costs in turns.items()
    }
    for way in WAYS:
        print(f"  {way}: {peaks[way].text('MiB above the inputs')}, {seconds[way].text('s')}")
        print(f"    {cpu_seconds[way].text('s of CPU time')}")
    for way in list(WAYS)[:-1]:
        memory = turn_by_turn(peaks[way], peaks["in tiles"])
        print(ratio_line(f"memory, {way} / in tiles", memory))
        for what, spent in (("time", seconds), ("CPU time", cpu_seconds)):
            ratio = turn_by_turn(spent["in tiles"], spent[way])
            print(ratio_line(f"{what}, in tiles / {way}", ratio))


def main() -> None:
    """Print peak memory and time of each way in float32 and bfloat16."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--peer-python", help="accepted and not used: there is no peer")
    parser.add_argument("--way", choices=WAYS, help="measure this one here; for the program itself")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="only this one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.way:
        cost = measure_here(options.way, options.dtype or "float32", options.repeats)
        print(ANSWER + json.dumps(vars(cost)))
        return
    print(
        f"log-probabilities of {NUM_TOKENS} tokens, width {HIDDEN_SIZE}, "
        f"vocabulary {VOCAB_SIZE:,}, {options.threads} thread(s)"
    )
    print(f"  {machine()}")
    for dtype in (options.dtype,) if options.dtype else ("float32", "bfloat16"):
        compare(dtype, options.repeats, options.threads)


if __name__ == "__main__":
    main()
