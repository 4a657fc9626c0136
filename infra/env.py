"""The environment variables that this project reads, and most of those that it sets.

Promises: no other module of these packages accesses the process environment.
An empty variable counts as unset.
Does not promise: that a library that is already imported sees a value set later.
"""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.errors import ConfigError

_declared: dict[str, "EnvVar"] = {}
_PLACES = frozenset({"PATH", "FILE", "DIR", "URL", "MODE"})


@dataclass(frozen=True)
class EnvVar:
    """One environment variable with the default of `get` and a one-line description.

    The value of a `secret` variable must never be printed.
    """

    name: str
    default: str | None
    description: str
    secret: bool = False

    def __post_init__(self) -> None:
        if self.name in _declared:
            raise ValueError(f"environment variable {self.name} is declared twice")
        _declared[self.name] = self

    def get(self) -> str | None:
        """Return the current value, or the default."""
        return os.environ.get(self.name) or self.default

    def require(self) -> str:
        """Return the value or the default; raises ConfigError if there is neither."""
        value = self.get()
        if value is None:
            raise ConfigError(
                f"environment.{self.name}", f"not set; need {self.description}; export it"
            )
        return value

    def get_bool(self) -> bool:
        """Parse 1/true/yes/on or 0/false/no/off, unset as False; raises ConfigError for others."""
        match (self.get() or "0").strip().lower():
            case "1" | "true" | "yes" | "on":
                return True
            case "0" | "false" | "no" | "off":
                return False
            case value:
                raise ConfigError(f"environment.{self.name}", f"got {value!r}; need 1 or 0")


# Variables of this project.
RLHF_HOME = EnvVar("RLHF_HOME", ".rlhf", "directory of the store, work files and services")
RLHF_PLATFORM = EnvVar("RLHF_PLATFORM", None, "hardware platform by name, before any probe")
RLHF_ENGINE_DEVICE = EnvVar("RLHF_ENGINE_DEVICE", None, "device name that picks a training engine")
RLHF_ENGINE_VENDOR = EnvVar("RLHF_ENGINE_VENDOR", None, "vendor name that picks a training engine")
RLHF_USE_EXTERNAL_MODULES = EnvVar(
    "RLHF_USE_EXTERNAL_MODULES", None, "comma-separated modules that register plugins on import"
)
RLHF_CACHE_BYTES = EnvVar(
    "RLHF_CACHE_BYTES", "200000000000", "room for copies of what lies in a store elsewhere"
)
RLHF_DEBUG = EnvVar("RLHF_DEBUG", None, "1 prints the traceback of user errors too")
RLHF_PROCESS_MARK = EnvVar(
    "RLHF_PROCESS_MARK", None, "names the family of a process that we started; set by us"
)
RLHF_FAULTS = EnvVar("RLHF_FAULTS", None, "armed fault points, for tests (see infra/faults.py)")

# Addresses and credentials of the services we talk to.
RAY_ADDRESS = EnvVar("RAY_ADDRESS", None, "address of an existing Ray cluster's job server")
RAY_AUTH_MODE = EnvVar("RAY_AUTH_MODE", None, "`token` switches Ray's authentication on")
RAY_AUTH_TOKEN_PATH = EnvVar("RAY_AUTH_TOKEN_PATH", None, "file that holds Ray's token")
RAY_AUTH_TOKEN = EnvVar("RAY_AUTH_TOKEN", None, "Ray's token itself", secret=True)
PREFECT_HOME = EnvVar("PREFECT_HOME", None, "directory of Prefect's database and results")
PREFECT_API_URL = EnvVar("PREFECT_API_URL", None, "address of the Prefect server; unset: embedded")
PREFECT_API_AUTH_STRING = EnvVar(
    "PREFECT_API_AUTH_STRING", None, "user:password of the Prefect server", secret=True
)
MLFLOW_TRACKING_URI = EnvVar("MLFLOW_TRACKING_URI", None, "address of the MLflow server")
MLFLOW_TRACKING_TOKEN = EnvVar(
    "MLFLOW_TRACKING_TOKEN", None, "bearer token of the MLflow server", secret=True
)
WANDB_API_KEY = EnvVar(
    "WANDB_API_KEY", None, "key of Weights & Biases; runs go there while they run", secret=True
)
WANDB_MODE = EnvVar(
    "WANDB_MODE", None, "offline or online; by default online where there is a WANDB_API_KEY"
)
HF_TOKEN = EnvVar("HF_TOKEN", None, "Hugging Face hub token for gated models", secret=True)
HF_HOME = EnvVar("HF_HOME", None, "directory of the Hugging Face cache")
HF_ENDPOINT = EnvVar("HF_ENDPOINT", None, "address of the Hugging Face hub or of a mirror")
HF_HUB_OFFLINE = EnvVar("HF_HUB_OFFLINE", None, "1 forbids every call to the Hugging Face hub")
HF_DATASETS_CACHE = EnvVar(
    "HF_DATASETS_CACHE", None, "directory of the harness's data sets; by default under HF_HOME"
)
HF_DATASETS_OFFLINE = EnvVar(
    "HF_DATASETS_OFFLINE", None, "1 has lm-evaluation-harness read data sets from the cache alone"
)

AWS_ENDPOINT_URL = EnvVar("AWS_ENDPOINT_URL", None, "address of an S3 service other than Amazon's")
AWS_ENDPOINT_URL_S3 = EnvVar("AWS_ENDPOINT_URL_S3", None, "the same, before AWS_ENDPOINT_URL")
AWS_PROFILE = EnvVar("AWS_PROFILE", None, "profile of the AWS files that names the credentials")
AWS_REGION = EnvVar("AWS_REGION", None, "region of the S3 service")

# Read by libraries at import; this project sets them for its own processes.
RAY_USAGE_STATS_ENABLED = EnvVar("RAY_USAGE_STATS_ENABLED", None, "0 keeps Ray from phoning home")
RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER = EnvVar(
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None, "0 binds every server of a Ray head to loopback"
)
RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S = EnvVar(
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", None, "0 spares a stopped Ray head its long farewell"
)
PREFECT_RESULTS_DEFAULT_SERIALIZER = EnvVar(
    "PREFECT_RESULTS_DEFAULT_SERIALIZER", None, "json: Prefect's own default is pickle"
)
PREFECT_SERVER_ANALYTICS_ENABLED = EnvVar(
    "PREFECT_SERVER_ANALYTICS_ENABLED", None, "false keeps Prefect from phoning home"
)
PREFECT_FLOWS_HEARTBEAT_FREQUENCY = EnvVar(
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY", None, "seconds between two signs of life of a flow run"
)
PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE = EnvVar(
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", None, "where a Prefect server keeps taken slots"
)
PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL = EnvVar(
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", None, "least level of Prefect's lines on the terminal"
)
DO_NOT_TRACK = EnvVar("DO_NOT_TRACK", None, "1 keeps libraries from phoning home")
MLFLOW_HTTP_REQUEST_MAX_RETRIES = EnvVar(
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
    None,
    "1 keeps a dead server from blocking for minutes",
)
MLFLOW_HTTP_REQUEST_TIMEOUT = EnvVar(
    "MLFLOW_HTTP_REQUEST_TIMEOUT", None, "seconds one MLflow request may take"
)
MLFLOW_SERVER_ENABLE_JOB_EXECUTION = EnvVar(
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION", None, "false spares the MLflow server its job workers"
)
MLFLOW_DISABLE_TELEMETRY = EnvVar(
    "MLFLOW_DISABLE_TELEMETRY", None, "true keeps MLflow from phoning home"
)
MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT = EnvVar(
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT",
    None,
    "true keeps MLflow's addresses of runs off stdout",
)
WANDB_ERROR_REPORTING = EnvVar(
    "WANDB_ERROR_REPORTING", None, "false keeps Weights & Biases from reporting its own errors"
)
OMP_NUM_THREADS = EnvVar("OMP_NUM_THREADS", None, "threads of OpenMP, read when torch loads")
TRITON_CACHE_DIR = EnvVar(
    "TRITON_CACHE_DIR", None, "Triton's kernels; vLLM's are by default in VLLM_CACHE_ROOT"
)
TORCHDYNAMO_DISABLE = EnvVar(
    "TORCHDYNAMO_DISABLE", None, "1 spares a rollout engine the compilation of its sampler"
)
VLLM_CPU_KVCACHE_SPACE = EnvVar(
    "VLLM_CPU_KVCACHE_SPACE", None, "removed by us: it overrules rollout.options.kv_cache_bytes"
)
VLLM_CPU_OMP_THREADS_BIND = EnvVar(
    "VLLM_CPU_OMP_THREADS_BIND", None, "nobind: vLLM leaves the choice of cores to the system"
)
VLLM_NO_USAGE_STATS = EnvVar("VLLM_NO_USAGE_STATS", None, "1 keeps vLLM from phoning home")
VLLM_LOGGING_LEVEL = EnvVar("VLLM_LOGGING_LEVEL", None, "least level of vLLM's own lines")
VLLM_LOGGING_STREAM = EnvVar("VLLM_LOGGING_STREAM", None, "ext://sys.stderr: vLLM's own is stdout")
VLLM_WORKER_MULTIPROC_METHOD = EnvVar(
    "VLLM_WORKER_MULTIPROC_METHOD", None, "spawn: a fork would copy the threads of Ray and torch"
)
VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS = EnvVar(
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", None, "1: a worker on a CPU waits for its end in vain"
)
VLLM_CACHE_ROOT = EnvVar(
    "VLLM_CACHE_ROOT", None, "what vLLM compiled; by default compiled/vllm in the home"
)
VLLM_ASCEND_ENABLE_NZ = EnvVar(
    "VLLM_ASCEND_ENABLE_NZ", None, "0 keeps weights on Ascend in a layout that can be reloaded"
)
RLHF_SGLANG_KEY = EnvVar(
    "RLHF_SGLANG_KEY", None, "set by us: what SGLang's server asks of its clients", secret=True
)
DISABLE_MULTIPROC = EnvVar(
    "DISABLE_MULTIPROC", None, "set by us: 1, lm-evaluation-harness computes in one process"
)
SGLANG_CACHE_DIR = EnvVar(
    "SGLANG_CACHE_DIR", None, "what SGLang compiled; by default compiled/sglang in the home"
)
SGLANG_PLUGINS = EnvVar("SGLANG_PLUGINS", None, "set by us: rlhf, the one plugin that is loaded")
SGLANG_USE_CPU_ENGINE = EnvVar("SGLANG_USE_CPU_ENGINE", None, "set by us: 1, SGLang on a CPU")
SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION = EnvVar(
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", None, "set by us: 0, a look samples nothing"
)
SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK = EnvVar(
    "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK", None, "set by us: 1, logits of a prompt come in parts"
)
SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN = EnvVar(
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", None, "set by us: 1, SGLang holds some tokens back"
)
NCCL_CUMEM_ENABLE = EnvVar(
    "NCCL_CUMEM_ENABLE", None, "NCCL's cuMem allocator; must be equal for ranks and replicas"
)
CUDA_VISIBLE_DEVICES = EnvVar(
    "CUDA_VISIBLE_DEVICES", None, "NVIDIA or MetaX devices this process may use"
)
HIP_VISIBLE_DEVICES = EnvVar("HIP_VISIBLE_DEVICES", None, "AMD devices this process may use")
ROCR_VISIBLE_DEVICES = EnvVar(
    "ROCR_VISIBLE_DEVICES", None, "the same below HIP; Ray refuses it without HIP_VISIBLE_DEVICES"
)

# Rendezvous of torch.distributed.
RANK = EnvVar("RANK", None, "global rank of this process")
LOCAL_RANK = EnvVar("LOCAL_RANK", None, "number of this process's device among those it sees")
WORLD_SIZE = EnvVar("WORLD_SIZE", None, "number of ranks")
LOCAL_WORLD_SIZE = EnvVar("LOCAL_WORLD_SIZE", None, "number of ranks on this host")
GROUP_RANK = EnvVar("GROUP_RANK", None, "number of this host among those of the group")
GLOO_SOCKET_IFNAME = EnvVar(
    "GLOO_SOCKET_IFNAME", None, "interface of collectives on the host; by default Ray's"
)
NCCL_SOCKET_IFNAME = EnvVar(
    "NCCL_SOCKET_IFNAME", None, "interface by which NCCL meets; by default Ray's"
)


def home() -> Path:
    """Return RLHF_HOME (`ConfigError` if relative), else `<cwd>/.rlhf`; it may not exist."""
    named = os.environ.get(RLHF_HOME.name)
    if named:
        return absolute_home(f"environment.{RLHF_HOME.name}", named)
    return Path(RLHF_HOME.require()).absolute()


def absolute_home(setting: str, value: str) -> Path:
    """Return a home or store directory as a path; it may not exist yet.

    Raises:
        ConfigError: it is relative, so it would depend on the working directory; names `setting`.
    """
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise ConfigError(
            setting,
            f"got {value!r}, which depends on the current directory; need an absolute path, like "
            f"{path.absolute()}",
        )
    return path


def child_environment(**extra: str | None) -> dict[str, str]:
    """Return a copy of this process's environment with `extra` set; None removes a variable."""
    environment = {**os.environ, **extra}
    return {name: value for name, value in environment.items() if value is not None}


def set_for_process(name: str, value: str | None) -> None:
    """Set a variable declared here for this process and its later children; None unsets it.

    For a variable that a library reads at import: call this before the import.
    """
    if name not in _declared:
        raise KeyError(f"{name} is not declared in infra/env.py; add its line")
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def set_for_platform(variables: Mapping[str, str]) -> None:
    """Set a platform's variables for this process; they need not be declared here."""
    os.environ.update(variables)


def unset_of(variables: Mapping[str, str]) -> dict[str, str]:
    """Return those of a platform's variables that the user has not set."""
    return {name: value for name, value in variables.items() if name not in os.environ}


def all_variables() -> tuple[EnvVar, ...]:
    """Return every declared variable, in the order of this file."""
    return tuple(_declared.values())


def secrets(
    name_parts: Collection[str], looks_secret: Callable[[str], bool] = lambda _: False
) -> dict[str, str]:
    """Return the non-empty environment variables that hold a secret, by name.

    An undeclared variable holds one if its upper-case name contains one of `name_parts` between
    underscores (``KEY`` matches ``AWS_SECRET_ACCESS_KEY``, not ``KEYBOARD``) and does not end in
    a word of `_PLACES`. So does any variable for whose value `looks_secret` is true. A bare ``PWD``
    is the working directory.
    """
    found = {}
    for name, value in os.environ.items():
        declared = _declared.get(name)
        if declared is not None:
            is_secret = declared.secret
        else:
            parts = name.upper().split("_")
            named = name != "PWD" and not set(name_parts).isdisjoint(parts)
            is_secret = named and parts[-1] not in _PLACES
        if value and (is_secret or looks_secret(value)):
            found[name] = value
    return found
