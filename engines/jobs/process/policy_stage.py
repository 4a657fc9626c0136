"""Shared parts of the stages of a policy: tokenizer, prompts, reward file, progress and output."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from engines.checkpoint.model_directory import load_tokenizer
from engines.checkpoint.step_store import StepCheckpoints
from engines.config.algorithm import RewardConfig
from engines.config.sections import CheckpointConfig
from engines.config.training import HardwareConfig
from engines.controller.placement import Queueing
from engines.data.read.examples import OnOverlong, RLPrompts, rl_prompts
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import (
    ChatTokenizer,
    DirectoryTokenizer,
    check_vocabulary,
)
from engines.jobs.process.policy import CHECKPOINT_DIR, write_policy
from engines.jobs.process.runtime import JobContext, JobOutput
from engines.trainers.progress import StageProgress
from engines.trainers.trained_steps import TrainedSteps
from engines.vision.processor import PromptImages
from infra.errors import ConfigError
from infra.identity.imported_code import copy_script
from infra.store.artifacts import read_manifest


def policy_tokenizer(hf_dir: Path, chat_template: str | None = None) -> ChatTokenizer:
    """Return the tokenizer of a model directory, without transformers if possible.

    Raise ConfigError if it has more tokens than the model's vocabulary.
    """
    if (hf_dir / "tokenizer.json").exists():
        tokenizer: ChatTokenizer = DirectoryTokenizer.load(hf_dir, chat_template)
    else:
        # transformers' fast tokenizers implement the protocol, but their annotations do not say so.
        tokenizer = cast(ChatTokenizer, load_tokenizer(hf_dir, chat_template))
    check_vocabulary(hf_dir, len(tokenizer))
    return tokenizer


def prompts_within(
    rows: Sequence[RLRow],
    tokenizer: ChatTokenizer,
    max_length: int,
    max_new_tokens: int,
    path: str = "rl.sampling.max_new_tokens",
    images: PromptImages | None = None,
    on_overlong: OnOverlong = "error",
) -> RLPrompts:
    """Tokenize prompts that leave room for a whole answer, in row order.

    Args:
        max_length: context in tokens.
        path: setting of `max_new_tokens`, for errors.
        images: images of the rows; None refuses rows with images.
        on_overlong: `drop` leaves out prompts without room.

    Raises:
        ConfigError: there are no rows, or a prompt (with `drop`: every prompt) leaves no room.
    """
    if not rows:
        raise ConfigError("data", "the split of this stage has 0 rows; add a source")

    def with_room(lengths: Sequence[int]) -> list[int]:
        kept = [place for place, n in enumerate(lengths) if n + max_new_tokens <= max_length]
        if len(kept) == len(lengths) or (kept and on_overlong == "drop"):
            return kept
        # If the longest fits, none is refused; with `drop`, one remains if the shortest fits.
        name, pick = ("shortest", min) if on_overlong == "drop" else ("longest", max)
        place = pick(range(len(lengths)), key=lengths.__getitem__)
        room = max_length - lengths[place]
        raise ConfigError(
            path,
            f"got {max_new_tokens}; {len(lengths) - len(kept)} of {len(lengths)} prompts leave "
            f"less of a context of {max_length} tokens (the {name}, prompt {place}, has "
            f"{lengths[place]}); "
            + (f"need at most {room}; lower it, or leave" if room > 0 else "leave")
            + " such prompts out",
        )

    return rl_prompts(rows, tokenizer, with_room, images.expanded if images else None)


def local_reward(context: JobContext, reward: RewardConfig) -> RewardConfig:
    """Return the reward with its user files replaced by copies in the store, as planned.

    Scoring processes start at any time of the stage and must not read files that the user edits.
    """
    functions: dict[str, str] = {}
    for path, part in reward.parts.items():
        name = path.removeprefix("rl.")
        if artifact := context.spec.inputs.get(name):
            copy = context.attempt_dir / name
            copy_script(artifact, copy, f"{path}.function")
            stored = context.storage.local_copy(context.storage.publish(copy, artifact.kind))
            functions[path] = f"{stored / Path(artifact.uri).name}:{part.function_in_file}"
    return reward.with_functions(functions)


def queueing(context: JobContext, hardware: HardwareConfig) -> Queueing:
    """Return how a stage waits for resources: a deadline, callbacks to journal and heartbeat."""
    return Queueing(
        hardware.queue_timeout_s, say=context.journal.log, waiting=context.heartbeat.tick
    )


def stage_progress(
    context: JobContext, checkpoint: CheckpointConfig, num_steps: int
) -> StageProgress:
    """Return journal, step checkpoints and clock of this stage."""
    return StageProgress(
        journal=context.journal,
        heartbeat=context.heartbeat,
        checkpoints=StepCheckpoints(
            context.steps_dir, checkpoint.num_keep, before_publish=context.check_held
        ),
        every_num_steps=checkpoint.every_num_steps,
        num_steps=num_steps,
        clock=context.clock,
        background_timeout_s=checkpoint.timeout_s if checkpoint.async_save else None,
    )


def policy_output(
    context: JobContext,
    progress: StageProgress,
    hf_dir: Path,
    steps: TrainedSteps,
    metrics: Mapping[str, float] | None = None,
) -> JobOutput:
    """Write the `policy` artifact and return it with its metrics."""
    with context.clock("save"):
        checkpoint = progress.last_checkpoint()
        write_policy(context.output_dir, checkpoint, hf_dir, steps)
        # These files come from the step checkpoint under the same names and are already hashed.
        digests = {
            name: file.sha256
            for name, file in read_manifest(checkpoint.parent).files.items()
            if name.startswith(f"{CHECKPOINT_DIR}/")
        }
    return JobOutput("policy", {"num_steps": float(steps.num_steps), **(metrics or {})}, digests)
