"""How completions are sampled."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from engines.config.base import Execution, NotIdentity, StrictModel

RoutingName = Literal["by_place", "least_loaded"]
"""Which replica of an engine samples what: see `engines.rollout.routing`."""

TransportName = Literal["auto", "shared_memory", "collective"]


class StructuredOutputConfig(StrictModel):
    """A form that every answer has to have; exactly one of the three."""

    json_schema: dict[str, Any] | None = None
    """A JSON Schema."""
    regex: str | None = Field(default=None, min_length=1)
    """A regular expression that the whole answer matches."""
    choice: tuple[str, ...] = ()
    """Texts, of which the answer is one."""

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputConfig":
        given = [name for name in ("json_schema", "regex", "choice") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"got {' and '.join(given) or 'nothing'}; need one of json_schema, regex, choice"
            )
        return self


def check_stop(stop: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Refuse stop strings that are empty or stand there twice, with `ValueError`."""
    if stop and ("" in stop or len(set(stop)) < len(stop)):
        raise ValueError(f"got {list(stop)}; need texts that are not empty, each once")
    return stop


def check_stop_token_ids(ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Refuse stop tokens that no vocabulary has or that stand there twice, with `ValueError`."""
    if ids and (min(ids) < 0 or len(set(ids)) < len(ids)):
        raise ValueError(f"got {list(ids)}; need token ids from 0 on, each once")
    return ids


class SamplingConfig(StrictModel):
    """The sampling distribution. Reported logprobs are those of this distribution."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 switches it off."""
    max_new_tokens: int = Field(default=1024, ge=1)
    stop: tuple[str, ...] = ()
    """Texts that end an answer, which keeps them; that of a special token means the token."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, beside the model's own end-of-sequence tokens."""
    structured_output: StructuredOutputConfig | None = None
    """Form of the answers, for rollout engines that can; null: any."""

    _stop = field_validator("stop")(check_stop)
    _stop_token_ids = field_validator("stop_token_ids")(check_stop_token_ids)


class RolloutConfig(StrictModel):
    """The rollout engine and its capacity."""

    engine: str = "transformers"
    """Name of a rollout engine."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """null uses `training.dtype`."""
    max_num_sequences: Annotated[int, Execution] = Field(default=256, ge=1)
    """Sequences decoded together."""
    placement: Annotated[Literal["colocated", "disaggregated"], Execution] = "colocated"
    """Placement of the engines: on the devices of the training ranks, or on others."""
    num_replicas: Annotated[int, Execution] = Field(default=1, ge=1)
    """Engines on devices of their own; `colocated` has one for each rank."""
    transport: Annotated[TransportName, NotIdentity] = "auto"
    """How weights reach engines beside the ranks: through memory of the machine, or by broadcast;
    `auto` broadcasts where an engine is on another machine than the rank that sends."""
    timeout_s: Annotated[float, NotIdentity] = Field(default=1800.0, gt=0)
    """After which the unfinished samples of one batch of requests are aborted. It counts for the
    identity of a round of RL, where what is unfinished does not train; elsewhere that is an error.
    """
    silence_s: Annotated[float, NotIdentity] = Field(default=120.0, gt=0)
    """An engine beside the ranks that answers nothing for so long while it samples is ended."""
    max_num_restarts: Annotated[int, NotIdentity] = Field(default=3, ge=0)
    """Engines beside the ranks that may be lost and started again, in one stage."""
    openai_endpoint: Annotated[bool, NotIdentity] = False
    """OpenAI's API in front of each engine beside the ranks, on loopback; its log names the file
    that holds address and key. Who asks there takes part in the batches of the run, so that it
    repeats no longer bit for bit."""
    lora_sync: Annotated[Literal["auto", "adapter", "merged"], Execution] = "auto"
    """How a trained adapter reaches engines: alone, after the frozen weights were sent once, or
    merged into them at every sync; `auto` sends it alone where the engines can take it."""
    options: dict[str, Any] = {}
    """Options of the chosen engine."""

    @property
    def num_workers_per_replica(self) -> int:
        """Devices of an engine, and processes that share its model."""
        return int(self.options.get("tensor_parallel_size", 1))
