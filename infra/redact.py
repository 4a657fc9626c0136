"""Removes secrets from everything written for people: logs, errors, reports.

A secret is the value of an environment variable with a telling name, or has a known form (tokens
of well-known services, PEM keys, passwords in URLs). Others are not found.
"""

import logging
import re
from collections.abc import Collection

from infra import env

MASK = "***"

_NAME_PARTS = frozenset(
    {
        *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "KEY", "APIKEY"),
        *("CREDENTIAL", "CREDENTIALS", "PGPASSWORD", "PWD", "PAT"),
    }
)
_MIN_LENGTH = 6
"""Shorter values (`1`, `true`, `none`) are not masked, as they occur everywhere in a text."""

_VALUE_PATTERNS = (
    re.compile(r"\bhf_[A-Za-z0-9]{16,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{20,}"),
    re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
    re.compile(r"\bhooks\.slack\.com/services/[A-Za-z0-9/]{10,}"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|\Z)", re.S),
)
_URL_PASSWORD = re.compile(r"(?P<keep>\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)")
_CONTEXT_PATTERNS = (
    # Only the text after `keep` is masked.
    re.compile(r"(?i)(?P<keep>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"),
    _URL_PASSWORD,
)


def redact(text: str) -> str:
    """Replace every secret in `text` by `***`."""
    for value in _environment_secrets():
        text = text.replace(value, MASK)
    for pattern in _VALUE_PATTERNS:
        text = pattern.sub(MASK, text)
    for pattern in _CONTEXT_PATTERNS:
        text = pattern.sub(rf"\g<keep>{MASK}", text)
    return text


def looks_secret(value: str) -> bool:
    """True if a value has the form of a secret."""
    return any(pattern.search(value) for pattern in (*_VALUE_PATTERNS, _URL_PASSWORD))


class RedactingFilter(logging.Filter):
    """Redacts log records in place. Attach it to handlers: loggers do not filter their children."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact message, traceback and stack of a record; always returns True."""
        record.msg = redact(_message(record))
        record.args = ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        if record.stack_info:
            record.stack_info = redact(record.stack_info)
        return True


def environment_of_user_code(passed: Collection[str] = (), **extra: str | None) -> dict[str, str]:
    """Return `env.child_environment(**extra)` without secrets other than those in `passed`."""
    withheld = {name: None for name in env.secrets(_NAME_PARTS, looks_secret) if name not in passed}
    return env.child_environment(**{**withheld, **extra})


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        # Format and arguments do not match; log both as they are.
        return f"{record.msg} {record.args}"


def _environment_secrets() -> list[str]:
    """Return secret values, longest first, so that a shorter one does not split a longer one."""
    values = {v for v in env.secrets(_NAME_PARTS).values() if len(v) >= _MIN_LENGTH}
    return sorted(values, key=len, reverse=True)
