"""SFT, the policy update of RL, and device memory by phase, on one device."""

import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_figures import Figure, Goal, Setup
from measure import Measurement

from engines.algorithms.policy_objective import policy_loss_fn
from engines.algorithms.supervised import SupervisedLoss
from engines.config.algorithm import AlgorithmConfig
from engines.config.rollout import RolloutConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller.launch import launch_policy_beside
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.trainers.experience import Experience
from engines.trainers.packing import pack
from engines.trainers.scoring import ScoredSample
from engines.training.base import create_engine
from engines.training.spec import POLICY, ModelSource, RoleSpec
from engines.trajectory import Prompt, Trajectory
from engines.types import Completion, RolloutRequest, SamplingParams, TokenBatch
from hardware.base import PlatformBase
from hardware.detection import has_kernel_compiler

SFT_GOAL, UPDATE_GOAL, RESERVED_GOAL = Goal(0.4), Goal(0.35), Goal(1.3, at_most=True)
STEPS_PER_TURN = 4
LR = 1e-6
TIMEOUT_S = 600.0


def draw_ids(draw: random.Random, vocab_size: int, num: int) -> tuple[int, ...]:
    """Token ids that are not special."""
    return tuple(draw.randrange(4, vocab_size) for _ in range(num))


def requests_of(setup: Setup, seed: int, max_new_tokens: int | None = None) -> list[RolloutRequest]:
    """The prompts of a step; every sample has a seed of 31 bits."""
    draw = random.Random(seed)
    sampling = SamplingParams(max_new_tokens or setup.max_new_tokens)
    return [
        RolloutRequest(
            f"seed={seed}/prompt={at}",
            draw_ids(draw, setup.shape.vocab_size, setup.prompt_length),
            sampling,
            tuple(draw.getrandbits(31) for _ in range(setup.group_size)),
        )
        for at in range(setup.num_prompts)
    ]


def policy_spec(setup: Setup, hf_dir: Path, **training: bool) -> WorkerSpec:
    """One rank with an embedded engine; what is not given is the project's default."""
    tokens = setup.shape.sequence_length * setup.shape.num_sequences
    config = TrainingConfig(
        dtype=setup.dtype,  # pyright: ignore[reportArgumentType]
        max_tokens_per_micro_batch=tokens,
        **training,
    ).on(accelerator=setup.platform != "cpu", has_compiler=has_kernel_compiler())
    role = RoleSpec(ModelSource(hf_dir), config, OptimizerConfig(lr=LR), total_num_steps=10_000)
    return WorkerSpec(
        roles={POLICY: role},
        serving_dir=hf_dir,
        rollout=RolloutConfig(max_num_sequences=setup.num_samples, timeout_s=TIMEOUT_S),
        temperature=1.0,
        platform=setup.platform,
        seed=0,
    )


def drawn_batch(setup: Setup, num_prompts: int) -> TokenBatch:
    """What a step of RL trains on: random answers of full length, scored and with advantages."""
    draw = random.Random(0)
    samples: list[ScoredSample] = []
    for group, request in enumerate(requests_of(setup, 0)[:num_prompts]):
        prompt = Prompt.of(request)
        for index in range(setup.group_size):
            ids = draw_ids(draw, setup.shape.vocab_size, setup.max_new_tokens)
            logprobs = [-draw.random() for _ in ids]
            answer = Completion(request.request_id, index, ids, logprobs, [0] * len(ids), "length")
            score = draw.random()
            samples.append(ScoredSample(group, Trajectory.of(prompt, answer), score, score))
    index_B = torch.tensor([sample.group for sample in samples])
    batch = pack([sample.trajectory for sample in samples])
    return Experience(tuple(samples), index_B, batch).with_advantages(AlgorithmConfig()).batch


def seconds_of(platform: PlatformBase, call: Callable[[], object]) -> float:
    """Wall seconds of a call and of the work that it queued on the device."""
    platform.synchronize()
    start = time.perf_counter()
    call()
    platform.synchronize()
    return time.perf_counter() - start


def rates(
    setup: Setup, name: str, what: str, num_tokens: int, length: int, seconds: list[float],
    goal: Goal, share: float = 1.0,
) -> Iterator[Figure]:  # fmt: skip
    """Tokens per second, and the model FLOPs' share of the device's peak if that is known.

    `share` is the part of a forward and backward pass that the seconds are of.
    """
    rate = Measurement(tuple(num_tokens / each for each in seconds))
    yield Figure(name, what, "tokens/s", rate)
    if setup.peak_flops_per_s is not None:
        flops = setup.shape.flops_per_token(length) * share / setup.peak_flops_per_s
        mfu = Measurement(tuple(value * flops for value in rate.values))
        yield Figure(name, f"{what}, MFU", "%", mfu, goal if share == 1.0 else None)


def sft(setup: Setup) -> Iterator[Figure]:
    """Steps of SFT on full rows in one micro-batch, by the defaults of `training`.

    Without recomputation, as the plan chooses for this model on a device with 40 GB or more.
    """
    platform, shape = setup.open_platform(), setup.shape
    num_tokens = shape.sequence_length * shape.num_sequences
    training = policy_spec(setup, setup.hf_dir, gradient_checkpointing=False).training
    engine = create_engine(
        "language_model", setup.hf_dir, training, OptimizerConfig(lr=LR), 10_000, platform, seed=0
    )
    engine.initialize()
    draw = random.Random(0)
    mask = [[0.0] + [1.0] * (shape.sequence_length - 1)] * shape.num_sequences
    rows = [
        [
            list(draw_ids(draw, shape.vocab_size, shape.sequence_length))
            for _ in range(shape.num_sequences)
        ]
        for _ in range(STEPS_PER_TURN)
    ]

    def turn() -> None:
        for each in rows:
            engine.train_batch(TokenBatch.from_sequences(each, loss_mask=mask), SupervisedLoss())

    found = [seconds_of(platform, turn) for _ in range(setup.num_repeats + 1)][1:]
    what = f"{num_tokens:,} tokens a step, {setup.dtype}"
    yield from rates(
        setup, "sft", what, num_tokens * STEPS_PER_TURN, shape.sequence_length, found, SFT_GOAL
    )


def policy_update(setup: Setup) -> Iterator[Figure]:
    """Logprobs and one optimizer step of GRPO with recomputation, by the worker of a rank."""
    platform = setup.open_platform()
    worker = ModelWorker(policy_spec(setup, setup.hf_dir, gradient_checkpointing=True))
    with closing(worker):
        worker.initialize()
        batch = drawn_batch(setup, setup.num_prompts)
        loss = policy_loss_fn(AlgorithmConfig(), setup.max_new_tokens)
        passes: tuple[tuple[str, Callable[[], object], float], ...] = (
            ("update with recomputation", lambda: worker.train(batch, loss), 1.0),
            ("logprobs alone", lambda: worker.infer_logprobs(batch), 1 / 3),
        )
        for what, call, share in passes:
            found = [seconds_of(platform, call) for _ in range(setup.num_repeats + 1)][1:]
            yield from rates(
                setup, "policy_update", what, batch.num_tokens, setup.sample_length, found,
                UPDATE_GOAL, share,
            )  # fmt: skip


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device: of this process's tensors, of its allocator, and of everybody."""

    allocated_bytes: int
    reserved_bytes: int
    used_bytes: int


def device_memory(platform: PlatformBase) -> DeviceMemory:
    """As it is, garbage collected; of a CPU all three are the process's resident memory."""
    gc.collect()
    platform.synchronize()
    allocated_bytes = platform.memory_allocated_bytes()
    if platform.device_name == "cpu":
        return DeviceMemory(allocated_bytes, allocated_bytes, allocated_bytes)
    module = torch.get_device_module(platform.device())
    free_bytes, total_bytes = module.mem_get_info()
    return DeviceMemory(allocated_bytes, module.memory_reserved(), total_bytes - free_bytes)


def memory(setup: Setup) -> Iterator[Figure]:
    """Device memory after each phase of a step, embedded engine, no offloading."""
    platform = setup.open_platform()
    spec = policy_spec(setup, setup.hf_dir, gradient_checkpointing=True)
    loss = policy_loss_fn(AlgorithmConfig(), setup.max_new_tokens)
    batch = drawn_batch(setup, max(1, setup.num_prompts // 4))
    requests = requests_of(setup, 1, max_new_tokens=min(32, setup.max_new_tokens))
    with tempfile.TemporaryDirectory() as logs:
        workers, rollout, _ = launch_policy_beside(spec, {}, Path(logs))
        with closing(workers), closing(rollout):
            rollout.publish(0)
            yield from held("after the first sync", device_memory(platform))
            rollout.generate(requests)
            yield from held("after generation", device_memory(platform))
            rollout.sleep()
            yield from held("engine asleep", device_memory(platform))
            workers.run(ModelWorker.train, batch, loss)
            updated = device_memory(platform)
            yield from held("after an update", updated)
            ratio = updated.reserved_bytes / max(updated.allocated_bytes, 1)
            if platform.device_name != "cpu":
                yield Figure(
                    "memory", "reserved over allocated after an update", "",
                    Measurement((ratio,)), RESERVED_GOAL,
                )  # fmt: skip
            rollout.publish(1)
            yield from held("after the second sync", device_memory(platform))
    peak_gb = platform.max_memory_allocated_bytes() / 1e9
    yield Figure("memory", "largest allocation", "GB", Measurement((peak_gb,)))


def held(phase: str, memory: DeviceMemory) -> Iterator[Figure]:
    """Allocated, reserved and used bytes after a phase; one figure if all are the same."""
    found = {
        "allocated": memory.allocated_bytes,
        "reserved": memory.reserved_bytes,
        "used on the device": memory.used_bytes,
    }
    if len({*found.values()}) == 1:
        found = {"resident": memory.allocated_bytes}
    for what, num_bytes in found.items():
        yield Figure("memory", f"{phase}: {what}", "GB", Measurement((num_bytes / 1e9,)))
