"""The contract of a reward function: run it on your own.

    pytest tests/contracts/test_reward.py --reward exact
    pytest tests/contracts/test_reward.py --reward path/to/file.py:name --reward-cases cases.jsonl
    ... --reward-kwargs '{"max_tokens": 20}'

A case is a JSON object with `right` (a completion that earns more), `wrong` (one that earns
less), `ground_truth`, and if the function needs them `data_source` and `extra_info`.
A function that reads `model_score` or `judgement` gets 1 for the ground truth and 0 for all else.
Covered: it loads in a scoring process, scores what it should higher, repeats itself, judges each
sample alone, and gives every odd completion a finite score. Not covered: whether it is a good
measure of what you want.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engines.config.algorithm import RewardConfig
from engines.config.plugins import REWARDS
from engines.rewards.base import SampledTokens, Score, ScoreRequest
from engines.rewards.resolve import resolve
from engines.rewards.scorer import RewardScorer

DEFAULT_CASES: list[dict[str, Any]] = [
    {"right": "42", "wrong": "41", "ground_truth": "42"},
    {"right": "7", "wrong": "no idea", "ground_truth": "7"},
]
OWN_CASES: dict[str, list[dict[str, Any]]] = {
    "format": [
        {
            "right": "<think>6 x 7</think> <answer>42</answer>",
            "wrong": "<answer>42</answer>",
            "ground_truth": "42",
        }
    ],
    "gsm8k": [{"right": "#### 42", "wrong": "#### 41", "ground_truth": "42"}],
    "length": [{"right": "42", "wrong": "forty-two", "ground_truth": "42"}],
    "math_boxed": [{"right": "\\boxed{42}", "wrong": "\\boxed{41}", "ground_truth": "42"}],
    "math_dapo": [{"right": "Answer: 42", "wrong": "42", "ground_truth": "42"}],
}
"""Of this project's rewards that a bare number does not please."""
INDIFFERENT = {"length"}
"""To what a completion says."""
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "length": {"kwargs": {"max_tokens": 20}},
    "mixture": {
        "components": {"exact": {}, "number": {"function": "math", "weight": 0.5}},
        "accuracy": ["exact"],
    },
}
"""Of this project's rewards that need some."""
ODD_COMPLETIONS = [
    "", " \n\t", "\x00", "\\boxed{", "}" * 50, "$" * 50, "(" * 200, "\u4e2d\U0001f600 \u202e abc",
    "9" * 400, "-inf", "nan", "{'score': 1}", "word " * 2000,
]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One reward by `--reward`, else every registered one."""
    if "reward" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--reward", default=None)
        names = [asked] if asked else REWARDS.names()
        metafunc.parametrize("reward", names, scope="module")


@pytest.fixture(scope="module")
def config(request: pytest.FixtureRequest, reward: str) -> Iterator[RewardConfig]:
    given = request.config.getoption("--reward-kwargs", default=None)
    limits = {"function": reward, "timeout_s": 240, "max_unscored_frac": 1.0}
    if given is not None:
        yield RewardConfig.model_validate({**limits, "kwargs": json.loads(given)})
    elif reward == "http":
        with exact_server() as url:
            yield RewardConfig.model_validate({**limits, "kwargs": {"url": url}})
    else:
        yield RewardConfig.model_validate({**limits, **OWN_SETTINGS.get(reward, {})})


@contextmanager
def exact_server() -> Iterator[str]:
    """A server that gives 1 to the ground truth."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            right = asked["solution_str"].strip() == asked["ground_truth"]
            content = json.dumps({"score": float(right)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def scorer(config: RewardConfig) -> Iterator[RewardScorer]:
    with RewardScorer(config) as scorer:
        yield scorer


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, reward: str) -> list[dict[str, Any]]:
    path = request.config.getoption("--reward-cases", default=None)
    if path is None:
        return OWN_CASES.get(reward, DEFAULT_CASES)
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    found = [json.loads(line) for line in lines if line.strip()]
    need = {"right", "wrong", "ground_truth"}
    assert found, f"{path}: has no case"
    assert all(need <= case.keys() for case in found), f"{path}: need {sorted(need)} in each line"
    return found


def ask(case: dict[str, Any], completion: str) -> ScoreRequest:
    ids = tuple(completion.encode(errors="replace"))
    is_right = float(completion.strip() == case["ground_truth"])
    return ScoreRequest(
        case.get("data_source", "contract"),
        completion,
        case["ground_truth"],
        case.get("extra_info", {}),
        # A token for each byte.
        SampledTokens((1, 2), ids, (-0.5,) * len(ids), "stop"),
        # What a model that knows the answer would say, for functions that read it.
        model_score=is_right,
        judgement=f"I give it {is_right}",
    )


def values(scorer: RewardScorer, requests: list[ScoreRequest]) -> list[float]:
    results = scorer.score(requests)
    unscored = [result for result in results if not isinstance(result, Score)]
    assert not unscored
    return [result.value for result in results if isinstance(result, Score)]


def test_it_is_found_without_running_it(config: RewardConfig) -> None:
    assert resolve(config).function.target


def test_right_completions_score_higher(scorer: RewardScorer, cases: list[dict[str, Any]]) -> None:
    right = values(scorer, [ask(case, case["right"]) for case in cases])
    wrong = values(scorer, [ask(case, case["wrong"]) for case in cases])
    assert all(r > w for r, w in zip(right, wrong, strict=True)), (right, wrong)


def test_scores_repeat_and_do_not_depend_on_the_batch(
    scorer: RewardScorer, cases: list[dict[str, Any]]
) -> None:
    requests = [ask(case, case[kind]) for case in cases for kind in ("right", "wrong")]
    together = values(scorer, requests)
    assert values(scorer, requests[::-1]) == together[::-1]
    assert [values(scorer, [request])[0] for request in requests] == together


def test_odd_completions_get_a_score(
    scorer: RewardScorer, reward: str, cases: list[dict[str, Any]]
) -> None:
    scored = values(scorer, [ask(cases[0], completion) for completion in ODD_COMPLETIONS])
    best = values(scorer, [ask(cases[0], cases[0]["right"])])[0]
    assert reward in INDIFFERENT or max(scored) < best
