"""A look at what a recipe names, before anything trains.

Called as `python -m engines.jobs.preflight.look < LOOK`. Reads a `Look` as JSON and answers with
one JSON line: the first problem, or none. It opens the headers of safetensors files, the first row
of each local source and the tokenizer, and calls a reward of the user's once with that row, in a
process of its own.
Promises: no weight is read, torch is not imported; what it refuses would have ended the run later,
with the same field named. One repository and revision of the hub is one commit in all of the
answer, so that tokenizer and weights, and the splits of one data set, cannot be of two.
Does not promise that the rest of the rows is as good as the first.
"""

import json
import sys
from pathlib import Path
from typing import TypeVar

from engines.checkpoint.model_directory import (
    check_model_directory,
    check_reward_model,
    model_of_section,
    num_parameters,
    stated_context,
    stored_tensor_names,
)
from engines.checkpoint.models.teacher import TEACHER_SECTION, check_teacher
from engines.config.algorithm import RewardConfig
from engines.config.base import local_path
from engines.config.data import SOURCE_SPLITS, DataConfig, SourceConfig
from engines.config.distillation import DistillationConfig
from engines.config.look import Answer, Look
from engines.config.model import JudgeConfig, ModelConfig, RewardModelConfig
from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.suite import suite_sections
from engines.config.training import LoraConfig
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import DirectoryTokenizer, check_vocabulary, text_config
from engines.errors import RewardError
from engines.jobs.preflight.images import look_at_images
from engines.jobs.preflight.rows import first_row, first_rows, look_at_prompt, shows_images
from engines.rewards.base import SampledTokens, ScoreRequest, Unscored
from engines.rewards.judges.question import question
from engines.rewards.scorer import RewardScorer
from infra.errors import ConfigError
from infra.identity.hub import RepoType, hub_commit
from infra.plugins import Row, load_row
from infra.section_names import renamed_sections

OnHub = TypeVar(
    "OnHub", ModelConfig, RewardModelConfig, JudgeConfig, DistillationConfig, SourceConfig
)

_LINEAR_SUFFIX = ".weight"
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the weight and two moments of the optimizer, each in float32."""
BYTES_OF_AVERAGE = 4
"""What a moving average of the weights adds to each of them."""


def look(at: Look) -> Look:
    """Refuse what could not be trained on.

    Args:
        at: what the recipe names.

    Returns:
        The same, with the commit of everything on the hub, and the size of a checkpoint.

    Raises:
        ConfigError: names the field and what to do.
    """
    tokenizer, of_other = look_at_model(at.model, at.lora, trains=at.trains), None
    if at.against is not None:
        with renamed_sections({"model": "against"}):
            of_other = look_at_model(at.against, None, trains=False)
            if local_path(at.against.path) is not None:
                _look_at_engine(Path(str(at.against.path)), at.rollout_engine)
    look_at_stop_tokens(at)
    look_at_rollout(at)
    row = None
    if at.data is not None:
        rows = first_rows(at.data, "data", tokenizer)
        row = first_row(at.data, rows)
        look_at_images(at, shows_images(at.data, rows, "data"))
    if of_other is not None and row is not None:
        with renamed_sections({"model": "against"}):
            look_at_prompt(row, of_other)
    for name, suite in at.suites.items():
        if suite.data is None:
            continue
        with renamed_sections(suite_sections(name)):
            rows = first_rows(suite.data, "data", tokenizer)
            of_suite = first_row(suite.data, rows)
            look_at_images(at, shows_images(suite.data, rows, "data"))
            if suite.reward is not None:
                look_at_reward(suite.reward, of_suite)
        row = row or of_suite
    look_at_answers(at)
    if at.reward_model is not None:
        look_at_reward_model(at.reward_model, row)
    if at.judge is not None:
        look_at_judge(at.judge, at.rollout_engine, row)
    if at.teacher is not None:
        look_at_teacher(at.teacher, at.model)
    if at.reward is not None:
        look_at_reward(at.reward, row)
    found = with_commits(at)
    return found.model_copy(update={"checkpoint_bytes": checkpoint_bytes(at)})


def with_commits(at: Look) -> Look:
    """Resolve what is on the hub.

    Args:
        at: what the recipe names; what is not here is on the hub.

    Returns:
        The same, where every `revision` of a hub id is a commit.

    Raises:
        ConfigError: one cannot be resolved; names the field.
    """
    known: dict[tuple[str, RepoType, str | None], str] = {}

    def resolved(config: OnHub, repo_type: RepoType, section: str) -> OnHub:
        if config.path is None or local_path(config.path):
            return config
        key = (config.path, repo_type, config.revision)
        if key not in known:
            known[key] = hub_commit(*key, section)
        return config.model_copy(update={"revision": known[key]})

    def of_data(data: DataConfig, section: str) -> DataConfig:
        sources = {
            split: tuple(
                resolved(source, "dataset", f"{section}.{split}.{place}")
                for place, source in enumerate(getattr(data, split))
            )
            for split in SOURCE_SPLITS
        }
        return data.model_copy(update=sources)

    found: dict[str, object] = {
        "data": of_data(at.data, "data") if at.data else None,
        "model": resolved(at.model, "model", "model"),
        "against": resolved(at.against, "model", "against") if at.against else None,
        "suites": {
            name: suite.model_copy(
                update={"data": suite.data and of_data(suite.data, f"suites.{name}.data")}
            )
            for name, suite in at.suites.items()
        },
    }
    if at.reward_model is not None:
        found["reward_model"] = resolved(at.reward_model, "model", "rl.reward.model")
    if at.judge is not None:
        found["judge"] = resolved(at.judge, "model", "rl.reward.judge")
    if at.teacher is not None:
        found["teacher"] = resolved(at.teacher, "model", TEACHER_SECTION)
    return at.model_copy(update=found)


def look_at_model(
    model: ModelConfig, lora: LoraConfig | None, *, trains: bool = True
) -> DirectoryTokenizer | None:
    """Check a local model directory by its headers.

    Args:
        model: of the recipe.
        lora: adapter that is to be trained, if any.
        trains: whether the model has to have room for `model.max_length`.

    Returns:
        Its tokenizer; None for a hub id, a model made from scratch, or a slow tokenizer.

    Raises:
        ConfigError: a file is missing or damaged, or the adapter's targets match nothing.
    """
    directory = local_path(model.path)
    if directory is None:
        return None
    check_model_directory(directory, max_length=model.max_length if trains else None)
    names = stored_tensor_names(directory)
    if lora is not None and lora.target_modules != "all-linear":
        _check_targets(names, lora.target_modules)
    if not (directory / "tokenizer.json").exists():
        return None
    tokenizer = DirectoryTokenizer.load(directory, model.chat_template)
    check_vocabulary(directory, tokenizer.max_token_id + 1)
    return tokenizer


def look_at_reward_model(model: RewardModelConfig, row: RLRow | None) -> None:
    """Check a local reward model by its headers, and its template by one prompt.

    Args:
        model: of the recipe; of a hub id nothing is known yet.
        row: with a prompt; None checks no template.

    Raises:
        ConfigError: names the setting below `rl.reward.model`.
    """
    directory = local_path(model.path)
    if directory is None:
        return
    with model_of_section("rl.reward.model"):
        check_reward_model(directory, max_length=model.max_length)
        _look_at_template(directory, model.chat_template, row)


def look_at_judge(judge: JudgeConfig, rollout_engine: str | None, row: RLRow | None) -> None:
    """Check what a judge is asked and, of a local one, its headers, engine and template.

    Args:
        judge: of the recipe.
        rollout_engine: has to serve it; None asks none.
        row: what is asked about; None asks nothing.

    Raises:
        ConfigError: names the setting below `rl.reward.judge`.
    """
    if row is not None:
        question(judge.prompt, row.prompt, _perfect_answer(row))
    directory = local_path(judge.path)
    if directory is None:
        return
    with model_of_section("rl.reward.judge"):
        check_model_directory(directory, max_length=judge.max_length)
        _look_at_template(directory, judge.chat_template, row)
    _look_at_engine(directory, rollout_engine)


def look_at_teacher(teacher: DistillationConfig, model: ModelConfig) -> None:
    """Check a local teacher by its headers, and its tokens against those of a local model.

    Args:
        teacher: of the recipe; of a hub id nothing is known yet.
        model: that it teaches; of one made from scratch the job compares.

    Raises:
        ConfigError: names the setting below `rl.distillation`.
    """
    directory = local_path(teacher.path)
    if directory is not None:
        check_teacher(teacher, directory, local_path(model.path), model.max_length)


def _look_at_template(directory: Path, chat_template: str | None, row: RLRow | None) -> None:
    if not (directory / "tokenizer.json").exists():
        return
    tokenizer = DirectoryTokenizer.load(directory, chat_template)
    check_vocabulary(directory, tokenizer.max_token_id + 1)
    if row is not None:
        look_at_prompt(row, tokenizer)


def look_at_stop_tokens(at: Look) -> None:
    """Refuse stop tokens that the vocabulary of a local model does not have.

    Args:
        at: what the recipe names.

    Raises:
        ConfigError: names the setting, the token and the vocabulary.
    """
    directory = local_path(at.model.path)
    size = text_config(directory).get("vocab_size") if directory else None
    for setting, ids in at.stop_token_ids.items():
        if size is not None and max(ids, default=0) >= size:
            raise ConfigError(
                setting,
                f"got {max(ids)}; need ids below {size}, the vocabulary of {directory}; take ids "
                "of its tokenizer",
            )


def checkpoint_bytes(at: Look) -> int | None:
    """How large a checkpoint of a local model is.

    Args:
        at: what the recipe names.

    Returns:
        Bytes; None for a model that is not here or is not trained, and for an adapter, whose
        checkpoints are small.
    """
    directory = local_path(at.model.path)
    if directory is None or at.lora is not None or not at.trains:
        return None
    bytes_each = BYTES_PER_PARAMETER + (BYTES_OF_AVERAGE if at.averages else 0)
    return num_parameters(directory) * bytes_each


def look_at_answers(at: Look) -> None:
    """Refuse answers to a suite for which a model that is only measured has no room.

    Args:
        at: what the recipe names.

    Raises:
        ConfigError: names the setting.
    """
    measured = [at.against] if at.trains else [at.model, at.against]
    for model in measured:
        directory = local_path(model.path) if model else None
        context = stated_context(directory) if directory else None
        for setting, max_new_tokens in at.answer_lengths.items():
            if context is not None and max_new_tokens >= context:
                raise ConfigError(
                    setting,
                    f"got {max_new_tokens}; {directory} was built for {context} tokens, prompt and "
                    "answer together; need less; lower it",
                )


def look_at_rollout(at: Look) -> None:
    """Refuse a local model that the rollout engine does not serve.

    Args:
        at: what the recipe names.

    Raises:
        ConfigError: names the engine and what of the model it lacks.
    """
    directory = local_path(at.model.path)
    if directory is not None:
        _look_at_engine(directory, at.rollout_engine)


def _look_at_engine(directory: Path, rollout_engine: str | None) -> None:
    if rollout_engine is None:
        return
    row = ROLLOUT_ENGINES.place(rollout_engine)
    if row.refuses_model is None:
        return
    target = Row(name=f"{row.name} (models)", target=row.refuses_model, owner=row.owner)
    config = text_config(directory)
    lacking = load_row(target, ROLLOUT_ENGINES.setting)(config)
    if lacking:
        raise ConfigError(
            ROLLOUT_ENGINES.setting,
            f"got {row.name}; {directory} is a {config.get('model_type')} model with {lacking}, "
            "which this engine does not compute; choose another engine or model",
        )


def _check_targets(names: list[str], targets: tuple[str, ...]) -> None:
    modules = {
        name.removesuffix(_LINEAR_SUFFIX).rpartition(".")[2]
        for name in names
        if name.endswith(_LINEAR_SUFFIX)
    }
    missing = [target for target in targets if target not in modules]
    if missing:
        raise ConfigError(
            "training.lora.target_modules",
            f"got {missing[0]!r}; the model has no such module; need some of: "
            f"{', '.join(sorted(modules))}",
        )


def look_at_reward(reward: RewardConfig, row: RLRow | None) -> None:
    """Load the reward function and call it once.

    Args:
        reward: of the recipe.
        row: judged with its own ground truth as the answer; None only loads the function.

    Raises:
        ConfigError: it cannot be loaded; or no model judges, and it raises or misses its deadline.
    """
    request = _perfect_answer(row)
    alone = reward.model_copy(update={"num_workers": 1, "max_unscored_frac": 1.0})
    try:
        with RewardScorer(alone) as scorer:
            [result] = scorer.score([request])
    except RewardError as error:
        raise ConfigError("rl.reward.function", f"{reward.function}: {error}; repair it") from None
    # What a model would say was invented, and a function may rightly find nothing in it.
    if isinstance(result, Unscored) and row is not None and not reward.models:
        raise ConfigError(
            "rl.reward.function",
            f"{reward.function} {result.reason} for the first row (data_source "
            f"{row.data_source!r}, its ground truth as the answer); need compute_score("
            "data_source, solution_str, ground_truth, extra_info=None) -> a number; repair it",
        )


def _perfect_answer(row: RLRow | None) -> ScoreRequest:
    """The ground truth as the answer, of which every model said something."""
    truth = row.reward_model.ground_truth if row else ""
    return ScoreRequest(
        data_source=row.data_source if row else "preflight",
        solution_str=truth if isinstance(truth, str) else json.dumps(truth),
        ground_truth=truth,
        extra_info=row.extra_info if row else {},
        # Its text was not sampled; a reward that reads tokens sees one of each.
        tokens=SampledTokens((0,), (0,), (0.0,), "stop"),
        model_score=0.0,
        judgement="0",
    )


def main() -> int:
    """Answer one look."""
    try:
        answer = Answer(look=look(Look.model_validate_json(sys.stdin.read())))
    except ConfigError as error:
        answer = Answer(path=error.path, problem=error.problem)
    sys.stdout.write(answer.model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
