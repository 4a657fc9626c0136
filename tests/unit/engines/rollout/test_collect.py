"""The synchronous front keeps order and notices what an engine lost; engines here are scripted."""

import pytest
from rlhf.testing.rollout_calls import generate_all

from engines.errors import RolloutError
from engines.rollout.collect import SampleLedger
from engines.types import Completion, RolloutRequest, SamplingParams


class ScriptedEngine:
    """Yields the given completions; only `generate` is ever called."""

    def __init__(self, answers: list[tuple[str, int]]) -> None:
        self.answers = answers

    async def generate(self, requests):
        for name, index in self.answers:
            yield Completion(name, index, (1,), (-0.5,), (0,), "length")


def requests(*names: str) -> list[RolloutRequest]:
    return [RolloutRequest(name, (1,), SamplingParams(1), (1, 2)) for name in names]


def test_completions_stand_in_the_order_of_the_requests():
    engine = ScriptedEngine([("a", 1), ("b", 0), ("a", 0), ("b", 1)])
    found = generate_all(engine, requests("b", "a"))
    assert [(c.request_id, c.sample_index) for c in found] == [
        ("b", 0),
        ("b", 1),
        ("a", 0),
        ("a", 1),
    ]


@pytest.mark.parametrize(
    "answers", [[("a", 0)], [("a", 0), ("a", 0)], [("a", 0), ("a", 1), ("a", 1)]]
)
def test_lost_and_doubled_samples_are_errors(answers):
    with pytest.raises(RolloutError, match="asked for 2 samples"):
        generate_all(ScriptedEngine(answers), requests("a"))


def test_repeated_sample_is_delivered_once_and_aborted_one_never():
    found: list[Completion] = []
    ledger = SampleLedger(requests("a"), found.append)
    first, again = (Completion("a", 0, (1,), (-0.5,), (0,), "stop") for _ in range(2))
    ledger.accept(first)
    ledger.accept(again)
    ledger.abort_missing()
    assert found == []
    ledger.hand_over()
    ledger.hand_over()
    assert [each is first for each in found] == [True]
    assert [each.finish_reason for each in ledger.rows()[0]] == ["stop", "abort"]
