"""Job `evaluate`: a policy or a model, and the held-out rows, to scores.

Promises: answers that another evaluation of the same model kept are judged, not sampled again.
"""

from contextlib import ExitStack

from engines.config.stages.final import EvaluateStageConfig
from engines.data.read.dataset import load_dataset
from engines.jobs.policy.files import HF_DIR
from engines.jobs.policy.stage import local_reward, policy_tokenizer, prompts_within
from engines.jobs.process.runtime import JobContext, JobOutput, run_job
from engines.jobs.process.torch_setup import prepare_torch
from engines.jobs.serving.answers import KeptAnswers
from engines.jobs.serving.model import (
    ServedModel,
    served_directory,
    served_foreign,
    served_policy,
)
from engines.jobs.serving.serve import serve
from engines.rewards.mixture import check_data_sources
from engines.rewards.scorer import RewardScorer
from engines.trainers.evaluation.evaluator import (
    Evaluation,
    Evaluator,
    Generate,
    by_source,
    told_sources,
)
from engines.trainers.evaluation.files import write_evaluation
from engines.vision.processor import prompt_images
from infra.section_names import renamed_sections

EVALUATION_DEADLINE_S = 7200.0
"""An evaluation that answered nothing for so long hangs."""


def evaluate(context: JobContext[EvaluateStageConfig]) -> JobOutput:
    """Have every problem answered, unless it was before, and judge the answers."""
    config = context.config
    with renamed_sections(config.sections), ExitStack() as stack:
        rewards = stack.enter_context(RewardScorer(local_reward(context, config.reward)))
        with context.clock("load"):
            prepare_torch(
                config.hardware,
                config.num_threads,
                context.journal.log,
                computes=config.driver_computes,
            )
            served = evaluated_model(context)
            dataset = load_dataset(context.input("dataset"))
            rows = dataset.evaluation_rows()
            check_data_sources(config.reward, (row.data_source for row in rows))
            images = prompt_images(served.hf_dir, dataset.images_path)
            prompts = prompts_within(
                rows,
                policy_tokenizer(served.hf_dir),
                served.context_length,
                config.evaluation.answer_length,
                "evaluation.max_new_tokens",
                images,
            )
            serving = serve(context, stack, served, rewards)
        evaluator = Evaluator(config.evaluation, prompts, serving.scorer, context.spec.seed, images)
        answers = KeptAnswers(context, serving.generate)
        evaluation = _run(context, answers, evaluator)
    if answers.num_found:
        context.journal.log(f"{answers.num_found} answers were there already")
    metrics = evaluation.metrics
    write_evaluation(evaluation, context.output_dir)
    told = metrics | {
        f"{source}/{name}": value
        for source, found in by_source(evaluation).items()
        for name, value in found.items()
    }
    context.journal.metrics(served.num_steps, {f"val-core/{k}": v for k, v in told.items()})
    return JobOutput("evaluation", metrics | told_sources(evaluation))


def evaluated_model(context: JobContext[EvaluateStageConfig]) -> ServedModel:
    """The input `policy`, or the input `model`, or the model of nobody's making."""
    policy_dir, model_dir = (context.optional_input(name) for name in ("policy", "model"))
    if policy_dir is not None:
        return served_policy(policy_dir)
    if context.config.model is not None:
        serving_dir = context.attempt_dir / HF_DIR
        return served_foreign(context.config.model, model_dir, serving_dir)
    return served_directory(context.input("model"))


def _run(context: JobContext, generate: Generate, evaluator: Evaluator) -> Evaluation:
    """Evaluate what is being served, with the time counted and the result told."""
    context.heartbeat.enter("evaluate", EVALUATION_DEADLINE_S)

    def report(done: int, total: int) -> None:
        context.heartbeat.tick()
        context.journal.progress(done, total, f"evaluated {done} of {total} problems")

    with context.clock("evaluate"):
        evaluation = evaluator.run(generate, report)
    metrics = evaluation.metrics
    if "accuracy" in metrics:
        context.journal.log(
            f"accuracy {metrics['accuracy']:.1%} "
            f"[{metrics['accuracy_low']:.1%}, {metrics['accuracy_high']:.1%}] on "
            f"{metrics['num_problems']:.0f} held-out problems"
        )
    has_votes = any(name.startswith("maj@") for name in metrics)
    if any(name.startswith("avg@") for name in metrics) and not has_votes:
        context.journal.log("no maj@k: the reward does not say of every answer what it read (pred)")
    return evaluation


JOB = (EvaluateStageConfig, evaluate)

if __name__ == "__main__":
    run_job(*JOB)
