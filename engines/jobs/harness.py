"""Job `harness`: runs lm-evaluation-harness on a Hugging Face model.

Runs in the job environment of the harness. One rank computes log-likelihoods of given texts, and
rollout engines sample answers; both have the same weights.
"""

from contextlib import ExitStack

from engines.checkpoint.model_directory import load_tokenizer
from engines.config.stages.final import HarnessStageConfig
from engines.controller.launch import launch_served_model
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.jobs.process.policy_stage import queueing
from engines.jobs.process.runtime import DEADLINES_S, JobContext, JobOutput, run_job
from engines.jobs.serving.model import ServedOnDemand, load_served, replica_of
from engines.trainers.evaluation.documents import write_measurement
from engines.trainers.evaluation.harness import HarnessModel, run_tasks
from engines.training.spec import POLICY, ModelSource, RoleSpec
from engines.types import ModelOutputs, Readouts, TokenBatch


def harness(context: JobContext[HarnessStageConfig]) -> JobOutput:
    """Run the harness tasks and write their metrics and documents."""
    config = context.config
    with ExitStack() as stack:
        with context.clock("load"):
            model = _model(context, stack)
        context.heartbeat.enter("evaluate", DEADLINES_S["evaluate"])
        with context.clock("evaluate"):
            metrics, tasks, documents = run_tasks(
                config.harness,
                model,
                context.optional_input("tasks"),
                context.spec.seed,
                config.confidence,
                config.section,
            )
    write_measurement(metrics, tasks, documents, context.output_dir)
    context.journal.metrics(0, {f"val-core/{name}": v for name, v in metrics.items()})
    context.journal.log(f"{metrics['num_problems']:.0f} documents of {', '.join(sorted(tasks))}")
    return JobOutput("evaluation", metrics)


def _model(context: JobContext[HarnessStageConfig], stack: ExitStack) -> HarnessModel:
    """Make the model that the harness queries; engines start with the first query."""
    config, spec = context.config, context.spec
    served = load_served(context, config.model)
    if served.weights_dir is None:
        raise ValueError("got a policy checkpoint; the harness needs a merged model")
    replica = replica_of(config, served, context.attempt_dir)
    reader = WorkerSpec(
        roles={POLICY: RoleSpec(ModelSource(served.weights_dir), config.training)},
        serving_dir=served.hf_dir,
        rollout=None,
        temperature=1.0,
        platform=config.hardware.platform,
        device_kind=config.hardware.device_kind,
        seed=spec.seed,
    )
    waiting = queueing(context, config.hardware)
    engines = ServedOnDemand(
        served, lambda: launch_served_model(replica, reader, None, waiting), stack
    )

    def infer(batch: TokenBatch) -> ModelOutputs:
        ranks = engines.launched.beside
        if ranks is None:
            raise ValueError("no rank was launched beside the engines")
        return ranks.run(ModelWorker.infer, batch, Readouts(num_top=1), POLICY)

    def report(done: int, total: int, what: str) -> None:
        context.heartbeat.tick()
        context.journal.progress(done, total, f"{done} of {total} {what}")

    return HarnessModel(
        load_tokenizer(served.hf_dir),
        served.context_length,
        infer,
        engines.generate,
        report,
        spec.seed,
        config.harness.max_new_tokens,
        config.section,
    )


if __name__ == "__main__":
    run_job(HarnessStageConfig, harness)
