"""Job `evaluate`: a model directory and the held-out rows to scores, as a user would load it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from engines.checkpoint.model_directory import check_model_directory
from engines.config.stages import EvaluateStageConfig
from engines.data.read.dataset import load_dataset
from engines.jobs.policy_stage import (
    evaluate_policy,
    local_reward,
    policy_tokenizer,
    prompts_within,
)
from engines.jobs.runtime import JobContext, JobOutput, run_job
from engines.jobs.torch_setup import prepare_torch
from engines.rewards.scorer import RewardScorer
from engines.rollout.base import RolloutEngine
from engines.rollout.collect import generate_all
from engines.rollout.registry import create_rollout_engine
from engines.trainers.evaluation import Evaluator
from engines.trainers.evaluation_files import write_evaluation
from engines.trainers.scoring import CompletionScorer
from engines.types import Completion, RolloutRequest
from engines.weight_sync.in_process import InProcessCheckpointEngine

WEIGHTS_VERSION = 0
DEFAULT_DTYPE = "float32"


def evaluate(context: JobContext[EvaluateStageConfig]) -> JobOutput:
    """Serve the model, answer every problem, judge the answers."""
    config, spec = context.config, context.spec
    num_new_tokens = config.evaluation.answer_length
    with RewardScorer(local_reward(context, config.reward)) as rewards:
        with context.clock("load"):
            platform = prepare_torch(context.runtime)
            model_dir = context.input("model")
            check_model_directory(model_dir)
            tokenizer = policy_tokenizer(model_dir)
            prompts = prompts_within(
                load_dataset(context.input("dataset")).evaluation_rows(),
                tokenizer,
                context_length(model_dir),
                num_new_tokens,
            )
            dtype = config.rollout.dtype or DEFAULT_DTYPE
            engine = create_rollout_engine(
                config.rollout.engine, model_dir, config.rollout, dtype, platform
            )
            sender = InProcessCheckpointEngine(engine, dtype)
            sender.send_weights(stored_tensors(model_dir), WEIGHTS_VERSION)

        def generate(requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
            return generate_groups(engine, requests, config.rollout.timeout_s)

        scorer = CompletionScorer(rewards, tokenizer)
        evaluator = Evaluator(config.evaluation, prompts, scorer, spec.seed)
        evaluation = evaluate_policy(context, generate, evaluator)
    write_evaluation(evaluation, context.output_dir)
    context.journal.metrics(0, {f"val-core/{k}": v for k, v in evaluation.metrics.items()})
    return JobOutput("evaluation", evaluation.metrics)


def generate_groups(
    engine: RolloutEngine, requests: Sequence[RolloutRequest], timeout_s: float
) -> list[list[Completion]]:
    """Completions by request, in the order of its seeds."""
    flat = iter(generate_all(engine, requests, timeout_s))
    return [[next(flat) for _ in range(request.num_samples)] for request in requests]


def stored_tensors(model_dir: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model directory, one at a time, by their names in the files."""
    for shard in sorted(model_dir.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def context_length(model_dir: Path) -> int:
    """Tokens that the model was built for."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return int(config.get("text_config", config)["max_position_embeddings"])


if __name__ == "__main__":
    run_job(EvaluateStageConfig, evaluate)
