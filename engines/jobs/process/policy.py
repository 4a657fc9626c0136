"""Policies in jobs: their files, tokenizer and prompts, and the sources of all first weights.

    checkpoint/    sharded weights and optimizer; a critic's are below roles/
    hf/            config.json, generation_config.json, tokenizer; no weights
    trainer.json   the stage that made it, its steps, and how many it skipped last

Promises: `hf/` names every token that ends an answer, including the one with which the chat
template ends the assistant's turn, which the base model may not know as an end token.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from engines.checkpoint.model_directory import (
    check_finite,
    check_model_directory,
    create_random_model,
    load_tokenizer,
    resolve_model,
)
from engines.checkpoint.step_store import StepCheckpoints
from engines.checkpoint.teacher import TEACHER_SECTION, check_teacher
from engines.config.algorithm import DistillationConfig, RewardConfig
from engines.config.model import ModelConfig
from engines.config.rules.algorithm import num_spare_tokens
from engines.config.sections import CheckpointConfig
from engines.config.training import HardwareConfig
from engines.controller.placement import Queueing
from engines.data.read.chat import end_of_turn_id
from engines.data.read.dataset import load_dataset
from engines.data.read.examples import OnOverlong, RLPrompts, rl_prompts
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import (
    TOOL_TEMPLATE,
    ChatTokenizer,
    DirectoryTokenizer,
    check_same_tokens,
    check_vocabulary,
)
from engines.jobs.process.runtime import JobContext, JobOutput
from engines.trainers.progress import StageProgress, TrainedSteps
from engines.training.backends.merging import merge_checkpoint
from engines.training.spec import CRITIC, ModelSource, role_checkpoint
from engines.vision.processor import PromptImages
from infra.errors import ConfigError
from infra.identity.imported_code import copy_script
from infra.names import renamed_sections
from infra.store.artifacts import read_manifest
from infra.store.canonical import canonical_json

CHECKPOINT_DIR = "checkpoint"
HF_DIR = "hf"
TRAINER_NAME = "trainer.json"

_HF_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    TOOL_TEMPLATE,
    "preprocessor_config.json",
    "processor_config.json",
)


def policy_source(policy_dir: Path) -> ModelSource:
    """Return the weights of a `policy` artifact."""
    return ModelSource(policy_dir / HF_DIR, policy_dir / CHECKPOINT_DIR)


def initial_source(
    model: ModelConfig, external: Path | None, dataset_dir: Path, seed: int, work_dir: Path
) -> ModelSource:
    """Return the checked weights that a pipeline starts from: local, downloaded, or random.

    Args:
        external: the model as an input of the stage, if it is a local directory.
        dataset_dir: holds the tokenizer for a random model.
        work_dir: where a random model is written; every attempt writes the same bytes.
    """
    if model.init == "pretrained":
        if external is not None:
            check_model_directory(external, max_length=model.max_length)
        directory = external or resolve_model(model, model.max_length)
        check_finite(directory)
        return ModelSource(directory)
    tokenizer_dir = load_dataset(dataset_dir).tokenizer_dir
    if tokenizer_dir is None:
        raise ConfigError(
            "model.init", "got random; need a dataset that was made with model.init: random"
        )
    made = work_dir / "initial_model"
    shutil.rmtree(made, ignore_errors=True)
    create_random_model(model.architecture, tokenizer_dir, model.max_length, seed, made)
    return ModelSource(made)


def copy_hf_files(source: Path, target: Path) -> None:
    """Copy configuration and tokenizer unchanged; replaces `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in _HF_FILES:
        if (source / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


def write_hf_files(source: Path, target: Path, chat_template: str | None) -> None:
    """Copy configuration and tokenizer and add missing end tokens; replaces `target`.

    A `chat_template` replaces the tokenizer's own. Raise ConfigError if no token ends an answer.
    """
    copy_hf_files(source, target)
    if chat_template is not None:
        (target / TOOL_TEMPLATE).unlink(missing_ok=True)
        (target / "chat_template.jinja").write_text(chat_template, encoding="utf-8", newline="")
    path = target / "generation_config.json"
    generation = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    known = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = known if isinstance(known, list) else [] if known is None else [known]
    turn_end = end_of_turn_id(DirectoryTokenizer.load(target))
    if turn_end is not None and turn_end not in ends:
        ends = [*ends, turn_end]
    if not ends:
        raise ConfigError(
            "model.path",
            f"{source} names no token that ends an answer: every one would go on to its limit; "
            "need eos_token_id; set it in config.json or generation_config.json",
        )
    generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    text = json.dumps(generation, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8", newline="")


def write_policy(
    output_dir: Path,
    checkpoint: Path,
    hf_dir: Path,
    steps: TrainedSteps,
) -> None:
    """Lay out a `policy` artifact in an empty directory on the checkpoint's file system.

    The files of the checkpoint are hard-linked, since they never change.
    """
    shutil.copytree(checkpoint, output_dir / CHECKPOINT_DIR, copy_function=os.link)
    shutil.copytree(hf_dir, output_dir / HF_DIR, copy_function=shutil.copyfile)
    (output_dir / TRAINER_NAME).write_bytes(canonical_json(steps.model_dump()) + b"\n")


def trained_steps(policy_dir: Path) -> TrainedSteps:
    """Return the trained steps of a `policy` artifact over all rounds."""
    return TrainedSteps.model_validate_json((policy_dir / TRAINER_NAME).read_bytes())


def teacher_source(
    config: DistillationConfig,
    given: Path | None,
    policy: ModelSource,
    max_length: int,
    rollout_engine: str,
) -> ModelSource:
    """Return the directory of the teacher's weights; a ConfigError names the bad field.

    `given` is a local directory, None for the hub. `max_length` is the policy's context.
    """
    with renamed_sections({"model": TEACHER_SECTION}):
        directory = given or resolve_model(config, max_length)
    num_spare = num_spare_tokens(config, rollout_engine)
    check_teacher(config, directory, policy.hf_dir, max_length, num_spare)
    return ModelSource(directory)


def critic_source(
    policy: ModelSource,
    policy_dir: Path | None,
    work_dir: Path,
    reward_model: ModelSource | None = None,
) -> ModelSource:
    """Return the first weights of a critic: the last critic's, else a reward model's or policy's.

    A policy's checkpoint has no value head and may have any layout: its weights are exported once,
    with an adapter merged in, and the missing head starts at 0.

    Args:
        policy_dir: artifact of the policy; None if it is a Hugging Face directory.
        work_dir: directory for exported weights.
        reward_model: first weights, with head, of the first round's critic; its tokens must be
            those of the policy (ConfigError). None: the policy.
    """
    if policy_dir is not None:
        before = role_checkpoint(policy_dir / CHECKPOINT_DIR, CRITIC)
        if before.exists():
            # The critic has the shape of its own first weights.
            like = policy_dir / HF_DIR if reward_model is None else reward_model.hf_dir
            return ModelSource(like, before)
    if reward_model is not None:
        check_same_tokens(policy.hf_dir, reward_model.hf_dir, "rl.critic.start", "a reward model")
        return reward_model
    if policy_dir is None:
        return policy
    return exported_policy(policy_dir, work_dir / "initial_critic")


def exported_policy(policy_dir: Path, target: Path, max_shard_bytes: int = 2**30) -> ModelSource:
    """Write the weights of a `policy` artifact in float32, an adapter merged in, to `target`."""
    shutil.rmtree(target, ignore_errors=True)
    merge_checkpoint(policy_dir, target, "float32", max_shard_bytes)
    return ModelSource(target)


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
        path: setting that limits `max_new_tokens`, for errors.
        images: images of the rows; None: they have none.
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
    """Return the reward with its user files copied into the store as they were planned.

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
    """Return how a stage waits for room: it logs to the journal, and the wait is no stall."""
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
