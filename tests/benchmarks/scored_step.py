"""The train part of an RL step alone: from scored samples to the metrics of its updates.

The trainer, its columns and its workers are those of a round; nothing is sampled or scored. The
samples are drawn once: answers of uneven length with random tokens, scores and log-probabilities.
"""

import random
from pathlib import Path
from typing import Any, cast

import numpy as np
from tiny_model import NUM_SPECIAL

from engines.config.stages.rl import RLRoundStageConfig
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.controller.worker_group import InProcessGroup
from engines.data.read.tokenizer import text_config
from engines.trainers.experience import Collector
from engines.trainers.progress import LoopStep
from engines.trainers.recorder import step_metrics
from engines.trainers.rl import RLTrainer
from engines.trainers.scoring import ScoredBatch, ScoredSample
from engines.training.spec import CRITIC, POLICY, REFERENCE, ModelSource, RoleName, RoleSpec
from engines.trajectory import Prompt, Segment, Trajectory

VOCAB_SIZE, MAX_NEW_TOKENS, MAX_LENGTH = 4096, 256, 512
NUM_PROMPTS, GROUP_SIZE, NUM_UPDATES = 8, 8, 2


class NothingAround:
    """What a trainer asks of prompts, rollout and progress while it trains."""

    seed, images, tokenizer = 0, None, None

    def say(self, line: str) -> None:
        """An update that is left out would change what is measured."""
        raise AssertionError(line)


def draw_samples() -> ScoredBatch:
    """Answers of 1 to 256 tokens, mean about 60, behind prompts of 8 to 32."""
    draw, samples = random.Random(0), []
    for group in range(NUM_PROMPTS):
        ids = [draw.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(draw.randint(8, 32))]
        prompt = Prompt(f"prompt={group}", np.array(ids, np.int32))
        for index in range(GROUP_SIZE):
            length = min(MAX_NEW_TOKENS, 1 + int(draw.expovariate(1 / 60)))
            tokens = tuple(draw.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(length))
            logprobs = tuple(draw.uniform(-9.0, -8.0) for _ in tokens)
            reason = "length" if length == MAX_NEW_TOKENS else "stop"
            segment = Segment.sampled(tokens, logprobs, (0,) * length)
            score = float(draw.random() < 0.5)
            answer = Trajectory(prompt, index, (segment,), reason)
            samples.append(ScoredSample(group, answer, score, score))
    return ScoredBatch(tuple(samples), len(samples), 0, 0)


def round_config(**rl: Any) -> RLRoundStageConfig:
    """A round of such steps, of two updates each, so that old log-probabilities are computed."""
    return RLRoundStageConfig.model_validate(
        {
            "round": 1,
            "model": {"init": "random", "max_length": MAX_LENGTH},
            "training": {"max_tokens_per_micro_batch": 2048},
            "rollout": {},
            "rl": {
                "num_steps_per_round": 10_000,
                "batch_size_prompts": NUM_PROMPTS,
                "group_size": GROUP_SIZE,
                "mini_batch_size_prompts": NUM_PROMPTS // NUM_UPDATES,
                "sampling": {"max_new_tokens": MAX_NEW_TOKENS},
                "optimizer": {"lr": 1e-6},
                # Nothing sampled these tokens, so the gate has nothing to compare.
                "mismatch": {"enable": False},
                **rl,
            },
            "checkpoint": {},
        }
    )


class ScoredStep:
    """A trainer and its workers, for steps on the same scored samples.

    Args:
        hf_dir: the model.
        scored: the samples of every step.
        **rl: settings of the section `rl`.
    """

    def __init__(self, hf_dir: Path, scored: ScoredBatch, **rl: Any) -> None:
        config = round_config(**rl)
        spec = WorkerSpec(_roles(config, hf_dir), hf_dir, None, 1.0, "cpu", seed=0)
        worker = ModelWorker(spec)
        worker.initialize()
        self._workers, self._scored = InProcessGroup(worker), scored
        around = cast(Any, NothingAround())
        self._config = config.rl
        vocab_size = text_config(hf_dir)["vocab_size"]
        self._trainer = RLTrainer(
            config, self._workers, around, around, around, around, [NUM_SPECIAL], vocab_size
        )
        self._step = 0

    def close(self) -> None:
        """Free the workers."""
        self._workers.close()

    def take(self) -> dict[str, float]:
        """One step; returns its metrics."""
        self._step += 1
        config, trainer, step = self._config, self._trainer, LoopStep(self._step, self._step)
        collector = Collector(config.batch_size_prompts, config.algorithm.filter_groups)
        collector.add(self._scored)
        batch = trainer.infer(step, collector.experience())
        batch = trainer.estimate_advantages(step, batch, trainer.start.kl_coef)
        updates = trainer.update(step, batch, trainer.start)
        return step_metrics(collector, batch, updates, step.clock, self._workers.world_size)


def _roles(config: RLRoundStageConfig, hf_dir: Path) -> dict[RoleName, RoleSpec]:
    source, training, rl = ModelSource(hf_dir), config.training, config.rl
    num_steps = rl.num_steps_per_round * NUM_UPDATES
    roles = {POLICY: RoleSpec(source, training, rl.optimizer, total_num_steps=num_steps)}
    if rl.algorithm.needs_reference:
        roles[REFERENCE] = RoleSpec(source, training)
    if rl.critic:
        roles[CRITIC] = RoleSpec(
            source, training, rl.critic.optimizer, "value_model", total_num_steps=num_steps
        )
    return roles
