"""What an algorithm costs beside its models: its own maths, and the critic of PPO.

The train part of an RL step: scored samples, columns (old log-probabilities, the reference's,
values), advantages, two updates of each role that trains, metrics. 5 M parameters in float32, 64
answers of uneven length (mean about 60 tokens) behind 8 prompts, micro-batches of 2,048 tokens.

1. The share of the step that is no model: all that the trainer does outside of calls to the
   workers, and inside of them the loss functions, their backward pass and the sums of metrics.
   Taken from torch's profiler, which lengthens small operations, as these are, more than the large
   ones of a model. `grpo` has a KL to a reference in its loss, `ppo` is GAE with a critic.
2. The CPU time of a PPO step with a critic less that of the same step without, over that of what
   the critic has to do at least: a forward pass of the same model over the same micro-batches,
   and per update forward, backward and AdamW, in a bare loop around the module, with the
   micro-batches ready beforehand.

Run: python tests/benchmarks/bench_algorithm_cost.py [--repeats N] [--threads N]
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from measure import Measurement, arguments, cost_line, machine, take_turns
from scored_step import NUM_PROMPTS, NUM_UPDATES, VOCAB_SIZE, ScoredStep, draw_samples
from tiny_model import write_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from engines.algorithms.policy_objective import ValueObjective
from engines.config.algorithm import FilterGroupsConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller.model_worker import ModelWorker
from engines.trainers.experience import Collector
from engines.trainers.mismatch import MeasuredObjective
from engines.trainers.packing import pack
from engines.trainers.scoring import ScoredBatch
from engines.training.backends.transformers.engine import TransformersModelEngine
from engines.training.base import create_engine
from engines.training.model.attention import Packing
from engines.training.step.micro_batches import Totals
from engines.types import TokenBatch
from hardware.cpu import CPUPlatform

MIN_REPEATS = 7
SHARE_GOAL, CRITIC_GOAL = 0.02, 1.1
STEP, WORKER, LOSS = "algorithm_cost/step", "algorithm_cost/worker", "algorithm_cost/loss"
BACKWARD = "autograd::engine::evaluate_function: "
RANGES = (
    (ModelWorker, "train", WORKER),
    (ModelWorker, "infer", WORKER),
    (ModelWorker, "infer_logprobs", WORKER),
    (MeasuredObjective, "__call__", LOSS),
    (MeasuredObjective, "extras", LOSS),
    (ValueObjective, "__call__", LOSS),
    (Totals, "add", LOSS),
    (Totals, "reduce", LOSS),
)
"""None calls another one of its own range, so their times add up."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"use_kl_loss": True, "entropy_coeff": 0.001}},
    "ppo": {"algorithm": {"adv_estimator": "gae"}, "critic": {"optimizer": {"lr": 1e-6}}},
}


@contextmanager
def ranges() -> Iterator[None]:
    """Scope in which the profiler sees the calls of `RANGES` by name."""

    def named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)  # with what `@dispatch` left on it
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(name):
                return function(*args, **kwargs)

        return call

    before = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in RANGES]
    for owner, attribute, name in RANGES:
        setattr(owner, attribute, named(vars(owner)[attribute], name))
    try:
        yield
    finally:
        for owner, attribute, function in before:
            setattr(owner, attribute, function)


def profiled_share(step: ScoredStep) -> dict[str, float]:
    """Shares of one step: outside of the workers, loss functions, and their backward pass."""
    with ranges(), profile(activities=[ProfilerActivity.CPU]) as found, record_function(STEP):
        step.take()
    events = [event for event in found.events() or () if not event.is_async]
    microseconds = {
        name: sum(e.time_range.elapsed_us() for e in events if e.name == name)
        for name in (STEP, WORKER, LOSS)
    }
    spans = [(e.time_range.start, e.time_range.end) for e in events if e.name == LOSS]
    # A node of the backward pass has the number that its operation had in the forward pass.
    numbers = set[int]()
    for start, end in spans:
        numbers |= {
            e.sequence_nr
            for e in events
            if e.sequence_nr >= 0 and start <= e.time_range.start and e.time_range.end <= end
        }
    backward = sum(
        e.time_range.elapsed_us()
        for e in events
        if e.name.startswith(BACKWARD) and e.sequence_nr in numbers
    )
    whole = microseconds[STEP]
    return {
        "trainer": (whole - microseconds[WORKER]) / whole,
        "loss functions": microseconds[LOSS] / whole,
        "their backward pass": backward / whole,
    }


class BareCritic:
    """The module of a value model, AdamW, and micro-batches that lie ready: nothing else."""

    def __init__(self, hf_dir: Path, scored: ScoredBatch) -> None:
        training = TrainingConfig(max_tokens_per_micro_batch=2048)
        engine = create_engine(
            "value_model", hf_dir, training, OptimizerConfig(lr=1e-6), 10_000, CPUPlatform(), 0
        )
        engine.initialize()
        assert isinstance(engine, TransformersModelEngine)
        self._model = engine.model
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        collector = Collector(NUM_PROMPTS, FilterGroupsConfig())
        collector.add(scored)
        experience = collector.experience()

        def prepare(batch: TokenBatch) -> list[TokenBatch]:
            return [each.batch for each in engine._prepare(batch).micro_batches]

        self._whole = prepare(experience.batch)
        updates = experience.mini_batches(NUM_PROMPTS // NUM_UPDATES, 1)
        self._updates = [prepare(batch) for batch in updates]

    def values(self, batch: TokenBatch) -> Tensor:
        """(T,) of one micro-batch."""
        return self._model(
            input_ids=batch.input_ids_T[None],
            position_ids=batch.position_ids_T[None],
            attention_mask=None,
            use_cache=False,
            packing=Packing.from_cu_seqlens(batch.cu_seqlens),
        ).logits[0, :, 0]

    def take(self) -> None:
        """What a critic does in a step."""
        with torch.no_grad():
            for batch in self._whole:
                self.values(batch)
        for micro_batches in self._updates:
            for batch in micro_batches:
                self.values(batch).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


def cpu_seconds(take: Callable[[], object]) -> Callable[[], float]:
    """CPU time of one call: another program on the same core does not lengthen it."""

    def measure() -> float:
        gc.collect()
        start = time.process_time()
        take()
        return time.process_time() - start

    return measure


def shares(steps: dict[str, ScoredStep], repeats: int) -> None:
    """Print the share of each algorithm's own maths."""
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in steps}

    def turn(name: str) -> float:
        parts[name].append(profiled_share(steps[name]))
        return sum(parts[name][-1].values())

    taken = take_turns({name: lambda name=name: turn(name) for name in steps}, repeats)
    for name, share in taken.items():
        print(cost_line(f"{name}: share of the step that is no model", share, SHARE_GOAL))
        for part in parts[name][0]:
            values = Measurement(tuple(each[part] for each in parts[name][1:]))
            print(f"    {part}: {values.median:.2%} (spread {values.spread:.0%})")


def critic_cost(sides: dict[str, Callable[[], object]], repeats: int) -> None:
    """Print what a critic costs over what it has to."""
    taken = take_turns({name: cpu_seconds(take) for name, take in sides.items()}, repeats)
    for name, measured in taken.items():
        print(f"  {name}: {measured.text('CPU-s')}")
    rows = zip(*(taken[name].values for name in ("with", "without", "bare")), strict=True)
    ratio = Measurement(tuple((more - less) / bare for more, less, bare in rows))
    print(cost_line("critic / bare passes of the same model", ratio, CRITIC_GOAL))


def main() -> None:
    """Measure and print."""
    chosen = arguments(__doc__ or "", peer=False)
    repeats, scored = max(chosen.repeats, MIN_REPEATS), draw_samples()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        hf_dir = Path(temporary) / "model"
        num_parameters = write_model(
            hf_dir, vocab_size=VOCAB_SIZE, intermediate_size=768, max_length=512,
            never_stops=False, hidden_size=256, num_layers=6,
        )  # fmt: skip
        steps = {
            name: stack.enter_context(closing(ScoredStep(hf_dir, scored, **rl)))
            for name, rl in ALGORITHMS.items()
        }
        num_tokens = pack([each.trajectory for each in scored.samples]).num_tokens
        print(f"  {machine()}")
        print(
            f"  {num_parameters / 1e6:.2f} M parameters, {num_tokens} tokens, "
            f"{chosen.threads} thread(s)"
        )
        shares(steps, repeats)
        without = stack.enter_context(closing(ScoredStep(hf_dir, scored)))
        bare = BareCritic(hf_dir, scored)
        sides = {"with": steps["ppo"].take, "without": without.take, "bare": bare.take}
        critic_cost(sides, repeats)


if __name__ == "__main__":
    main()
