"""Addresses behind which another program listens than the configured one."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flows.commands.doctor import _service
from flows.local.embedded_prefect import check_answers
from infra.errors import ConfigError, ServiceError
from infra.ray.api import RayApi

NO_HTTP = b"SSH-2.0-OpenSSH_9.7\r\n"
LIST = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n[]"


@contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """An address that answers one request."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


def test_doctor_names_an_address_that_is_no_http_server() -> None:
    with listener(NO_HTTP) as url:
        check = _service("MLflow server", url, "/health", "a local database")
    assert check.status == "error"
    assert "does not answer" in check.detail


def test_a_run_names_an_address_that_is_no_prefect_server() -> None:
    with listener(NO_HTTP) as url, pytest.raises(ServiceError, match="PREFECT_API_URL"):
        check_answers(url)


def test_a_ray_address_of_another_server_is_named() -> None:
    with (
        listener(LIST) as url,
        pytest.raises(ConfigError, match=r"^ray\.address: .* is no Ray head"),
    ):
        RayApi(url, None).version()
