"""Checks the models, data and rewards that a recipe names, before anything trains.

`python -m engines.jobs.preflight.run` reads a `PreflightRequest` as JSON from standard input and
writes a `PreflightAnswer` as one line of JSON. It reads headers of safetensors files, the tokenizer
and the first hundred rows of each local file (.json: all), calls a user's reward once in its own
process, and resolves the hub revisions that the recipe names to commits.
Promises: no weight is read, torch is not imported; what it refuses would have ended the run later
with the same field named. Each repository and revision has one commit in the whole answer, so
tokenizer and weights, or the splits of one data set, cannot come from different commits. A local
model that passes the check for images is not refused later for its architecture or engines.
Does not promise that later rows are valid. Of models and data on the hub only settings are checked.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

from engines.checkpoint.model_directory import (
    VISION_MODEL_TYPES,
    check_model_directory,
    check_reward_model,
    vision_model_type,
)
from engines.checkpoint.teacher import TEACHER_SECTION
from engines.config.algorithm import RewardConfig
from engines.config.backends import BACKENDS, backends_with
from engines.config.base import local_path
from engines.config.data import SOURCE_SPLITS, DataConfig, SourceConfig
from engines.config.model import ModelConfig, NamedModelConfig
from engines.config.plugins import (
    IMAGES,
    PREPROCESSORS,
    REWARDS,
    ROLLOUT_ENGINES,
    all_rows,
    engines_with,
)
from engines.config.preflight_request import PreflightAnswer, PreflightRequest
from engines.config.rules.models import (
    check_not_self_played,
    check_seen_by_judges,
    check_seen_by_teacher,
)
from engines.config.suite import suite_sections
from engines.config.training import TrainingConfig
from engines.data.prepare.arithmetic import generate
from engines.data.prepare.sources import PREFERENCE_ROWS, RL_ROWS, SFT_ROWS, first_usable_row
from engines.data.read.chat import render_conversations
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.errors import RewardError
from engines.jobs.preflight.models import (
    checkpoint_bytes,
    look_at_answers,
    look_at_judging,
    look_at_model,
    look_at_prompt,
    look_at_rollout,
    look_at_stop_tokens,
    look_at_teacher,
    look_at_training,
    perfect_answer,
)
from engines.judges.judgement import question
from engines.rewards.base import Unscored
from engines.rewards.resolve import OTHERS
from engines.rewards.scorer import RewardScorer
from engines.vision.sizes import PROCESSOR_FILES, image_sizes
from infra.errors import ConfigError
from infra.identity.hub import RepoType, hub_commit
from infra.names import renamed_sections

_PROMPTS = ("rl", "evaluation")
OnHub = TypeVar("OnHub", bound=ModelConfig | NamedModelConfig | SourceConfig)

_MODELS = {
    "model": "model",
    "against": "against",
    "reward_model": "rl.reward.model",
    "judge": "rl.reward.judge",
    "teacher": TEACHER_SECTION,
}
"""Section of a recipe for each model field of a `PreflightRequest`, for errors."""


def check_request(at: PreflightRequest) -> PreflightRequest:
    """Return the request with hub commits and the checkpoint size, or raise a ConfigError."""
    lora = at.training.lora if at.training else None
    tokenizer = look_at_model(at.model, lora, trains=at.trains)
    look_at_training(at.model.path, at.training if at.trains else None)
    look_at_stop_tokens(at)
    look_at_rollout(at.model.path, at.rollout_engine)
    of_other = None
    if at.against is not None:
        with renamed_sections({"model": "against"}):
            of_other = look_at_model(at.against, None, trains=False)
        look_at_rollout(at.against.path, at.rollout_engine)
    row = look_at_rows(at, at.data, "data", tokenizer) if at.data else None
    if of_other is not None and row is not None:
        with renamed_sections({"model": "against"}):
            look_at_prompt(row, of_other)
    row = look_at_suites(at, tokenizer, row)
    look_at_answers(at)
    if at.trains_values:
        look_at_training(at.model.path, at.training, values=True)
    if at.reward_model is not None:
        section = _MODELS["reward_model"]
        look_at_judging(section, check_reward_model, at.reward_model, row)
        with renamed_sections({"model": section}):
            look_at_training(at.reward_model.path, at.reward_training, values=True)
    if at.judge is not None:
        if row is not None:
            question(at.judge.prompt, row.prompt, perfect_answer(row))
        look_at_judging(_MODELS["judge"], check_model_directory, at.judge, row)
        look_at_rollout(at.judge.path, at.rollout_engine)
    if at.teacher is not None:
        look_at_teacher(at.teacher, at.training, at.model, at.rollout_engine)
    if at.reward is not None:
        look_at_reward(at.reward, row)
    return with_commits(at).model_copy(update={"checkpoint_bytes": checkpoint_bytes(at)})


def look_at_rows(
    at: PreflightRequest, data: DataConfig, section: str, tokenizer: DirectoryTokenizer | None
) -> RLRow | None:
    """Check the first rows of a recipe or a suite: template, images and ground truth.

    `section` is the data's configuration path. Returns a row with a prompt, or None if no local
    source has prompts.
    """
    rows = first_rows(data, section, tokenizer)
    known = {row.name for row in all_rows(PREPROCESSORS) if row.images}
    shown = [path for path, row in rows.items() if row.images]
    shown += [path for path, each in _sources(data, section, *_PROMPTS) if each.format in known]
    look_at_images(at, list(dict.fromkeys(shown)))
    if at.scoring is not None:
        lacking = {row.name for row in all_rows(PREPROCESSORS) if not row.ground_truth}
        without: dict[str, RLRow | None] = {}
        for path, source in _sources(data, section, *at.scored):
            row = rows.get(path)
            if row.reward_model.ground_truth is None if row else source.format in lacking:
                without[path] = row
        look_at_truths(at.scoring, without)
    return first_row(data, rows)


def look_at_suites(
    at: PreflightRequest, tokenizer: DirectoryTokenizer | None, row: RLRow | None
) -> RLRow | None:
    """Check rows and rewards of the suites; return `row`, or a suite's row if that is None."""
    for name, suite in at.suites.items():
        if suite.data is None:
            continue
        sections = suite_sections(name)
        if suite.reward is None:
            of_suite = look_at_rows(at, suite.data, sections["data"], tokenizer)
        else:  # its own reward has functions only, no judges
            judged = at.model_copy(
                update={"reward_model": None, "judge": None, "scoring": suite.reward}
            )
            with renamed_sections({"rl.reward": sections["rl.reward"]}):
                of_suite = look_at_rows(judged, suite.data, sections["data"], tokenizer)
                look_at_reward(suite.reward, of_suite)
        row = row or of_suite
    return row


def first_rows(
    data: DataConfig, section: str, tokenizer: DirectoryTokenizer | None
) -> dict[str, RLRow]:
    """Read the first usable row of every local source and render it with the chat template.

    Returns rows of the RL split, then of the evaluation split, by configuration path. Raises
    ConfigError if a column is missing, no row is usable or the template fails.
    """
    for path, source in _local(data, section, "sft"):
        row = first_usable_row(source, path, SFT_ROWS)
        if tokenizer is not None:
            render_conversations(tokenizer, [row.messages])
    for path, source in _local(data, section, "preference", "preference_evaluation"):
        pair = first_usable_row(source, path, PREFERENCE_ROWS)
        if tokenizer is not None:
            render_conversations(tokenizer, pair.conversations)
    rows: dict[str, RLRow] = {}
    for path, source in _local(data, section, *_PROMPTS):
        rows[path] = first_usable_row(source, path, RL_ROWS)
        if tokenizer is not None:
            look_at_prompt(rows[path], tokenizer)
    return rows


def first_row(data: DataConfig, rows: Mapping[str, RLRow]) -> RLRow | None:
    """Return a row with a prompt, read or generated; None if no local source has one."""
    if rows or data.arithmetic is None:
        return next(iter(rows.values()), None)
    return generate(
        data.arithmetic.model_copy(update={"num_sft": 1, "num_rl": 1, "num_eval": 1}), seed=0
    )["rl"][0]


def _sources(data: DataConfig, section: str, *splits: str) -> list[tuple[str, SourceConfig]]:
    """Return the sources of some splits with their configuration paths."""
    return [
        (f"{section}.{split}.{place}", source)
        for split in splits
        for place, source in enumerate(getattr(data, split))
    ]


def _local(data: DataConfig, section: str, *splits: str) -> list[tuple[str, SourceConfig]]:
    return [each for each in _sources(data, section, *splits) if local_path(each[1].path)]


def look_at_images(at: PreflightRequest, sources: Sequence[str]) -> None:
    """Raise a ConfigError that names a setting which cannot handle images.

    Args:
        sources: configuration paths of the sources with images.
    """
    if not sources:
        return
    shown, engine = _shown(sources[0]), at.rollout_engine
    if engine is not None and IMAGES not in ROLLOUT_ENGINES.place(engine).capabilities:
        raise ConfigError(
            ROLLOUT_ENGINES.setting,
            f"got {engine}; {shown}, which it does not pass to the model; need "
            f"{' or '.join(engines_with(IMAGES))}; choose it, or leave out the source",
        )
    check_seen_by_judges(shown, at.reward_model, at.judge)
    if at.trains and at.training is not None:
        _look_at_training(at.training, shown, has_critic=at.has_critic)
    _look_at_model(at.model, shown)
    # Models are evaluated on all other sources.
    taught = [source for source in sources if source.startswith("data.rl.")]
    measured = [source for source in sources if source not in taught]
    if at.self_play is not None and at.self_play.source == "best_worst" and taught:
        check_not_self_played(_shown(taught[0]))
    if at.teacher is not None and taught:
        check_seen_by_teacher(_shown(taught[0]), at.teacher)
        directory = local_path(at.teacher.path)
        if directory is not None and vision_model_type(directory) not in VISION_MODEL_TYPES:
            raise ConfigError(
                f"{TEACHER_SECTION}.path",
                f"got {directory}; {_shown(taught[0])}, which it does not see; need a teacher that "
                f"sees ({', '.join(VISION_MODEL_TYPES)}); choose one, or leave out the source",
            )
    if at.against is not None and measured:
        with renamed_sections({"model": "against"}):
            _look_at_model(at.against, _shown(measured[0]))


def _look_at_training(training: TrainingConfig, shown: str, *, has_critic: bool) -> None:
    backend, able = training.backend, backends_with("vlm")
    if backend in BACKENDS and backend not in able:
        raise ConfigError(
            "training.backend",
            f"got {backend}; {shown}, and it trains only text models; need "
            f"{' or '.join(able)}; choose one, or leave out the source",
        )
    if training.ulysses_size > 1:
        raise ConfigError(
            "training.ulysses_size",
            f"got {training.ulysses_size}; {shown}, which Ulysses cannot cut; need 1; set it to 1",
        )
    if has_critic:
        raise ConfigError(
            "rl.critic",
            f"got a critic; {shown}, which a value model does not see; need an estimator without "
            "one; set rl.algorithm.adv_estimator to grpo, or leave out the source",
        )


def _shown(source: str) -> str:
    return f"{source} has rows that show images"


def _look_at_model(model: ModelConfig, shown: str) -> None:
    directory = local_path(model.path)
    need = f"need a model that sees ({', '.join(VISION_MODEL_TYPES)}); choose one, or leave out the"
    if directory is None:
        if model.init == "random":
            raise ConfigError("model.init", f"got random; {shown}; {need} source")
        return
    sees = vision_model_type(directory)
    if sees not in VISION_MODEL_TYPES:
        what = f"a {sees}" if sees else "a text model"
        raise ConfigError("model.path", f"got {directory}, {what}; {shown}; {need} source")
    if image_sizes(directory) is None:
        raise ConfigError(
            "model.path",
            f"got {directory}; {shown}, and it has no configuration of an image processor; need "
            f"{' or '.join(PROCESSOR_FILES)} that holds one; copy it beside the weights",
        )


def look_at_reward(reward: RewardConfig, row: RLRow | None) -> None:
    """Load the reward function and score the truth of `row`; raise ConfigError if it fails."""
    alone = reward.model_copy(update={"num_workers": 1, "max_unscored_frac": 1.0})
    try:
        with RewardScorer(alone) as scorer:
            [result] = scorer.score([perfect_answer(row)])
    except RewardError as error:
        raise ConfigError("rl.reward.function", f"{reward.function}: {error}; repair it") from None
    # A perfect answer has made-up model scores, so a function that reads them may rightly fail.
    if isinstance(result, Unscored) and row is not None and not reward.models:
        raise ConfigError(
            "rl.reward.function",
            f"{reward.function} {result.reason} for the first row (data_source "
            f"{row.data_source!r}, its ground truth as the answer); need compute_score("
            "data_source, solution_str, ground_truth, extra_info=None) -> a number; repair it",
        )


def look_at_truths(reward: RewardConfig, without: Mapping[str, RLRow | None]) -> None:
    """Refuse a rule that compares answers with a ground truth that rows do not have.

    Args:
        without: first row of each source without ground truth, by configuration path; None if it
            was not read, so that its route is not known.
    """
    comparing = {row.name for row in all_rows(REWARDS) if row.compares}
    for source, row in without.items():
        asked: Sequence[str] = tuple(reward.components)
        if reward.routes:
            others = reward.routes.get(OTHERS, ())
            asked = reward.routes.get(row.data_source, others) if row else ()
        for path, part in reward.parts.items():
            is_asked = not reward.components or path.rpartition(".")[2] in asked
            if is_asked and part.function in comparing:
                raise ConfigError(
                    f"{path}.function",
                    f"got {part.function}, which compares answers with a ground truth; {source} "
                    "has rows without one; need rows with one, or a model that judges "
                    "(rl.reward.function model or judge); choose one",
                )


def with_commits(at: PreflightRequest) -> PreflightRequest:
    """Return the request with a commit as the `revision` of every hub id, each resolved once.

    A ConfigError names the field that cannot be resolved.
    """
    known: dict[tuple[str, RepoType, str | None], str] = {}

    def resolved(config: OnHub, repo_type: RepoType, section: str) -> OnHub:
        """Return the configuration with a commit as revision; a local path stays as it is."""
        if config.path is None or local_path(config.path):
            return config
        key = (config.path, repo_type, config.revision)
        if key not in known:
            known[key] = hub_commit(*key, section)
        return config.model_copy(update={"revision": known[key]})

    def of_data(data: DataConfig, section: str) -> DataConfig:
        """Return the data configuration with commits for all sources."""
        return data.model_copy(
            update={
                split: tuple(
                    resolved(source, "dataset", f"{section}.{split}.{place}")
                    for place, source in enumerate(getattr(data, split))
                )
                for split in SOURCE_SPLITS
            }
        )

    found: dict[str, object] = {"data": of_data(at.data, "data") if at.data else None}
    for name, section in _MODELS.items():
        model: ModelConfig | NamedModelConfig | None = getattr(at, name)
        found[name] = model and resolved(model, "model", section)
    found["suites"] = {
        name: suite.model_copy(
            update={"data": suite.data and of_data(suite.data, f"suites.{name}.data")}
        )
        for name, suite in at.suites.items()
    }
    return at.model_copy(update=found)


def main() -> int:
    """Read a request and write its answer."""
    try:
        answer = PreflightAnswer(
            found=check_request(PreflightRequest.model_validate_json(sys.stdin.read()))
        )
    except ConfigError as error:
        answer = PreflightAnswer(path=error.path, problem=error.problem)
    sys.stdout.write(answer.model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
