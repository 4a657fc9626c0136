"""A proxy in front of an HTTP service on loopback, which fails as a test asks it to.

Promises: a request that is cut never reaches the service; one whose answer is lost was done there.
"""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Action = Literal["cut request", "lose answer", "cut answer", "ignore condition"] | int
CODES = {403: "AccessDenied", 404: "NoSuchKey", 409: "ConditionalRequestConflict"}
ANSWER_S = 60.0


@dataclass(frozen=True)
class Request:
    """What a client asked for.

    Attributes:
        method: of HTTP.
        path: with the query.
        num_bytes: of its body.
        range: of bytes, as its header says; empty without one.
    """

    method: str
    path: str
    num_bytes: int
    range: str


@dataclass
class FaultProxy:
    """What the proxy saw, and what it is to break.

    Attributes:
        address: of the proxy.
        requests: all of them, in order.
    """

    address: str
    requests: list[Request] = field(default_factory=list)
    _faults: list[list[object]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(
        self, action: Action, method: str, part: str = "", times: int = 1, after: int = 0
    ) -> None:
        """Break requests of a method whose path has a part: `times` of them, after some others.

        A number is answered as a status, without the service.
        """
        self._faults.append([action, method, part, times, after])

    def heal(self) -> None:
        """Break nothing any more."""
        self._faults.clear()

    def see(self, request: Request) -> Action | None:
        """Note a request; what is to be done to it."""
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                action, method, part, times, after = fault
                if method != request.method or str(part) not in request.path or not times:
                    continue
                if after:
                    fault[4] = int(str(after)) - 1
                    continue
                fault[3] = int(str(times)) - 1
                return action  # type: ignore[return-value]
        return None


@contextmanager
def fault_proxy(service: str) -> Iterator[FaultProxy]:
    """A proxy in front of a service at an address; it ends with the context."""
    server = _Server(service)
    proxy = server.proxy
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, service: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.service = urlsplit(service).netloc
        self.proxy = FaultProxy(f"http://127.0.0.1:{self.server_port}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # clients wait for "100 Continue"
    server: "_Server"

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.raw_requestline = self.rfile.readline(65537)
        if self.raw_requestline and self.parse_request():
            self.close_connection = True
            self._serve()

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        seen = Request(self.command, self.path, size, self.headers.get("Range", ""))
        action = self.server.proxy.see(seen)
        if action == "cut request":
            self.rfile.read(size // 2)
            return
        body = self.rfile.read(size)
        if isinstance(action, int):
            code = CODES.get(action, "InternalError")
            text = f"<Error><Code>{code}</Code><Message>scripted</Message></Error>".encode()
            self._answer(action, [("Content-Type", "application/xml")], text, len(text))
        else:
            self._forward(body, action)

    def _forward(self, body: bytes, action: Action | None) -> None:
        dropped = {"expect", "if-none-match" if action == "ignore condition" else ""}
        kept = self.headers.items()
        headers = {name: value for name, value in kept if name.lower() not in dropped}
        upstream = http.client.HTTPConnection(self.server.service, timeout=ANSWER_S)
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        if action == "lose answer":
            return
        size = int(answer.getheader("Content-Length") or len(data))
        sent = data[: len(data) // 2] if action == "cut answer" else data
        self._answer(answer.status, answer.getheaders(), sent, size)

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, size: int) -> None:
        self.send_response_only(status)
        hop = {"content-length", "connection", "transfer-encoding"}
        for name, value in headers:
            if name.lower() not in hop:
                self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        return
