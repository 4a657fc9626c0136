"""Job `preprocess`: turns raw data into checked rows. Imports no torch."""

from functools import partial

from engines.checkpoint.model_directory import check_model_directory, resolve_model
from engines.config.data import SOURCE_SPLITS
from engines.config.stages.data import HELD_OUT, SOURCE, PreprocessStageConfig
from engines.data.prepare.dataset import build_dataset
from engines.data.prepare.files import some_of
from engines.data.read.dataset import load_dataset
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.jobs.process.runtime import DEADLINES_S, JobContext, JobOutput, run_job
from engines.vision.sizes import image_sizes


def preprocess(context: JobContext[PreprocessStageConfig]) -> JobOutput:
    """Generate or read the rows, check them, and write the dataset."""
    config, spec = context.config, context.spec
    context.heartbeat.enter("preprocess", DEADLINES_S["preprocess"])
    tokenizer = find_sizes = None
    model = config.model
    if model and model.init == "pretrained":
        with context.clock("load"):
            model_dir = context.optional_input("model") or resolve_model(model, model.max_length)
            check_model_directory(model_dir, max_length=model.max_length)
            # Without tokenizer.json transformers is needed; the training stage counts tokens then.
            if (model_dir / "tokenizer.json").exists():
                tokenizer = DirectoryTokenizer.load(model_dir, model.chat_template)
                find_sizes = partial(image_sizes, model_dir)
    with (
        context.clock("preprocess"),
        context.reading([name for name in spec.inputs if name.startswith(SOURCE)]),
    ):
        summary = build_dataset(
            config.data,
            model,
            spec.seed,
            context.output_dir,
            tokenizer,
            suites(context),
            find_sizes,
        )
    parts = {
        "num_sft": summary.sft,
        "num_rl": summary.rl,
        "num_eval": summary.evaluation,
        "num_preference": summary.preference,
        "num_preference_evaluation": summary.preference_evaluation,
    }
    counts = {name: part.num_rows for name, part in parts.items() if part is not None}
    if summary.num_decontaminated is not None:
        counts["num_decontaminated"] = sum(summary.num_decontaminated.values())
    for split in SOURCE_SPLITS:
        part = getattr(summary, split)
        for place, report in enumerate(part.sources if part else ()):
            if report.passed_over:
                skipped = some_of(report.passed_over)
                context.journal.log(f"{SOURCE}{split}.{place}: not read: {skipped}")
    context.journal.progress(1, 1, "  ".join(f"{name} {count}" for name, count in counts.items()))
    return JobOutput("dataset", {name: float(count) for name, count in counts.items()})


def suites(context: JobContext[PreprocessStageConfig]) -> dict[str, tuple[RLRow, ...]]:
    """Return the problems of the recipe's suites by the configuration path of their data."""
    return {
        f"suites.{name.removeprefix(HELD_OUT)}.data": tuple(
            load_dataset(context.input(name)).evaluation_rows()
        )
        for name in context.spec.inputs
        if name.startswith(HELD_OUT)
    }


if __name__ == "__main__":
    run_job(PreprocessStageConfig, preprocess)
