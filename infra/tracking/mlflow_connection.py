"""One door to MLflow, which may be shut at any time without hurting anybody.

Promises: MLflow is imported at the first call and not before (two seconds of CPU); a call never
raises; a server that does not answer costs a few seconds and one warning, and is then left alone
for a while.
Does not promise: that anything arrived. Metrics stay in the journal and are shipped later.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from infra import env
from infra.redact import redact

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

Value = TypeVar("Value")

RETRY_AFTER_S = 60.0
MAX_PARAM_CHARS = 500
MAX_KEY_CHARS = 250
PARAMS_PER_CALL = 100
_REFUSALS = frozenset(
    {
        *("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED"),
        *("RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE"),
    }
)
"""Answers of a server that works; only the call was wrong."""

_log = logging.getLogger(__name__)


class MlflowConnection:
    """A tracking server or an embedded database.

    Args:
        uri: `http(s)://...` of a server, or `sqlite:////absolute/path`.
        retry_after_s: seconds for which a store that failed is not asked again.
    """

    def __init__(self, uri: str, retry_after_s: float = RETRY_AFTER_S) -> None:
        self.uri = uri
        self._retry_after_s = retry_after_s
        self._silent_until = 0.0
        self._warned = False
        self._client: MlflowClient | None = None
        self._lock = threading.Lock()

    @property
    def is_server(self) -> bool:
        """Whether artifacts go through a server instead of straight to a directory."""
        return not self.uri.startswith("sqlite:")

    @property
    def is_resting(self) -> bool:
        """Whether calls are skipped now because the last one failed."""
        return time.monotonic() < self._silent_until

    def call(self, what: str, action: Callable[["MlflowClient"], Value]) -> Value | None:
        """Do something with the client.

        Args:
            what: the action in words, for the warning.
            action: gets the client.

        Returns:
            What the action gave; None if it could not be done.
        """
        if self.is_resting:
            return None
        try:
            value = action(self._open())
        except Exception as error:  # noqa: BLE001  no failure of tracking may end a stage
            self._failed(what, error)
            return None
        self._warned = False
        return value

    def warm_up(self) -> None:
        """Import MLflow and open the store in the background, while something else is awaited."""
        threading.Thread(
            target=self.call, args=("open", lambda _: None), name="mlflow-warm-up", daemon=True
        ).start()

    def _open(self) -> "MlflowClient":
        with self._lock:
            if self._client is None:
                for variable, value in (
                    (env.MLFLOW_HTTP_REQUEST_MAX_RETRIES, "1"),
                    (env.MLFLOW_HTTP_REQUEST_TIMEOUT, "5"),
                    (env.MLFLOW_DISABLE_TELEMETRY, "true"),
                ):
                    if variable.get() is None:
                        env.set_for_process(variable.name, value)
                from mlflow.tracking import MlflowClient

                for name in ("alembic", "mlflow.store.db.utils"):
                    logging.getLogger(name).setLevel(logging.WARNING)
                if not self.is_server:
                    Path(self.uri.removeprefix("sqlite:///")).parent.mkdir(
                        parents=True, exist_ok=True
                    )
                client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
                # The first query creates or migrates the tables of an embedded database.
                client.search_experiments(max_results=1)
                self._client = client
            return self._client

    def _failed(self, what: str, error: Exception) -> None:
        reason = redact(" ".join(str(error).split()))[:300]
        _log.debug("tracking: could not %s", what, exc_info=error)
        if getattr(error, "error_code", None) in _REFUSALS:
            _log.warning("tracking: MLflow refused to %s: %s", what, reason)
            return
        self._silent_until = time.monotonic() + self._retry_after_s
        if not self._warned:
            self._warned = True
            _log.warning(
                "tracking: MLflow at %s could not %s (%s); metrics stay in the journal and are "
                "sent later",
                redact(self.uri),
                what,
                reason,
            )


def metric_key(name: str) -> str:
    """A metric's name in the characters that MLflow allows: `pass@4` becomes `pass_at_4`."""
    return re.sub(r"[^/\w.\- :]", "_", name.replace("@", "_at_"))[:MAX_KEY_CHARS]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted keys and short texts, secrets masked."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[metric_key(name)] = redact(str(value))[:MAX_PARAM_CHARS]
    return flat


def log_params(client: "MlflowClient", run_id: str, params: Mapping[str, str]) -> None:
    """Log parameters, as many per call as MLflow takes."""
    from mlflow.entities import Param

    entities = [Param(key, value) for key, value in params.items()]
    for start in range(0, len(entities), PARAMS_PER_CALL):
        client.log_batch(run_id, params=entities[start : start + PARAMS_PER_CALL])
