r"""Answers that no computer can write out, or that no parser ends on: wrong, and soon."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from growth import grows_in_proportion
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse

from engines.config.algorithm import RewardConfig
from engines.rewards import math as math_module
from engines.rewards.base import Score, ScoreRequest
from engines.rewards.math import CpuLimitError, compute_score, cpu_limit, max_num_digits
from engines.rewards.scorer import RewardScorer

# The time may be over inside of a callback of the garbage collector, as Hypothesis has one: Python
# swallows what is raised there, and the next attempt ends the computation.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

TOO_LONG = [
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{(10^{10})!}",
    r"\boxed{\binom{10^8}{10^7}}",
    r"\boxed{10^{10^{7}}}",
    r"\boxed{1 + \frac{1}{3^{-9^{9}}}}",
    r"\boxed{2^{10^{10}} \mod 7}",
    r"\boxed{\prod_{n=1}^{10^7} n^2}",
    r"\boxed{\begin{pmatrix} 9^{9^9} & 1 \\ 1 & 1 \end{pmatrix}}",
    r"\boxed{\{1, (9^9)!\}}",
    r"\boxed{1^{9^{9^9}} + x^{9^{9^9}}}",
    r"\boxed{\binom{9^{9^9}}{0}}",
    "the answer is 9**9**9**9",
]
TOO_SLOW = [
    r"\boxed{\sum_{n=1}^{10^6}\sin(n)}",
    r"\boxed{(1+\sqrt{2})^{10^6}}",
    r"\boxed{(x+y)^{10000}}",
    r"\boxed{" + "(" * 2000 + "1" + ")" * 2000 + "}",
    r"\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
]
PARTS = ("9", "\\", "{", "$", "(")
LONG_TEXTS = [
    *(lambda length, part=part: r"\boxed{" + part * length + "}" for part in PARTS[:2]),
    *(lambda length, part=part: part * length for part in PARTS),
]
HANG_S = 60.0


def is_wrong(solution: str, **options: float) -> bool:
    return compute_score("d", solution, "5", **options)["score"] == 0.0


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Limits of the processor's time that ended something; they are those of a hang."""
    ended: list[float] = []

    @contextmanager
    def limit(max_cpu_s: float) -> Iterator[None]:
        try:
            with cpu_limit(HANG_S):
                yield
        except CpuLimitError:
            ended.append(max_cpu_s)
            raise

    monkeypatch.setattr(math_module, "cpu_limit", limit)
    return ended


@pytest.fixture(autouse=True)
def _warm() -> None:
    """What is computed once a process."""
    compute_score("d", r"\boxed{1+\sqrt{2}}", r"\frac{7}{2}")


@pytest.mark.parametrize("solution", TOO_LONG)
def test_a_number_too_long_to_write_out_is_wrong_without_a_limit(
    solution: str, ended: list[float]
) -> None:
    assert is_wrong(solution)
    assert ended == []


@pytest.mark.parametrize("solution", TOO_SLOW, ids=range(len(TOO_SLOW)))
def test_an_answer_that_takes_too_long_is_wrong(solution: str) -> None:
    started = time.monotonic()
    assert is_wrong(solution, max_cpu_s=0.5)
    assert time.monotonic() - started < HANG_S


@pytest.mark.parametrize("text", LONG_TEXTS, ids=range(len(LONG_TEXTS)))
def test_a_text_ten_times_as_long_takes_ten_times_as_long(
    text: Callable[[int], str], ended: list[float]
) -> None:
    shorter, longer = text(3_000), text(30_000)
    assert grows_in_proportion(partial(is_wrong, shorter), partial(is_wrong, longer))
    assert is_wrong(text(100_000))
    assert ended == []


def test_the_scorer_gives_them_scores() -> None:
    requests = [ScoreRequest("d", solution, "5") for solution in (*TOO_LONG[:3], r"\boxed{5}")]
    with RewardScorer(RewardConfig(function="math", max_unscored_frac=0, timeout_s=60)) as scorer:
        assert scorer.score(requests) == [Score(0.0)] * 3 + [Score(1.0)]


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("2^{100}", "1267650600228229401496703205376"),
        ("4^{50}", "2^{100}"),
        ("100!", "100 \\cdot 99!"),
        (r"\binom{52}{5}", "2598960"),
        (r"\binom{100}{98}", "4950"),
        ("10^{100}", r"100^{50}"),
        ("10^{-100}", r"\frac{1}{10^{100}}"),
        ("10^{400}", "100^{200}"),
        ("2^{1000000}", "2^{1000000}"),
        ("9^{9^{9^9}}", "9^{9^{9^9}}"),
        (r"\pi^{10^{9}}", r"\pi^{10^{9}}"),
        ("x^{10^{9}}", "x^{10^{9}}"),
        (r"\prod_{n=1}^{5} n", "120"),
    ],
)
def test_large_right_answers_stay_right(answer: str, truth: str) -> None:
    assert compute_score("d", f"\\boxed{{{answer}}}", truth)["score"] == 1.0


def texts(inner: st.SearchStrategy[tuple[str, int]]) -> st.SearchStrategy[tuple[str, int]]:
    """LaTeX and value, as long as the value has few digits."""

    def power(base: tuple[str, int], exponent: tuple[str, int]) -> tuple[str, int]:
        return f"({base[0]})^{{{exponent[0]}}}", base[1] ** exponent[1]

    def fac(of: tuple[str, int]) -> tuple[str, int]:
        return f"({of[0]})!", math.factorial(of[1])

    def choose(of: tuple[str, int], taken: tuple[str, int]) -> tuple[str, int]:
        return f"\\binom{{{of[0]}}}{{{taken[0]}}}", math.comb(of[1], taken[1])

    small = inner.filter(lambda each: each[1] < 200)
    return st.builds(power, inner, small) | st.builds(fac, small) | st.builds(choose, small, small)


NUMBERS = st.recursive(st.integers(0, 12).map(lambda n: (str(n), n)), texts, max_leaves=4)


@given(NUMBERS)
@settings(deadline=None, max_examples=60)
def test_the_bound_is_no_less_than_the_digits(number: tuple[str, int]) -> None:
    latex, value = number
    parsed, *_ = parse(f"\\boxed{{{latex}}}", parsing_timeout=None)
    assert max_num_digits(parsed) >= (math.log10(value) if value else 0) - 1e-6


@given(st.lists(st.integers(2, 99), min_size=3, max_size=8), st.sampled_from(["^", "!"]))
@settings(deadline=None, max_examples=25)
def test_no_tower_hangs(levels: list[int], kind: str) -> None:
    tower = str(levels[0])
    for level in levels[1:]:
        tower = f"{level}^{{{tower}}}" if kind == "^" else f"({tower})!"
    assert is_wrong(f"\\boxed{{{tower}}}")
