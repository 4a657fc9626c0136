"""The model of an evaluation: found among the inputs of the stage, served on first demand.

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
from engines.config.stages.final import EvaluateStageConfig
from engines.controller.launch import LaunchedModel
from engines.jobs.policy.files import HF_DIR, trained_steps, write_hf_files
from engines.jobs.runtime import JobContext
from engines.rollout.service import RolloutService
from engines.training.backends.merging import policy_weights
from engines.types import Completion, RolloutRequest
from infra.errors import ConfigError, DeadlineError


@dataclass(frozen=True)
class ServedModel:
    """What is evaluated.

    Attributes:
        hf_dir: its configuration and tokenizer.
        weights: by hub name, streamed; called again for an engine that starts late.
        max_length: context in tokens, prompt and answer together.
        num_steps: trainer steps behind it; 0 of a model directory, which does not say.
    """

    hf_dir: Path
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    max_length: int
    num_steps: int = 0


def served_model(context: JobContext[EvaluateStageConfig]) -> ServedModel:
    """The input `policy`, or the input `model`, or the model of nobody's making."""
    policy_dir = context.optional_input("policy")
    if policy_dir is not None:
        num_steps = trained_steps(policy_dir).num_steps
        weights, hf_dir = partial(policy_weights, policy_dir), policy_dir / HF_DIR
        return ServedModel(hf_dir, weights, context_length(hf_dir), num_steps)
    model = context.config.model
    if model is None:
        model_dir = context.input("model")
        check_model_directory(model_dir)
        return ServedModel(model_dir, partial(stored_tensors, model_dir), context_length(model_dir))
    model_dir = context.optional_input("model") or resolve_model(model, max_length=None)
    check_model_directory(model_dir)
    serving_dir = context.attempt_dir / HF_DIR
    write_hf_files(model_dir, serving_dir, model.chat_template)
    weights = partial(stored_tensors, model_dir)
    return ServedModel(serving_dir, weights, context_length(model_dir))


def context_length(model_dir: Path) -> int:
    """Tokens that a model was built for, prompt and answer together.

    Args:
        model_dir: with its `config.json`.

    Returns:
        At least 1.

    Raises:
        ConfigError: the configuration does not say.
    """
    length = stated_context(model_dir)
    if length is None:
        raise ConfigError(
            "model.path",
            f"{model_dir} does not say how many tokens it was built for; need "
            "max_position_embeddings in its config.json; add it",
        )
    return length


class ServedOnDemand:
    """Engines that start, and get their weights, when they are asked for the first time.

    Args:
        served: the model.
        launch: starts the engines, and with them what judges their answers.
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
        if launched.reward_model is not None:
            self._stack.enter_context(closing(launched.reward_model))
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
