import io
import logging
import uuid

import pytest

from infra.redact import RedactingFilter, looks_secret, redact

# Put together here, so that no scanner takes this file for a leak.
TOKENS = [
    "hf_" + "AbCdEfGhIjKlMnOpQrStUv",
    "sk-" + "proj-abcdefghij0123456789",
    "AKIA" + "ABCDEFGHIJKLMNOP",
    "ghp_" + "0123456789abcdefghij",
    "github_pat_" + "0123456789abcdefghij_x",
    "glpat-" + "0123456789abcdefghij",
    "xoxb-" + "0123456789-abcdef",
    "hooks.slack.com/" + "services/T0123456/B0123456/abcdefgh",
    "eyJhbGciOiJIUzI1" + ".eyJzdWIiOiIxMjM0" + ".abc_DEF-123",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
]


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_are_known_by_their_form(token: str) -> None:
    assert looks_secret(token)
    assert redact(f"value={token}, next") == "value=***, next"


@pytest.mark.parametrize(
    "text",
    [
        "train/loss 0.5 at step 10",
        "task-sk-learn and hf_hub and AKIA",
        "http://127.0.0.1:4200/api",
        "sha256 " + "0123456789abcdef" * 4,
        "keyboard tokenizer token-mean",
        "file:///tmp/a b@c",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact(text) == text
    assert not looks_secret(text)


def test_passwords_in_urls_and_headers() -> None:
    assert redact("postgresql+asyncpg://me:p4ss@host/db") == "postgresql+asyncpg://me:***@host/db"
    assert looks_secret("postgresql+asyncpg://me:p4ss@host/db")
    assert redact("Authorization: Bearer abcdefgh12345") == "Authorization: Bearer ***"


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "WANDB_API_KEY",
        "my_token",
        "PREFECT_API_AUTH_STRING",
        "PGPASSWORD",
        "MYSQL_PWD",
        "GITHUB_PAT",
    ],
)
def test_values_of_secret_variables(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    canary = f"CANARY {uuid.uuid4()}"
    monkeypatch.setenv(name, canary)
    assert redact(f"a {canary} b {canary}") == "a *** b ***"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false-and-long"),
        ("RAY_AUTH_TOKEN_PATH", "/home/me/.rlhf/token"),
        ("KEYBOARD_LAYOUT", "somewhere"),
        ("PWD", "/home/me/here"),
        ("SHORT_TOKEN", "true"),
        ("EMPTY_TOKEN", ""),
    ],
)
def test_other_variables_are_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert redact(f"it is {value}!") == f"it is {value}!"


def test_a_secret_that_holds_another_leaves_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "abcdef")
    monkeypatch.setenv("B_TOKEN", "abcdefghij")
    assert redact("x abcdefghij y abcdef") == "x *** y ***"


def test_filter_redacts_arguments_tracebacks_and_child_loggers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_TOKEN", "CANARY-123456")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter())
    parent = logging.getLogger(f"redact-{uuid.uuid4()}")
    parent.addHandler(handler)
    child = parent.getChild("child")
    child.warning("with %s and %d", "CANARY-123456", 3)
    child.warning("wrong arguments %d", "CANARY-123456")
    child.warning("stack", stack_info=True)
    try:
        raise ValueError("CANARY-123456")
    except ValueError:
        child.exception("failed: %s", TOKENS[0])
    text = stream.getvalue()
    assert "CANARY" not in text
    assert TOKENS[0] not in text
    assert "with *** and 3\n" in text
    assert "ValueError: ***" in text
    assert "failed: ***" in text
