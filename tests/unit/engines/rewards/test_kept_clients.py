"""A reward that keeps a client from sample to sample, against a server that keeps connections."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from engines.config.algorithm import RewardConfig
from engines.rewards.base import Score, ScoreRequest, Unscored
from engines.rewards.process import WorkerSetup
from engines.rewards.scorer import RewardScorer, ScoringPool

FILE = """
import asyncio
import httpx

client = httpx.AsyncClient(trust_env=False)

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "sleep":
        await asyncio.sleep(60)
    reply = await client.post(ground_truth, content=solution_str)
    if solution_str == "raise":
        raise SystemExit
    return float(reply.text)

async def stubborn(solution_str, **rest):
    async def stay():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    stubborn.task = asyncio.create_task(stay())
    await asyncio.sleep(0)
    return 1.0

loop = asyncio.get_event_loop()

async def on_the_loop_of_its_module(solution_str, **rest):
    return float(asyncio.get_running_loop() is loop)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "asks.py"
    path.write_text(FILE, encoding="utf-8")
    return path


class Server(ThreadingHTTPServer):
    """Answers with the length of what it got; counts connections."""

    num_connections = 0
    daemon_threads = True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def do_POST(self) -> None:
        size = str(len(self.rfile.read(int(self.headers["Content-Length"])))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(size)))
        self.end_headers()
        self.wfile.write(size)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server: Server, *solutions: str) -> list[ScoreRequest]:
    url = f"http://127.0.0.1:{server.server_port}/"
    return [ScoreRequest("d", solution, url) for solution in solutions]


def score(pool: ScoringPool, requests: list[ScoreRequest]) -> list[Score | Unscored]:
    batch = pool.batch()
    for request in requests:
        batch.add(request)
    return batch.results()


def test_a_kept_client_scores_every_sample_over_one_connection(file: Path, server: Server) -> None:
    config = RewardConfig(function=str(file), timeout_s=60, num_workers=1)
    with RewardScorer(config) as scorer:
        found = scorer.score(ask(server, *("a" * n for n in range(1, 7))))
    assert found == [Score(float(n)) for n in range(1, 7)]
    assert server.num_connections == 1


def test_what_ends_one_sample_leaves_the_loop_of_the_next(file: Path, server: Server) -> None:
    pool = ScoringPool(WorkerSetup(f"{file}:compute_score", {}, 5.0, None), 1)
    found = score(pool, ask(server, "a", "raise", "bb", "sleep", "ccc", "dddd"))
    pool.close()
    assert found == [
        Score(1.0), Unscored("raised SystemExit"), Score(2.0),
        Unscored("missed the deadline of 5 s"), Score(3.0), Score(4.0),
    ]  # fmt: skip


def test_a_loop_that_the_module_asked_for_is_the_loop(file: Path, server: Server) -> None:
    config = RewardConfig(function=f"{file}:on_the_loop_of_its_module", timeout_s=60)
    with RewardScorer(config) as scorer:
        assert scorer.score(ask(server, "a", "b")) == [Score(1.0)] * 2


def test_uncancellable_task_does_not_keep_the_process_alive(file: Path, server: Server) -> None:
    """Its input ends, as when its parent is gone."""
    pool = ScoringPool(WorkerSetup(f"{file}:stubborn", {}, 60.0, None), 1)
    assert score(pool, ask(server, "a")) == [Score(1.0)]
    [child] = [
        each
        for each in psutil.Process(os.getpid()).children()
        if "engines.rewards.process" in each.cmdline()
    ]
    pool._processes[0]._stdin.close()
    child.wait(timeout=60)
    pool.close()
