"""A reward server that is slow, broken, gone or wrong, on a real socket."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from engines.config.algorithm import RewardConfig
from engines.errors import RewardError
from engines.rewards.base import Score, ScoreRequest, Unscored
from engines.rewards.scorer import RewardScorer

Answer = Callable[[dict[str, Any], BaseHTTPRequestHandler], tuple[int, bytes]]


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = answer(asked, self)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """A client that was ended in the middle is none of ours."""

    with Server(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/score"
        running.shutdown()


def scored(url: str, *texts: str, **changes: Any) -> list[Score | Unscored]:
    settings = {
        "function": "http", "timeout_s": 10.0, "max_unscored_frac": 1.0,
        **{key: value for key, value in changes.items() if key != "kwargs"},
        "kwargs": {"url": url, "backoff_s": 0.01, **changes.get("kwargs", {})},
    }  # fmt: skip
    with RewardScorer(RewardConfig.model_validate(settings)) as scorer:
        return scorer.score([ScoreRequest("src", t, {"a": 1}, {"id": 3}) for t in texts])


def reason(result: Score | Unscored) -> str:
    assert isinstance(result, Unscored)
    return result.reason


def test_the_server_sees_the_row_and_its_numbers_come_back() -> None:
    seen: list[dict[str, Any]] = []

    def answer(asked: dict[str, Any], _: object) -> tuple[int, bytes]:
        seen.append(asked)
        return 200, json.dumps({"score": len(asked["solution_str"]), "style": 0.5}).encode()

    with server(answer) as url:
        assert scored(url, "ab") == [Score(2.0, {"style": 0.5})]
    assert seen == [
        {"data_source": "src", "solution_str": "ab", "ground_truth": {"a": 1},
         "extra_info": {"id": 3}}
    ]  # fmt: skip


def test_what_is_no_score_is_unscored_and_the_others_are() -> None:
    replies = {
        "garbage": b"<html>", "nan": b"NaN", "none": b"null", "text": b'"good"', "list": b"[1]",
        "long": b" " * (1 << 21), "fine": b"1.5",
    }  # fmt: skip

    with server(lambda asked, _: (200, replies[asked["solution_str"]])) as url:
        found = dict(zip(replies, scored(url, *replies, num_workers=2), strict=True))
    assert found.pop("fine") == Score(1.5)
    assert "answered no JSON: b'<html>'" in reason(found["garbage"])
    assert reason(found["nan"]) == "returned nan"
    assert reason(found["none"]) == "returned None; need a number"
    assert "more than 1048576 bytes" in reason(found["long"])
    assert all(isinstance(result, Unscored) for result in found.values())


def test_a_server_that_is_busy_or_breaks_is_asked_again() -> None:
    statuses = iter([503, 429, 500, 200])

    with server(lambda *_: (next(statuses), b"1")) as url:
        assert scored(url, "a") == [Score(1.0)]


def test_a_refusal_is_not_repeated() -> None:
    num_asked = []

    def answer(*_: object) -> tuple[int, bytes]:
        num_asked.append(None)
        return 404, b""

    with server(answer) as url:
        (result,) = scored(url, "a")
    assert "the reward server at 127.0.0.1: answered 404 (try 1)" in reason(result)
    assert len(num_asked) == 1


def test_a_server_that_hangs_costs_its_sample_and_its_deadline() -> None:
    is_over = threading.Event()

    def answer(asked: dict[str, Any], _: object) -> tuple[int, bytes]:
        if asked["solution_str"] == "hang":
            is_over.wait(30)
        return 200, b"1"

    with server(answer) as url:
        start = time.monotonic()
        hung, fine = scored(url, "hang", "fine", timeout_s=2.0, num_workers=2)
        is_over.set()
        assert time.monotonic() - start < 20
    assert isinstance(hung, Unscored)
    assert fine == Score(1.0)


def test_a_server_that_is_gone_is_no_score_of_0() -> None:
    with server(lambda *_: (200, b"1")) as url:
        pass
    (result,) = scored(url, "a", kwargs={"max_num_retries": 1})
    assert "ConnectError" in reason(result)
    assert "(try 2)" in reason(result)
    with pytest.raises(RewardError, match=r"2 of 2 samples could not be scored.*reward server at"):
        scored(url, "a", "b", max_unscored_frac=0.5, kwargs={"max_num_retries": 0})


def test_a_token_travels_by_its_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_REWARD_TOKEN", "sesame-123456")

    def answer(_: object, handler: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        return (200 if handler.headers["Authorization"] == "Bearer sesame-123456" else 401), b"1"

    with server(answer) as url:
        kwargs = {"token_variable": "MY_REWARD_TOKEN"}
        named = scored(url, "a", kwargs=kwargs, environment=["MY_REWARD_TOKEN"])
        assert named == [Score(1.0)]
        # Not named in rl.reward.environment, it is withheld from the function.
        (withheld,) = scored(url, "a", kwargs=kwargs)
    assert "MY_REWARD_TOKEN is not set here" in reason(withheld)
