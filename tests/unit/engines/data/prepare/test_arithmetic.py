"""Generated problems: right answers, disjoint splits, stable hashes, honest limits."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.config.data import ArithmeticConfig, Operation
from engines.data.prepare.arithmetic import Problem, answer_steps, generate, prompt_text
from engines.data.read.rows import RLRow
from infra.errors import ConfigError

OPERATIONS: tuple[Operation, ...] = ("add", "subtract", "multiply", "modulo", "compare", "chain")


def small(**changes: object) -> ArithmeticConfig:
    sizes = {"num_sft": 40, "num_rl": 40, "num_eval": 10}
    return ArithmeticConfig.model_validate({**sizes, **changes})


def value_of(prompt: str) -> str:
    """The answer by an independent parser of the prompt, in plain decimal."""
    text = prompt.removesuffix("=")
    if "?" in text:
        left, right = (int(part) for part in text.split("?"))
        return "<>="[(left > right) + 2 * (left == right)]
    tokens = re.findall(r"\d+|[-+*%]", text)
    result = int(tokens[0])
    for sign, number in zip(tokens[1::2], tokens[2::2], strict=True):
        n = int(number)
        result = {"+": result + n, "-": result - n, "*": result * n, "%": n and result % n}[sign]
    return str(result)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("zero_pad", [True, False])
@pytest.mark.parametrize("reverse_answer", [True, False])
def test_answers_are_right(operation: Operation, zero_pad: bool, reverse_answer: bool) -> None:
    config = small(operations=(operation,), zero_pad=zero_pad, reverse_answer=reverse_answer)
    splits = generate(config, seed=3)
    for row in (*splits["rl"], *splits["evaluation"]):
        answer = row.reward_model.ground_truth
        if operation != "compare":
            answer = str(int(answer[::-1] if reverse_answer else answer))
        assert answer == value_of(row.prompt[0].content)
    for row in splits["sft"]:
        answer = row.messages[1].content.split(";")[-1]
        if operation != "compare":
            answer = str(int(answer[::-1] if reverse_answer else answer))
        assert answer == value_of(row.messages[0].content)


def test_the_documented_notation() -> None:
    padded = ArithmeticConfig(num_digits=2, zero_pad=True, reverse_answer=True)

    def written(problem: Problem) -> tuple[str, str]:
        return prompt_text(problem, padded), ";".join(answer_steps(problem, padded))

    assert written(Problem("add", (12, 34))) == ("12+34=", "640")
    assert written(Problem("subtract", (34, 12))) == ("34-12=", "22")
    assert written(Problem("multiply", (12, 34))) == ("12*34=", "8040")
    assert written(Problem("modulo", (57, 8))) == ("57%08=", "10")
    assert written(Problem("compare", (12, 34))) == ("12?34=", "<")
    assert written(Problem("chain", (12, 34, 5), "+-")) == ("12+34-05=", "640;140")
    plain = ArithmeticConfig(num_digits=2, zero_pad=False, reverse_answer=False)
    assert prompt_text(Problem("modulo", (57, 8)), plain) == "57%8="
    assert answer_steps(Problem("chain", (12, 34, 5), "+-"), plain) == ["46", "41"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("num_digits", [2, 3, 6])
def test_padded_answers_have_one_width(operation: Operation, num_digits: int) -> None:
    splits = generate(small(operations=(operation,), num_digits=num_digits), seed=1)
    rows = (*splits["rl"], *splits["evaluation"])
    assert len({len(row.reward_model.ground_truth) for row in rows}) == 1
    assert len({len(row.prompt[0].content) for row in rows}) == 1


def canonical(row: RLRow) -> tuple[object, ...]:
    """What two prompts share when one gives the other away."""
    text = row.prompt[0].content
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    signs = tuple(re.findall(r"[-+*%?]", text))
    return (signs, *(sorted(numbers) if signs in {("+",), ("*",), ("?",)} else numbers))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_splits_are_disjoint_whatever_the_seed_and_the_writing(operation: Operation) -> None:
    config = {"operations": (operation,), "num_digits": 2}
    runs = [
        generate(small(**config, zero_pad=pad, reverse_answer=not pad, num_eval=100), seed=seed)
        for seed, pad in ((0, True), (1, False), (2, True))
    ]
    evaluation = {canonical(row) for run in runs for row in run["evaluation"]}
    rl = {canonical(row) for run in runs for row in run["rl"]}
    sft = {
        canonical(RLRow("s", row.messages[:1], "", row_reward))
        for run in runs
        for row in run["sft"]
        for row_reward in [run["rl"][0].reward_model]
    }
    assert not evaluation & rl
    assert not evaluation & sft
    assert not rl & sft


def test_the_hash_never_changes() -> None:
    # Fixed: a problem that moves to another split would leak evaluation rows into training.
    problems = [Problem("add", (a, b)) for a, b in ((1, 2), (12, 34), (0, 0), (99, 1), (50, 7))]
    assert [problem.split() for problem in problems] == GOLDEN_SPLITS
    assert Problem("add", (34, 12)).canonical() == "add:12,34"
    assert Problem("chain", (3, 1, 2), "+-").canonical() == "chain+-:3,1,2"


GOLDEN_SPLITS = ["sft", "rl", "sft", "evaluation", "sft"]


def test_split_shares() -> None:
    counts = {"evaluation": 0, "sft": 0, "rl": 0}
    for a in range(100):
        for b in range(100):
            counts[Problem("subtract", (a, b)).split()] += 1
    assert abs(counts["evaluation"] - 1000) < 150
    assert abs(counts["sft"] - 4500) < 250
    assert abs(counts["rl"] - 4500) < 250


def test_same_seed_same_rows_other_seed_other_rows() -> None:
    assert generate(small(), seed=5) == generate(small(), seed=5)
    first, other = generate(small(), seed=5), generate(small(), seed=6)
    assert {row.prompt for row in first["rl"]} != {row.prompt for row in other["rl"]}


def test_the_default_sizes_fit_two_digits_and_rows_are_distinct() -> None:
    splits = generate(ArithmeticConfig(), seed=0)
    assert (len(splits["sft"]), len(splits["rl"]), len(splits["evaluation"])) == (4096, 4096, 512)
    prompts = [row.prompt for row in (*splits["rl"], *splits["evaluation"], *splits["sft"])]
    assert len(set(prompts)) == len(prompts)


def test_operations_share_the_rows_and_are_interleaved() -> None:
    splits = generate(small(operations=("add", "compare", "chain"), num_rl=10), seed=0)
    names = [row.data_source for row in splits["rl"]]
    assert names[:3] == ["arithmetic/add", "arithmetic/compare", "arithmetic/chain"]
    assert [names.count(f"arithmetic/{o}") for o in ("add", "compare", "chain")] == [4, 3, 3]
    chain = next(row for row in splits["rl"] if row.data_source == "arithmetic/chain")
    assert chain.extra_info["answer_delimiter"] == ";"


def test_a_space_that_is_too_small_is_refused_with_its_size() -> None:
    with pytest.raises(ConfigError) as error:
        generate(small(num_digits=1, num_eval=50), seed=0)
    assert error.value.path == "data.arithmetic.num_eval"
    match = re.search(r"got 50 for 'add'; need at most (\d+)", str(error.value))
    assert match
    possible = int(match.group(1))
    # All that the message names can be had, and no more.
    assert len(generate(small(num_digits=1, num_eval=possible), seed=0)["evaluation"]) == possible
    with pytest.raises(ConfigError):
        generate(small(num_digits=1, num_eval=possible + 1), seed=0)


@given(st.integers(0, 2**31), st.sampled_from(OPERATIONS), st.integers(1, 6))
def test_large_spaces_need_no_enumeration(seed: int, operation: Operation, digits: int) -> None:
    sizes = {"num_sft": 3, "num_rl": 3, "num_eval": 1}
    config = ArithmeticConfig.model_validate(
        {**sizes, "operations": (operation,), "num_digits": digits}
    )
    splits = generate(config, seed)
    assert (len(splits["sft"]), len(splits["rl"]), len(splits["evaluation"])) == (3, 3, 1)


@pytest.mark.parametrize("operation", ["add", "subtract", "multiply", "modulo", "compare", "chain"])
def test_a_pair_differs_in_one_symbol_of_the_last_result(operation: str) -> None:
    config = ArithmeticConfig(
        operations=(operation,), num_sft=8, num_rl=8, num_eval=8, num_preference=40,
        num_preference_eval=8,
    )  # fmt: skip
    made = generate(config, 3)
    assert (len(made["preference"]), len(made["preference_evaluation"])) == (40, 8)
    places, steps = set(), set()
    for row in (*made["preference"], *made["preference_evaluation"]):
        assert len(row.chosen) == len(row.rejected)
        wrong = [
            place
            for place, (a, b) in enumerate(zip(row.chosen, row.rejected, strict=True))
            if a != b
        ]
        assert len(wrong) == 1
        assert wrong[0] >= row.chosen.rfind(";") + 1
        places.add(wrong[0])
        if row.data_source != "arithmetic/compare":
            digits = (int(answer[wrong[0]]) for answer in (row.chosen, row.rejected))
            steps.add((next(digits) - next(digits)) % 10)
    assert len(places) == len(made["preference"][0].chosen.rpartition(";")[2])
    assert steps == (set() if operation == "compare" else {1, 9})
    right = {row.prompt: row.reward_model.ground_truth for row in made["rl"]}
    chosen = {row.prompt: row.chosen.rpartition(";")[2] for row in made["preference"]}
    assert all(chosen[prompt] == right[prompt] for prompt in right)


def test_pairs_change_no_other_split() -> None:
    sizes = {"num_sft": 8, "num_rl": 8, "num_eval": 8}
    without = generate(ArithmeticConfig(**sizes), 0)
    made = generate(ArithmeticConfig(**sizes, num_preference=4, num_preference_eval=4), 0)
    assert (without["sft"], without["rl"], without["evaluation"]) == (
        made["sft"],
        made["rl"],
        made["evaluation"],
    )
    held_out = {row.prompt for row in made["preference_evaluation"]}
    assert not held_out & {row.prompt for row in (*made["rl"], *made["preference"])}
