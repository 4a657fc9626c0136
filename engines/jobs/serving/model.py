"""A served model: its weights, and engines that start on first demand.

Promises: a policy is read from its committed checkpoint, with any backend and number of ranks, so
it scores like the model merged from it; no weight is read before the first request.
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
from engines.jobs.process.policy import HF_DIR, trained_steps, write_hf_files
from engines.jobs.process.runtime import JobContext
from engines.jobs.process.torch_setup import prepare_torch
from engines.rollout.service import RolloutService
from engines.training.backends.merging import policy_weights
from engines.types import Completion, RolloutRequest
from infra.errors import ConfigError, DeadlineError


@dataclass(frozen=True)
class ServedModel:
    """A model to serve.

    Attributes:
        hf_dir: configuration and tokenizer.
        weights: streams (hub name, tensor); called again for an engine that starts later.
        weights_dir: Hugging Face directory with the weights; None for a policy's checkpoint.
        num_steps: trained steps; 0 for a model directory, where they are not known.
    """

    hf_dir: Path
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    weights_dir: Path | None = None
    num_steps: int = 0

    @property
    def context_length(self) -> int:
        """Context in tokens, prompt and answer together; raises ConfigError if it is not stated."""
        length = stated_context(self.hf_dir)
        if length is None:
            raise ConfigError(
                "model.path",
                f"{self.hf_dir} does not say how many tokens it was built for; need "
                "max_position_embeddings in its config.json; add it",
            )
        return length


def replica_of(config: AnsweringStageConfig, served: ServedModel, log_dir: Path) -> ReplicaSpec:
    """Return the spec of the engines that serve a model in a stage."""
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
    """Engines that start and get their weights with the first request; `stack` closes them."""

    def __init__(
        self, served: ServedModel, launch: Callable[[], LaunchedModel], stack: ExitStack
    ) -> None:
        self._served, self._launch, self._stack = served, launch, stack

    @cached_property
    def launched(self) -> LaunchedModel:
        """Everything that was started; starts it on first access."""
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
        """Return completions by request and seed.

        Raise DeadlineError if some are missing: an accuracy over the others would be biased.
        """
        rows = self._service.generate(requests)
        num_aborted = sum(each.finish_reason == "abort" for row in rows for each in row)
        if num_aborted:
            raise DeadlineError(f"{num_aborted} answers", self._service.timeout_s)
        return rows


def load_served(
    context: JobContext[AnsweringStageConfig], foreign: ModelConfig | None = None
) -> ServedModel:
    """Set up torch and return the input `policy`, else the `foreign` model, else the input `model`.

    A foreign model is one that no stage made, as the input `model` or found on the hub. Its
    configuration and tokenizer are copied, with every token that ends an answer.
    """
    config = context.config
    prepare_torch(
        config.hardware, config.num_threads, context.journal.log, computes=config.driver_computes
    )
    policy_dir = context.optional_input("policy")
    if policy_dir is not None:
        weights = partial(policy_weights, policy_dir)
        return ServedModel(
            policy_dir / HF_DIR, weights, num_steps=trained_steps(policy_dir).num_steps
        )
    if foreign is None:
        model_dir = serving_dir = context.input("model")
    else:
        model_dir = context.optional_input("model") or resolve_model(foreign, max_length=None)
        serving_dir = context.attempt_dir / HF_DIR
    check_model_directory(model_dir)
    if foreign is not None:
        write_hf_files(model_dir, serving_dir, foreign.chat_template)
    return ServedModel(serving_dir, partial(stored_tensors, model_dir), model_dir)
