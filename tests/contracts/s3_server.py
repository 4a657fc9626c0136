"""An S3 service for tests: moto's, in a process of its own on loopback, with one bucket.

Promises: of several conditional writes of one key one succeeds, as in S3 itself; moto looks and
writes in two steps, so here such requests go one by one.
Does not promise: durability, and checksums that are compared.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

BUCKET = "store"
START_DEADLINE_S = 60.0


def environment(endpoint: str) -> dict[str, str]:
    """What a process needs to talk to the service."""
    return {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "2",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


@contextmanager
def s3_server(host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a new service; it ends with the context.

    Skips the test where the packages are missing.

    Args:
        host: address of this machine that it listens on.
    """
    pytest.importorskip("moto.server", reason="needs the packages moto[server] and boto3")
    server = subprocess.Popen(
        [sys.executable, __file__, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stuck = threading.Timer(START_DEADLINE_S, server.kill)
    stuck.start()
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        stuck.cancel()
        assert address, "the S3 service did not start"
        yield address
    finally:
        stuck.cancel()
        server.kill()
        server.communicate(timeout=60)


def serve(host: str) -> None:
    """Run the service until nobody holds its standard input any more."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    os.environ.update(environment(""))
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = DomainDispatcherApplication(create_backend_app)
    conditional = threading.Lock()

    def one_by_one(
        request: Mapping[str, Any], start_response: Callable[..., Any]
    ) -> "Iterator[bytes]":
        if "HTTP_IF_NONE_MATCH" not in request:
            return app(request, start_response)
        with conditional:
            return app(request, start_response)

    server = make_server(host, 0, one_by_one, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://{host}:{server.port}"
    import boto3

    client = boto3.client("s3", endpoint_url=address)
    client.create_bucket(Bucket=BUCKET)
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1])
