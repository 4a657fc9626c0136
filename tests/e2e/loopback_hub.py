"""A Hugging Face hub on loopback: what its client asks to resolve and to download, no more."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_ASKED = {
    "info": re.compile(r"/api/(models|datasets)/(\w+/\w+)(?:/revision/(\w+))?"),
    "tree": re.compile(r"/api/(models|datasets)/(\w+/\w+)/tree/(\w+)"),
    "file": re.compile(r"/(datasets/)?(\w+/\w+)/resolve/(\w+)/(.+)"),
}


class Hub:
    """Repositories with commits, of which each branch `main` names one.

    Attributes:
        address: for `HF_ENDPOINT`.
        asked: kind of question (`info`, `tree`, `file`), repository and revision, in order.
        moves: whether each answer to which commit `main` is moves it to the next one.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.asked: list[tuple[str, str, str]] = []
        self.moves = False
        self._commits: dict[str, dict[str, Path]] = {}
        self._main: dict[str, int] = {}

    def push(self, repository: str, directory: Path) -> str:
        """Another commit of a repository; its first is what `main` names.

        Args:
            repository: `models/owner/name` or `datasets/owner/name`.
            directory: its files; not to be changed.

        Returns:
            The commit.
        """
        commits = self._commits.setdefault(repository, {})
        commit = hashlib.sha1(f"{repository}{len(commits)}".encode()).hexdigest()
        commits[commit] = directory
        self._main.setdefault(repository, 0)
        return commit

    def move(self, repository: str) -> None:
        """Let `main` name the next commit, of the last the first again."""
        self._main[repository] = (self._main[repository] + 1) % len(self._commits[repository])

    def answer(self, path: str) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body."""
        for kind, pattern in _ASKED.items():
            if found := pattern.fullmatch(path):
                repository = f"{(found[1] or 'models').strip('/')}/{found[2]}"
                self.asked.append((kind, repository, found[3] or "main"))
                return self._answer(kind, repository, found)
        return 404, {}, b"{}"

    def _answer(
        self, kind: str, repository: str, found: re.Match[str]
    ) -> tuple[int, Mapping[str, str], bytes]:
        commits = self._commits.get(repository)
        if commits is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = found[3] or "main"
        if commit == "main":
            commit = list(commits)[self._main[repository]]
        if commit not in commits:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        root = commits[commit]
        if kind == "info":
            if self.moves and found[3] not in commits:
                self.move(repository)
            return 200, {}, json.dumps({"id": found[2], "sha": commit}).encode()
        if kind == "tree":
            files = [path for path in sorted(root.rglob("*")) if path.is_file()]
            return 200, {}, json.dumps([_entry(path, root) for path in files]).encode()
        data = (root / found[4]).read_bytes()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{_blob_id(data)}"'}, data


def _entry(path: Path, root: Path) -> dict[str, Any]:
    data = path.read_bytes()
    name = path.relative_to(root).as_posix()
    return {"type": "file", "path": name, "size": len(data), "oid": _blob_id(data)}


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """A hub for as long as the scope lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path.partition("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
