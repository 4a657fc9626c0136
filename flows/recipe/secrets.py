"""Refuses credentials in recipes, before anything is validated or echoed."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from infra.errors import ConfigError
from infra.redact import looks_secret

_SECRET_KEY = re.compile(r"(?i)(^|_)(password|passwd|secret|api_?key|access_key|credentials?)$")
_SECRET_TOKEN_KEY = re.compile(r"(?i)^((auth|access|hf|api|bearer|tracking)_)?token$")
_VARIABLE_BY_SECTION: Mapping[str, str] = {
    "location": "MLFLOW_TRACKING_TOKEN",
    "tracking": "MLFLOW_TRACKING_TOKEN",
    "model": "HF_TOKEN",
    "data": "HF_TOKEN",
}


def refuse_secrets(data: Any, path: str = "recipe") -> None:
    """Refuse text in plain data that looks like a credential, or has a key that names one.

    Raises:
        ConfigError: names the place, never the value.
    """
    if isinstance(data, str) and looks_secret(data):
        raise _secret_error(path)
    if isinstance(data, Mapping):
        for key, value in data.items():
            refuse_secrets(key, f"a key of {path}")
            where = str(key) if path == "recipe" else f"{path}.{key}"
            if isinstance(value, str) and value and _names_secret(str(key)):
                raise _secret_error(where)
            refuse_secrets(value, where)
    elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
        for index, value in enumerate(data):
            refuse_secrets(value, f"{path}.{index}")


def _names_secret(key: str) -> bool:
    return bool(_SECRET_KEY.search(key) or _SECRET_TOKEN_KEY.search(key))


def _secret_error(path: str) -> ConfigError:
    variable = _VARIABLE_BY_SECTION.get(path.partition(".")[0])
    remedy = f"set {variable}" if variable else "set the environment variable of the service"
    return ConfigError(path, f"secrets do not go into config files; {remedy}")
