"""A model that is served and not trained: where its weights are, and engines on first demand.

Promises: a policy is read from its committed checkpoint, whatever backend and number of ranks
wrote it, so it scores what the model merged from it scores; no weight is read before somebody asks
for an answer, or for the models that judge.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from engines.checkpoint.model_directory import (
    check_model_directory,
    resolve_model,
    stated_context,
)
from engines.checkpoint.tensor_files import stored_tensors
from engines.config.model import ModelConfig
from engines.config.stages.serving import AnsweringStageConfig
from engines.controller.launch import LaunchedModel
from engines.controller.replica import ReplicaSpec
from engines.jobs.policy.files import HF_DIR, trained_steps, write_hf_files
from engines.rollout.service import RolloutService
from engines.training.backends.merging import policy_weights
from engines.types import Completion, RolloutRequest
from infra.errors import ConfigError, DeadlineError


@dataclass(frozen=True)
class ServedModel:
    """What is served.

    Attributes:
        hf_dir: its configuration and tokenizer.
        weights: by hub name, streamed; called again for an engine that starts late.
        weights_dir: Hugging Face directory that holds them; None of a policy, which has them in
            its checkpoint.
        num_steps: trainer steps behind it; 0 of a model directory, which does not say.
    """

    hf_dir: Path
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    weights_dir: Path | None = None
    num_steps: int = 0

    @property
    def context_length(self) -> int:
        """Tokens that the model was built for, prompt and answer together.

        Raises:
            ConfigError: its configuration does not say.
        """
        length = stated_context(self.hf_dir)
        if length is None:
            raise ConfigError(
                "model.path",
                f"{self.hf_dir} does not say how many tokens it was built for; need "
                "max_position_embeddings in its config.json; add it",
            )
        return length


def served_policy(policy_dir: Path) -> ServedModel:
    """A `policy` artifact, read from its checkpoint whoever wrote it."""
    weights = partial(policy_weights, policy_dir)
    num_steps = trained_steps(policy_dir).num_steps
    return ServedModel(policy_dir / HF_DIR, weights, num_steps=num_steps)


def served_directory(model_dir: Path) -> ServedModel:
    """A Hugging Face directory that a stage wrote; raises `ConfigError` where it is none."""
    check_model_directory(model_dir)
    return ServedModel(model_dir, partial(stored_tensors, model_dir), model_dir)


def served_foreign(model: ModelConfig, given: Path | None, serving_dir: Path) -> ServedModel:
    """A model that no stage made.

    Args:
        model: names it.
        given: its directory, where it is a local one.
        serving_dir: gets its configuration and tokenizer, with every token that ends an answer.

    Returns:
        The model.

    Raises:
        ConfigError: it cannot be used.
    """
    model_dir = given or resolve_model(model, max_length=None)
    check_model_directory(model_dir)
    write_hf_files(model_dir, serving_dir, model.chat_template)
    return ServedModel(serving_dir, partial(stored_tensors, model_dir), model_dir)


def replica_of(config: AnsweringStageConfig, served: ServedModel, log_dir: Path) -> ReplicaSpec:
    """How the engines of a stage serve a model.

    Args:
        config: of the stage.
        served: the model.
        log_dir: of the engines.

    Returns:
        Of each engine.
    """
    return ReplicaSpec(
        serving_dir=served.hf_dir,
        rollout=config.rollout,
        dtype=config.rollout.dtype or config.dtype,
        platform=config.hardware.platform,
        device_kind=config.hardware.device_kind,
        num_threads=config.num_threads,
        log_dir=log_dir,
    )


class ServedOnDemand:
    """Engines that start, and get their weights, when they are asked for the first time.

    Args:
        served: the model.
        launch: starts the engines, and with them what reads beside them.
        stack: closes what was started.
    """

    def __init__(
        self, served: ServedModel, launch: Callable[[], LaunchedModel], stack: ExitStack
    ) -> None:
        self._served, self._launch, self._stack = served, launch, stack

    @cached_property
    def launched(self) -> LaunchedModel:
        """All that was started."""
        launched = self._launch()
        self._stack.enter_context(closing(launched.pool))
        if launched.beside is not None:
            self._stack.enter_context(closing(launched.beside))
        return launched

    @cached_property
    def _service(self) -> RolloutService:
        engines, served = self.launched.engines, self._served
        service = self._stack.enter_context(closing(engines.service()))
        service.sync(engines.new_transport, lambda to: to.send(served.weights()), served.num_steps)
        return service

    def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """Answers to every request.

        Args:
            requests: as the service takes them.

        Returns:
            By request and seed.

        Raises:
            DeadlineError: some did not come in time; an accuracy over the others would be another.
        """
        rows = self._service.generate(requests)
        num_aborted = sum(each.finish_reason == "abort" for row in rows for each in row)
        if num_aborted:
            raise DeadlineError(f"{num_aborted} answers", self._service.timeout_s)
        return rows
