"""Job `evaluate`: scores a policy or a model on held-out rows.

Promises: stored answers of the same model to the same requests are reused; see `KeptAnswers`.
"""

from contextlib import ExitStack, closing

from engines.config.rules.models import check_seen_by_judges
from engines.config.stages.final import EvaluateStageConfig
from engines.data.read.dataset import load_dataset
from engines.data.read.lazy_sequence import MappedRows
from engines.jobs.process.policy_stage import local_reward, policy_tokenizer, prompts_within
from engines.jobs.process.runtime import DEADLINES_S, JobContext, JobOutput, run_job
from engines.jobs.serving.answers import KeptAnswers
from engines.jobs.serving.frozen_models import serve
from engines.jobs.serving.model import load_served
from engines.rewards.resolve import check_data_sources
from engines.rewards.scorer import RewardScorer
from engines.trainers.evaluation.evaluator import (
    Evaluation,
    Evaluator,
    Generate,
    by_source,
    told_sources,
    write_evaluation,
)
from engines.vision.processor import prompt_images
from infra.names import renamed_sections


def evaluate(context: JobContext[EvaluateStageConfig]) -> JobOutput:
    """Sample answers to every problem, unless they are stored, and score them."""
    config = context.config
    with renamed_sections(config.sections), ExitStack() as stack:
        rewards = stack.enter_context(RewardScorer(local_reward(context, config.reward)))
        with context.clock("load"):
            served = load_served(context, config.model)
            dataset = load_dataset(context.input("dataset"))
            rows = MappedRows(dataset.evaluation_rows(), context.attempt_dir)
            stack.enter_context(closing(rows))
            images = prompt_images(served.hf_dir, dataset.images_path)
            prompts = prompts_within(
                rows,
                policy_tokenizer(served.hf_dir),
                served.context_length,
                config.evaluation.answer_length,
                "evaluation.max_new_tokens",
                images,
            )
            check_data_sources(config.reward, prompts.data_sources)
            if prompts.num_with_images:
                shown = f"{prompts.num_with_images} of {len(prompts)} rows show images"
                check_seen_by_judges(shown, config.reward.model, config.reward.judge)
            engines, scorer = serve(context, stack, served, rewards)
        evaluator = Evaluator(config.evaluation, prompts, scorer, context.spec.seed, images)
        answers = KeptAnswers(context, engines.generate)
        evaluation = _run(context, answers, evaluator)
    if answers.num_found:
        context.journal.log(f"{answers.num_found} answers were there already")
    write_evaluation(evaluation, context.output_dir)
    told = evaluation.metrics | {
        f"{source}/{name}": value
        for source, found in by_source(evaluation).items()
        for name, value in found.items()
    }
    context.journal.metrics(served.num_steps, {f"val-core/{k}": v for k, v in told.items()})
    return JobOutput("evaluation", evaluation.metrics | told_sources(evaluation))


def _run(context: JobContext, generate: Generate, evaluator: Evaluator) -> Evaluation:
    """Evaluate with timing and progress, and log the result."""
    context.heartbeat.enter("evaluate", DEADLINES_S["evaluate"])

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
    kinds = {name.partition("@")[0] for name in metrics}
    if "avg" in kinds and "maj" not in kinds:
        context.journal.log("no maj@k: the reward returns no `pred` for some answers")
    return evaluation


JOB = (EvaluateStageConfig, evaluate)

if __name__ == "__main__":
    run_job(*JOB)
