"""What makes a stage the stage it is: the request, and the fingerprint computed from it.

Promises: two requests have one fingerprint exactly when stage, configuration, input digests,
seed, reachable sources, installed libraries and installed plugins are the same; nothing else
enters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from engines.config.algorithm import AlgorithmConfig, RewardConfig
from engines.config.base import StrictModel
from engines.config.data import DataConfig
from engines.config.model import ModelConfig
from engines.config.plugins import PluginKind
from engines.config.plugins import plugin_modules as modules_of
from engines.config.rollout import RolloutConfig
from engines.config.training import TrainingConfig
from infra.identity.fingerprint import (
    environment_digest,
    outside_code,
    sources_digest,
    stage_fingerprint,
)
from infra.store.artifacts import external_artifact
from infra.store.stage_spec import Artifact

STAGE_SCHEMA_VERSION = 1
NUMERIC_DISTRIBUTIONS = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "peft",
    "megatron-core", "mbridge",
)  # fmt: skip
"""Libraries whose version can change what a job computes."""


@dataclass(frozen=True)
class StageRequest:
    """One stage to be run, before it is known whether its output exists.

    Attributes:
        stage: kind of stage (`rl_round`).
        label: name of this stage within the run (`rl_round_3`).
        job_module: the job's main module.
        config: resolved configuration; all of it enters the fingerprint.
        inputs: artifacts by the name the job knows them by.
        seed: the run's seed.
        plugins: modules of the plugins that the configuration names; their sources count too.
        interpreter: Python of the job environment that the job needs; None: this one.
        force: any text; a new one makes a new fingerprint, and so a new run of the stage.
    """

    stage: str
    label: str
    job_module: str
    config: StrictModel
    inputs: Mapping[str, Artifact]
    seed: int
    plugins: tuple[str, ...] = ()
    interpreter: Path | None = None
    force: str = ""

    def forced(self, token: str) -> "StageRequest":
        """The same request with a force token; an empty one changes nothing."""
        return replace(self, force=token) if token else self

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything above and of the code and libraries that would run."""
        return stage_fingerprint(
            stage=self.stage,
            schema_version=STAGE_SCHEMA_VERSION,
            config=self.config.model_dump(mode="json"),
            inputs=self.inputs,
            seed=self.seed,
            sources_digest=sources_digest([self.job_module, *self.plugins]),
            environment_digest=environment_digest(
                NUMERIC_DISTRIBUTIONS, outside_code(), self.interpreter
            ),
            force=self.force,
        )


def plugin_modules(
    *,
    training: TrainingConfig | None = None,
    rollout: RolloutConfig | None = None,
    reward: RewardConfig | None = None,
    algorithm: AlgorithmConfig | None = None,
    data: DataConfig | None = None,
) -> tuple[str, ...]:
    """Modules of the plugins that a configuration names, sorted.

    Args:
        training: names a backend.
        rollout: names a rollout engine.
        reward: names a reward, unless it is a file.
        algorithm: names an advantage estimator, a policy loss and a KL estimator.
        data: its sources name preprocessors.

    Returns:
        Module names, other people's too.
    """
    named: list[tuple[PluginKind, str]] = []
    if training:
        named.append(("backend", training.backend))
    if rollout:
        named.append(("rollout", rollout.engine))
    if reward:
        named.append(("reward", reward.function))
    if algorithm:
        named.append(("adv_estimator", algorithm.adv_estimator))
        named.append(("loss_mode", algorithm.loss_mode))
        named.append(("kl_loss_type", algorithm.kl_loss_type.removesuffix("+")))
    if data:
        sources = (*data.sft, *data.rl, *data.evaluation)
        named.extend(("preprocessor", source.format) for source in sources)
    return modules_of(named)


def reward_input(reward: RewardConfig) -> dict[str, Artifact]:
    """A custom reward file as input `reward`; a registered reward counts by its sources."""
    file = reward.file
    return {"reward": external_artifact(file, "rl.reward.function")} if file else {}


def model_input(model: ModelConfig) -> dict[str, Artifact]:
    """The user's model directory as input `model`; a hub id is identified by its configuration."""
    path = Path(model.path).expanduser() if model.path else None
    return {"model": external_artifact(path, "model.path")} if path and path.exists() else {}
