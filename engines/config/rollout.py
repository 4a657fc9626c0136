"""How completions are sampled, and the rollout engine that samples them."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from engines.config.base import Execution, NotIdentity, Refusals, StrictModel

RoutingName = Literal["by_place", "least_loaded"]
"""How requests are assigned to the replicas of an engine; see `engines.rollout.replica_pool`."""

TransportName = Literal["auto", "device_ipc", "shared_memory", "collective"]


class StructuredOutputConfig(StrictModel):
    """A form that every answer must have; exactly one of the three."""

    json_schema: dict[str, Any] | None = None
    """A JSON Schema."""
    regex: str | None = Field(default=None, min_length=1)
    """A regular expression that the whole answer matches."""
    choice: tuple[str, ...] = ()
    """Texts; the answer is one of them."""

    def _refusals(self) -> Refusals:
        given = [name for name in ("json_schema", "regex", "choice") if getattr(self, name)]
        yield (
            len(given) != 1,
            f"got {' and '.join(given) or 'nothing'}; need one of json_schema, regex, choice",
        )


def check_stop(stop: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the stop strings; raises `ValueError` if one is empty or repeated."""
    if stop and ("" in stop or len(set(stop)) < len(stop)):
        raise ValueError(f"got {list(stop)}; need texts that are not empty, each once")
    return stop


def check_stop_token_ids(ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the stop tokens; raises `ValueError` if one is negative or repeated."""
    if ids and (min(ids) < 0 or len(set(ids)) < len(ids)):
        raise ValueError(f"got {list(ids)}; need token ids from 0 on, each once")
    return ids


class SamplingConfig(StrictModel):
    """The sampling distribution; reported logprobs are those of this distribution."""

    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy, and reports logprobs of temperature 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """Number of likeliest tokens to draw from; 0 switches it off."""
    max_new_tokens: int = Field(default=1024, ge=1)
    stop: Annotated[tuple[str, ...], AfterValidator(check_stop)] = ()
    """Texts that end an answer and stay in it; the text of a special token means the token."""
    stop_token_ids: Annotated[tuple[int, ...], AfterValidator(check_stop_token_ids)] = ()
    """Tokens that end an answer, in addition to the model's end-of-sequence tokens."""
    structured_output: StructuredOutputConfig | None = None
    """Form that answers must have, if the rollout engine supports it; null: any form."""


NEEDS_FP8 = (
    "rollout.quantization",
    "got fp8; need a device that multiplies 8-bit floats (NVIDIA from compute capability 8.9 on, "
    "AMD from MI300 on, or a CPU); set it to null, or choose another device",
)
"""Path and problem of a `ConfigError`."""


class RolloutConfig(StrictModel):
    """The rollout engine and its capacity."""

    engine: str = "transformers"
    """Name of a rollout engine."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """dtype of the model in the engine; null uses `training.dtype`."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: in RL rounds the engine multiplies 8-bit floats (E4M3), with a scale for each output
    channel and each token. Weights are sent in bfloat16; each sync quantizes all of them. The head,
    embeddings and cache keep their dtype, and so do teachers, judges and evaluations."""
    max_num_sequences: Annotated[int, Execution] = Field(default=256, ge=1)
    """Largest number of sequences that one engine decodes at the same time."""
    placement: Annotated[Literal["colocated", "disaggregated"], Execution] = "colocated"
    """`colocated`: engines on the training ranks' devices; `disaggregated`: on other devices."""
    num_replicas: Annotated[int, Execution] = Field(default=1, ge=1)
    """Engines on devices of their own; `colocated` has one per rank."""
    transport: Annotated[TransportName, NotIdentity] = "auto"
    """How weights reach engines outside the ranks: memory of a rank's device on the same machine,
    shared memory of the machine, or broadcast. `auto` broadcasts if an engine is on a machine
    without a rank, and else takes the device's memory on NVIDIA and AMD accelerators."""
    delta_sync: Annotated[bool, NotIdentity] = False
    """Broadcast only what changed since the last sync, exactly. Takes host memory of up to twice
    the weights in each receiving process, as much in all senders. No effect on adapters that are
    sent alone, and where nothing is broadcast."""
    timeout_s: Annotated[float, NotIdentity] = Field(default=1800.0, gt=0)
    """Seconds after which the unfinished samples of a batch of requests are aborted. It counts for
    the fingerprint of an RL round, where they do not train; elsewhere they are an error."""
    silence_s: Annotated[float, NotIdentity] = Field(default=120.0, gt=0)
    """Seconds without response while sampling after which an engine outside the ranks is ended."""
    max_num_restarts: Annotated[int, NotIdentity] = Field(default=3, ge=0)
    """Restarts of lost engines outside the ranks, of all replicas together, in one stage."""
    openai_endpoint: Annotated[bool, NotIdentity] = False
    """Serve OpenAI's API on loopback for each engine outside the ranks; its log names the file with
    address and key. External requests join the run's batches, so it is not bitwise repeatable."""
    lora_sync: Annotated[Literal["auto", "adapter", "merged"], Execution] = "auto"
    """How a trained adapter reaches engines. `adapter`: alone, after the frozen weights once;
    `merged`: merged into the weights at every sync; `auto`: alone if the engines support it."""
    options: dict[str, Any] = {}
    """Options of the chosen engine."""

    def _refusals(self) -> Refusals:
        # `auto` is not refused: the machine decides.
        yield (
            self.delta_sync and self.transport in {"device_ipc", "shared_memory"},
            f"delta_sync: got true with transport {self.transport}, which copies within a node; "
            "need a broadcast; choose transport collective or auto",
        )

    @property
    def unquantized(self) -> "RolloutConfig":
        """The configuration for a model whose logprobs or answers are measured."""
        return self.model_copy(update={"quantization": None})

    @property
    def num_workers_per_replica(self) -> int:
        """Devices, and processes, that share the model of one engine."""
        return int(self.options.get("tensor_parallel_size", 1))
