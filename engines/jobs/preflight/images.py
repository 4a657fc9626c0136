"""Refuses models and engines of a recipe that cannot see the images in its data.

Promises: a local model that passes is not refused later for its architecture, backend or rollout
engine. For a model on the hub only its settings are checked.
"""

from collections.abc import Sequence

from engines.checkpoint.model_directory import VISION_MODEL_TYPES, vision_model_type
from engines.checkpoint.models.teacher import TEACHER_SECTION
from engines.config.backends import BACKENDS
from engines.config.base import local_path
from engines.config.distillation import DistillationConfig
from engines.config.model import ModelConfig
from engines.config.plugins import IMAGES, ROLLOUT_ENGINES, image_engines
from engines.config.preflight_request import PreflightRequest
from engines.config.rules.images import (
    check_not_self_played,
    check_seen_by_judges,
    check_seen_by_teacher,
)
from engines.config.training import TrainingConfig
from engines.vision.sizes import PROCESSOR_FILES, image_sizes
from infra.errors import ConfigError
from infra.section_names import renamed_sections

_TAUGHT = "data.rl."
"""Prefix of sources that are trained on; models are evaluated on all others."""


def look_at_images(at: PreflightRequest, sources: Sequence[str]) -> None:
    """Raise a ConfigError that names a setting which cannot handle images.

    Args:
        sources: configuration paths of the sources with images.
    """
    if not sources:
        return
    shown = _shown(sources[0])
    engine = at.rollout_engine
    if engine is not None and IMAGES not in ROLLOUT_ENGINES.place(engine).capabilities:
        raise ConfigError(
            ROLLOUT_ENGINES.setting,
            f"got {engine}; {shown}, which it does not show the model; need "
            f"{' or '.join(image_engines())}; choose it, or leave out the source",
        )
    check_seen_by_judges(shown, at.reward_model, at.judge)
    if at.trains and at.training is not None:
        _look_at_training(at.training, shown, has_critic=at.has_critic)
    _look_at_model(at.model, shown)
    taught = [source for source in sources if source.startswith(_TAUGHT)]
    measured = [source for source in sources if source not in taught]
    if at.self_play is not None and at.self_play.source == "best_worst" and taught:
        check_not_self_played(_shown(taught[0]))
    if at.teacher is not None and taught:
        _look_at_teacher(at.teacher, _shown(taught[0]))
    if at.against is not None and measured:
        with renamed_sections({"model": "against"}):
            _look_at_model(at.against, _shown(measured[0]))


def _look_at_training(training: TrainingConfig, shown: str, *, has_critic: bool) -> None:
    backend = training.backend
    able = [name for name, other in BACKENDS.items() if "vlm" in other.features]
    if backend in BACKENDS and backend not in able:
        raise ConfigError(
            "training.backend",
            f"got {backend}; {shown}, and it trains text models; need {' or '.join(able)}; choose "
            "one, or leave out the source",
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


def _look_at_teacher(teacher: DistillationConfig, shown: str) -> None:
    check_seen_by_teacher(shown, teacher)
    directory = local_path(teacher.path)
    if directory is not None and vision_model_type(directory) not in VISION_MODEL_TYPES:
        raise ConfigError(
            f"{TEACHER_SECTION}.path",
            f"got {directory}; {shown}, which it does not see; need a teacher that sees "
            f"({', '.join(VISION_MODEL_TYPES)}); choose one, or leave out the source",
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
