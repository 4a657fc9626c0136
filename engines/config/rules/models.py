"""Rules for the models beside the policy: critics, reward models, judges, and their scores.

Every rule raises `ConfigError`. `shown` is the part of an error that names a source with images;
models that would read only the text of its prompts are refused.
Promises: which score components an estimator compares, and their weights, follow from the recipe
alone, so a step's samples cannot change the objective.
Does not promise: that a reward reports them, which is known in advance for mixtures only.
"""

from collections.abc import Mapping, Sequence

from engines.algorithms.options import GdpoOptions
from engines.config.algorithm import AlgorithmConfig, DistillationConfig, RewardConfig
from engines.config.backends import BACKENDS
from engines.config.model import JudgeConfig, RewardModelConfig
from engines.config.options import check_options, own_options
from engines.config.plugins import REWARDS, ROLLOUT_ENGINES, STRUCTURED_OUTPUT, engines_with
from engines.config.rollout import RolloutConfig, StructuredOutputConfig
from engines.config.rows import ADVANTAGES
from engines.config.sections import RLConfig
from engines.config.training import TrainingConfig
from infra.errors import ConfigError, refuse


def check_quantization(rollout: RolloutConfig, training: TrainingConfig) -> None:
    """Refuse 8-bit floats that the rollout engine does not compute; raises `ConfigError`."""
    quantization, path = rollout.quantization, "rollout.quantization"
    if quantization is None:
        return
    if quantization not in ROLLOUT_ENGINES.place(rollout.engine).capabilities:
        raise ConfigError(
            path,
            f"got {quantization} with rollout.engine {rollout.engine}; need "
            f"{' or '.join(engines_with(quantization))}; set rollout.engine to it, or this to null",
        )
    if (rollout.dtype or training.dtype) == "float32":
        raise ConfigError(
            path,
            f"got {quantization} with a model in float32; need bfloat16; set rollout.dtype to it",
        )


def check_structured_output(
    path: str, form: StructuredOutputConfig | None, rollout: RolloutConfig
) -> None:
    """Refuse a form that the rollout engine cannot enforce; raises `ConfigError` at `path`."""
    capabilities = ROLLOUT_ENGINES.place(rollout.engine).capabilities
    refuse(
        form is not None and STRUCTURED_OUTPUT not in capabilities,
        path,
        f"rollout.engine {rollout.engine} does not support structured output; set this to "
        f"null, or rollout.engine to {' or '.join(engines_with(STRUCTURED_OUTPUT))}",
    )


def check_seen_by_judges(
    shown: str, reward_model: RewardModelConfig | None, judge: JudgeConfig | None
) -> None:
    """Refuse a reward model or judge, because it does not see the images."""
    refuse(
        reward_model or judge,
        f"rl.reward.{'model' if reward_model else 'judge'}",
        f"got a model that judges; {shown}, which it does not see; need a rule; set "
        "rl.reward.function to one, or leave out the source",
    )


def check_not_self_played(shown: str) -> None:
    """Refuse self-play over rows with images, because pairs hold only text."""
    raise ConfigError(
        "preference.self_play.source",
        f"got best_worst, which asks about rows of data.rl; {shown}, which pairs do not hold; need "
        "rows of text; set it to spin, or leave out the source",
    )


def check_seen_by_teacher(shown: str, teacher: DistillationConfig | None) -> None:
    """Refuse a served teacher, because its engines get only tokens."""
    refuse(
        teacher and teacher.served,
        "rl.distillation.served",
        f"{shown}, which served teachers cannot see; need a teacher on the training ranks; set "
        "this to null, or leave out the source",
    )


GDPO = "gdpo"
KEYS = "rl.algorithm.options.gdpo_reward_keys"


def resolved_algorithm(rl: RLConfig) -> AlgorithmConfig:
    """Return the algorithm; for GDPO, with the compared reward components and their weights set.

    Raises:
        ConfigError: the components are ambiguous, or a route does not report one of them.
    """
    algorithm, reward = rl.algorithm, rl.reward
    if algorithm.adv_estimator != GDPO:
        return algorithm
    given = _options(algorithm)
    # Sorted, because the order changes the rounding of sums.
    known = {tuple(sorted(names)) for names in _routes(reward).values()}
    if not given.gdpo_reward_keys and len(known) != 1:
        why = (
            f"null, and routes of different components ({', '.join(reward.routes)})"
            if known
            else f"null with rl.reward.function {reward.function}, which may report any"
        )
        raise ConfigError(KEYS, f"got {why}; need names of scores that every sample gets; set it")
    keys = given.gdpo_reward_keys or known.pop()
    for source, names in _routes(reward).items():
        able = (*names, "score", "acc")
        for key in keys:
            refuse(
                key not in able,
                KEYS,
                f"got {key!r}, which does not judge data_source {source!r}; need one of "
                f"{', '.join(able)}; name one, or add it to the route",
            )
    parts = reward.components
    weights = given.gdpo_reward_weights or tuple(
        parts[key].weight if key in parts else 1.0 for key in keys
    )
    written = {**algorithm.options, "gdpo_reward_keys": keys, "gdpo_reward_weights": weights}
    return algorithm.model_copy(update={"options": written})


def compared_components(algorithm: AlgorithmConfig) -> Sequence[str]:
    """Return the reward components that a resolved algorithm compares; empty unless GDPO."""
    return _options(algorithm).gdpo_reward_keys or () if algorithm.adv_estimator == GDPO else ()


def _options(algorithm: AlgorithmConfig) -> GdpoOptions:
    options = own_options(algorithm.options, ADVANTAGES.find(GDPO), "rl.algorithm.options")
    assert isinstance(options, GdpoOptions)  # noqa: S101 - the schema of that row
    return options


def _routes(reward: RewardConfig) -> Mapping[str, Sequence[str]]:
    return reward.routes or ({"*": tuple(reward.components)} if reward.components else {})


def check_value_models(rl: RLConfig, training: TrainingConfig) -> None:
    """Refuse a critic or reward model that the backend cannot hold; raises `ConfigError`."""
    for setting, model in {"rl.critic": rl.critic, "rl.reward.model": rl.reward.model}.items():
        if model is not None:
            check_value_model(setting, training)


def check_value_model(setting: str, training: TrainingConfig) -> None:
    """Refuse a value model that the backend cannot hold; raises `ConfigError` at `setting`."""
    backend = BACKENDS.get(training.backend)
    if backend is not None and backend.value_model is None:
        able = [name for name, other in BACKENDS.items() if other.value_model is not None]
        raise ConfigError(
            setting,
            f"got one with training.backend {training.backend}, which has no value model; "
            f"need one of {', '.join(able)}; set training.backend to it",
        )


_SAID_BY: Mapping[str, str] = {
    "model": "the reward model's score; need rl.reward.model, which this recipe lacks; set "
    "rl.reward.model.path to a sequence classification model",
    "judge": "a judge's text; need rl.reward.judge, which this recipe lacks; set "
    "rl.reward.judge.path and rl.reward.judge.prompt",
}


def check_reward_models(reward: RewardConfig) -> None:
    """Refuse missing or unread models, and `accuracy` without verdict; raises `ConfigError`."""
    parts = {path: part for path, part in reward.parts.items() if part.file is None}
    rows = {path: REWARDS.find(part.function, f"{path}.function") for path, part in parts.items()}
    for path, row in rows.items():
        if row.reads is not None and row.reads not in reward.models:
            raise ConfigError(
                f"{path}.function",
                f"got {row.name}, which reads {_SAID_BY[row.reads]}",
            )
    for path, row in rows.items():
        if not row.is_verdict and path.rpartition(".")[2] in reward.accuracy:
            right = ", ".join(each.name for each in REWARDS.rows if each.is_verdict)
            raise ConfigError(
                "rl.reward.accuracy",
                f"got {path.rpartition('.')[2]}, whose function {row.name} does not say whether an "
                f"answer is right; need a component with one of {right}, or a file; name it",
            )
    # A function in a file may read a model; it is not run to find out.
    if len(parts) < len(reward.parts):
        return
    for name in sorted(reward.models.keys() - {row.reads for row in rows.values()}):
        able = " or ".join(row.name for row in REWARDS.rows if row.reads == name)
        raise ConfigError(
            f"rl.reward.{name}",
            f"got a model, and nothing reads its output; remove it, or add a function or component "
            f"{able}",
        )


def check_judge(reward: RewardConfig, rollout: RolloutConfig) -> None:
    """Refuse a judge that the rollout engine cannot serve; raises `ConfigError`."""
    if reward.judge is None:
        return
    section, form = "rl.reward.judge", reward.judge.sampling.structured_output
    check_structured_output(f"{section}.sampling.structured_output", form, rollout)
    check_options(
        reward.judge.options, [ROLLOUT_ENGINES.find(rollout.engine)], f"{section}.options"
    )
