"""Generate arithmetic problems with answers that a rule can check.

A prompt is the problem and an equals sign, the answer is a string of digits:

    operation  prompt       answer            (num_digits 2, zero_pad, reverse_answer)
    add        12+34=       640               046, least significant digit first
    subtract   34-12=       22                a >= b
    multiply   12*34=       8040              0408
    modulo     57%08=       10                01; the divisor is never 0
    compare    12?34=       <                 or > or =; never padded or reversed
    chain      12+34-05=    640;140           046;041 one partial result per step; the last counts

The rejected answer of a pair differs from the right one in one digit, by one (9 and 0 are
neighbours), or in the sign of a comparison.
Every problem belongs to one split by a hash of its canonical text (numbers without padding;
operands of add, multiply and compare sorted): evaluation 10 %, SFT 45 %, RL 45 %. So splits are
disjoint for all seeds, sizes and notations, and 34+12 never tests what 12+34 taught.
"""

import hashlib
import operator
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from engines.config.data import ArithmeticConfig
from engines.data.read.rows import Message, PreferenceRow, RewardModel, RLRow, SFTRow
from infra.errors import ConfigError

STEP_DELIMITER = ";"
"""Separates partial results of `chain`; the `exact` reward reads the text after the last one."""

SPLITS = ("evaluation", "sft", "rl")
_SPLIT_UPPER_BOUNDS = (0.10, 0.55, 1.0)
_COMMUTATIVE = {"add", "multiply", "compare"}
_CHAIN_SIGNS = ("++", "+-", "-+", "--")
_SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*", "modulo": "%", "compare": "?"}
_COMPUTED = {"+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod}


@dataclass(frozen=True)
class Problem:
    """One problem, independent of notation.

    `operands` are non-negative: two, or for `chain` three, and `signs` are those before the second
    and the third.
    """

    operation: str
    operands: tuple[int, ...]
    signs: str = ""

    def canonical(self) -> str:
        """Return a text independent of notation; operands are sorted if in `_COMMUTATIVE`."""
        operands = sorted(self.operands) if self.operation in _COMMUTATIVE else self.operands
        return f"{self.operation}{self.signs}:{','.join(map(str, operands))}"

    def split(self) -> str:
        """Return the split of the problem, from the hash of its canonical text."""
        digest = hashlib.sha256(self.canonical().encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        return SPLITS[bisect_right(_SPLIT_UPPER_BOUNDS, place)]

    def results(self) -> tuple[int, ...]:
        """Return the partial results of `chain`, else one result; not for `compare`."""
        result, *others = self.operands
        results = []
        for sign, operand in zip(self.signs or _SYMBOLS[self.operation], others, strict=True):
            result = _COMPUTED[sign](result, operand)
            results.append(result)
        return tuple(results)


def prompt_text(problem: Problem, config: ArithmeticConfig) -> str:
    """Return the text of the user's message."""
    width = config.num_digits if config.zero_pad else 0
    first, *rest = (f"{operand:0{width}d}" for operand in problem.operands)
    signs = problem.signs or _SYMBOLS[problem.operation]
    return first + "".join(s + o for s, o in zip(signs, rest, strict=True)) + "="


def answer_steps(problem: Problem, config: ArithmeticConfig) -> list[str]:
    """Return the results as text, the answer last."""
    if problem.operation == "compare":
        first, second = problem.operands
        return ["<" if first < second else ">" if first > second else "="]
    digits = config.num_digits
    widths = {"add": digits + 1, "multiply": 2 * digits, "chain": digits + 1}
    width = widths.get(problem.operation, digits) if config.zero_pad else 0
    written = [f"{result:0{width}d}" for result in problem.results()]
    return [text[::-1] for text in written] if config.reverse_answer else written


def generate(config: ArithmeticConfig, seed: int) -> dict[str, list[Any]]:
    """Generate the rows of each split, with operations interleaved.

    `seed` selects and orders the problems of a split but never changes a problem's split. If an
    operation has too few problems for the sizes, raise `ConfigError`.
    """
    mixed = _mixed(config, seed, {"sft": "num_sft", "rl": "num_rl", "evaluation": "num_eval"})
    pairs = _mixed(config, seed, {"rl": "num_preference", "evaluation": "num_preference_eval"})
    return {
        "sft": [_sft_row(problem, config) for problem in mixed["sft"]],
        **{
            split: [_rl_row(p, config, split, i) for i, p in enumerate(mixed[split])]
            for split in ("rl", "evaluation")
        },
        "preference": [_pair(problem, config, seed) for problem in pairs["rl"]],
        "preference_evaluation": [_pair(problem, config, seed) for problem in pairs["evaluation"]],
    }


def _mixed(config: ArithmeticConfig, seed: int, sizes: dict[str, str]) -> dict[str, list[Problem]]:
    """Return the problems by split; `sizes` names the field of `config` with each split's size."""
    operations = tuple(dict.fromkeys(config.operations))
    if not operations:
        raise ConfigError("data.arithmetic.operations", "got none; need at least one")
    drawn = []
    for place, operation in enumerate(operations):
        shares = {
            split: len(range(place, getattr(config, field), len(operations)))
            for split, field in sizes.items()
        }
        problems = _draw(operation, config.num_digits, seed, shares)
        for split, field in sizes.items():
            if len(problems[split]) < shares[split]:
                raise ConfigError(
                    f"data.arithmetic.{field}",
                    f"got {shares[split]} for {operation!r}; need at most {len(problems[split])}: "
                    f"all that {config.num_digits} digits give this split; lower it or raise "
                    "num_digits",
                )
        drawn.append(problems)
    return {
        split: [
            problem
            for turn in zip_longest(*(problems[split] for problems in drawn))
            for problem in turn
            if problem is not None
        ]
        for split in sizes
    }


def _draw(
    operation: str, num_digits: int, seed: int, shares: dict[str, int]
) -> dict[str, list[Problem]]:
    """Return the first problems of each split, as many as its share or all that there are."""
    drawn: dict[str, list[Problem]] = {split: [] for split in shares}
    num_missing = sum(shares.values())
    for problem in _problems(operation, num_digits, seed):
        if not num_missing:
            break
        split = problem.split()
        if split in shares and len(drawn[split]) < shares[split]:
            drawn[split].append(problem)
            num_missing -= 1
    return drawn


def _problems(operation: str, num_digits: int, seed: int) -> Iterator[Problem]:
    """Yield all problems of an operation once, in an order that depends on the arguments alone."""
    base = 10**num_digits
    key = f"{seed}/{operation}/{num_digits}"
    if operation == "chain":
        for index in _walk(4 * base**3, key):
            operands, signs = divmod(index, 4)
            pair, third = divmod(operands, base)
            problem = Problem(operation, (*divmod(pair, base), third), _CHAIN_SIGNS[signs])
            if min(problem.results()) >= 0:
                yield problem
        return
    for index in _walk(base**2, key):
        first, second = divmod(index, base)
        if {"subtract": first >= second, "modulo": second > 0}.get(operation, True):
            yield Problem(operation, (first, second))


def _walk(size: int, key: str) -> Iterator[int]:
    """Yield every index below `size` once, in a pseudo-random order that depends on `key` alone.

    A 4-round Feistel network permutes the smallest 4^n >= size; results outside are permuted again
    (format-preserving encryption, Black & Rogaway 2002). Needs no memory and no random stream.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    for start in range(size):
        value = start
        while True:
            left, right = value >> half_bits, value & mask
            for turn in range(4):
                digest = hashlib.blake2b(f"{key}/{turn}/{right}".encode(), digest_size=8).digest()
                left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
            value = left << half_bits | right
            if value < size:
                break
        yield value


def _sft_row(problem: Problem, config: ArithmeticConfig) -> SFTRow:
    question = Message("user", prompt_text(problem, config))
    answer = Message("assistant", STEP_DELIMITER.join(answer_steps(problem, config)))
    return SFTRow((question, answer), f"arithmetic/{problem.operation}")


def _rl_row(problem: Problem, config: ArithmeticConfig, split: str, index: int) -> RLRow:
    extra_info: dict[str, object] = {"split": split, "index": index}
    if problem.operation == "chain":
        extra_info["answer_delimiter"] = STEP_DELIMITER
    return RLRow(
        data_source=f"arithmetic/{problem.operation}",
        prompt=(Message("user", prompt_text(problem, config)),),
        ability="arithmetic",
        reward_model=RewardModel("rule", answer_steps(problem, config)[-1]),
        extra_info=extra_info,
    )


def _pair(problem: Problem, config: ArithmeticConfig, seed: int) -> PreferenceRow:
    """Make a pair whose rejected answer has one symbol changed to its neighbour, chosen by a hash.

    A partly trained model mostly makes such mistakes; other wrong digits would train on answers
    that it does not give.
    """
    steps = answer_steps(problem, config)
    right, symbols = steps[-1], "<>=" if problem.operation == "compare" else "0123456789"
    key = f"{seed}/wrong/{problem.canonical()}".encode()
    draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    place, turn = draw % len(right), 1 if draw // len(right) % 2 else -1
    symbol = symbols[(symbols.index(right[place]) + turn) % len(symbols)]
    wrong = right[:place] + symbol + right[place + 1 :]
    return PreferenceRow(
        prompt=(Message("user", prompt_text(problem, config)),),
        chosen=STEP_DELIMITER.join(steps),
        rejected=STEP_DELIMITER.join([*steps[:-1], wrong]),
        data_source=f"arithmetic/{problem.operation}",
    )
