"""Generated arithmetic problems with answers that a rule can check.

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
operands of commutative operations sorted): evaluation 10 %, SFT 45 %, RL 45 %. So splits are
disjoint for all seeds, sizes and notations, and 34+12 never tests what 12+34 taught.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engines.config.data import ArithmeticConfig
from engines.data.read.rows import Message, PreferenceRow, RewardModel, RLRow, SFTRow
from infra.errors import ConfigError

STEP_DELIMITER = ";"
"""Separates partial results of `chain`; the `exact` reward reads the text after the last one."""

SPLITS = ("evaluation", "sft", "rl")
_SPLIT_UPPER_BOUNDS = (0.10, 0.55, 1.0)
_COMMUTATIVE = {"add", "multiply", "compare"}
_SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*", "modulo": "%", "compare": "?"}


@dataclass(frozen=True)
class Problem:
    """One problem, independent of notation.

    There are two `operands`, all non-negative, or three for `chain`, whose `signs` stand before the
    second and the third.
    """

    operation: str
    operands: tuple[int, ...]
    signs: str = ""

    def canonical(self) -> str:
        """Return a text that is equal for problems that teach the same thing."""
        operands = sorted(self.operands) if self.operation in _COMMUTATIVE else self.operands
        return f"{self.operation}{self.signs}:{','.join(map(str, operands))}"

    def split(self) -> str:
        """Return the split of the problem, from the hash of its canonical text."""
        digest = hashlib.sha256(self.canonical().encode()).digest()
        place = int.from_bytes(digest[:8], "big") / 2**64
        return next(
            name for name, bound in zip(SPLITS, _SPLIT_UPPER_BOUNDS, strict=True) if place < bound
        )

    def results(self) -> tuple[int, ...]:
        """Return the partial results in order; a single one for operations other than `chain`."""
        first, second, *rest = self.operands
        match self.operation:
            case "add":
                return (first + second,)
            case "subtract":
                return (first - second,)
            case "multiply":
                return (first * second,)
            case "modulo":
                return (first % second,)
            case "chain":
                partial = first + second if self.signs[0] == "+" else first - second
                return (partial, partial + rest[0] if self.signs[1] == "+" else partial - rest[0])
        raise ValueError(f"{self.operation} has no numeric result")


@dataclass(frozen=True)
class Notation:
    """Number format of problems and answers, as in `ArithmeticConfig`."""

    num_digits: int
    zero_pad: bool
    reverse_answer: bool

    def prompt(self, problem: Problem) -> str:
        """Return the text of the user's message."""
        width = self.num_digits if self.zero_pad else 0
        first, *rest = (f"{operand:0{width}d}" for operand in problem.operands)
        signs = problem.signs or _SYMBOLS[problem.operation]
        return first + "".join(s + o for s, o in zip(signs, rest, strict=True)) + "="

    def steps(self, problem: Problem) -> list[str]:
        """Return the results as text, the answer last."""
        if problem.operation == "compare":
            first, second = problem.operands
            return ["<" if first < second else ">" if first > second else "="]
        width = _answer_width(problem.operation, self.num_digits) if self.zero_pad else 0
        written = [f"{result:0{width}d}" for result in problem.results()]
        return [text[::-1] for text in written] if self.reverse_answer else written


@dataclass(frozen=True)
class ArithmeticSplits:
    """The generated rows."""

    sft: tuple[SFTRow, ...]
    rl: tuple[RLRow, ...]
    evaluation: tuple[RLRow, ...]
    preference: tuple[PreferenceRow, ...] = ()
    preference_evaluation: tuple[PreferenceRow, ...] = ()


def generate(config: ArithmeticConfig, seed: int) -> ArithmeticSplits:
    """Generate the splits, with operations interleaved.

    `seed` selects and orders the problems of a split but never changes a problem's split. If an
    operation has too few problems for the sizes, raise `ConfigError`.
    """
    notation = Notation(config.num_digits, config.zero_pad, config.reverse_answer)
    mixed = _mixed(
        config,
        seed,
        {
            "sft": ("num_sft", config.num_sft),
            "rl": ("num_rl", config.num_rl),
            "evaluation": ("num_eval", config.num_eval),
        },
    )
    pairs = _mixed(
        config,
        seed,
        {
            "rl": ("num_preference", config.num_preference),
            "evaluation": ("num_preference_eval", config.num_preference_eval),
        },
    )
    return ArithmeticSplits(
        tuple(_sft_row(problem, notation) for problem in mixed["sft"]),
        tuple(_rl_row(p, notation, "rl", i) for i, p in enumerate(mixed["rl"])),
        tuple(_rl_row(p, notation, "evaluation", i) for i, p in enumerate(mixed["evaluation"])),
        tuple(_pair(problem, notation, seed) for problem in pairs["rl"]),
        tuple(_pair(problem, notation, seed) for problem in pairs["evaluation"]),
    )


def _mixed(
    config: ArithmeticConfig, seed: int, wanted: dict[str, tuple[str, int]]
) -> dict[str, list[Problem]]:
    operations = tuple(dict.fromkeys(config.operations))
    if not operations:
        raise ConfigError("data.arithmetic.operations", "got none; need at least one")
    drawn: dict[str, list[list[Problem]]] = {split: [] for split in wanted}
    for place, operation in enumerate(operations):
        shares = {
            split: (field, _share(count, place, len(operations)))
            for split, (field, count) in wanted.items()
        }
        for split, problems in _draw(operation, config.num_digits, seed, shares).items():
            drawn[split].append(problems)
    return {split: _interleave(parts) for split, parts in drawn.items()}


def _draw(
    operation: str, num_digits: int, seed: int, wanted: dict[str, tuple[str, int]]
) -> dict[str, list[Problem]]:
    size, decode = _problem_space(operation, num_digits)
    drawn: dict[str, list[Problem]] = {split: [] for split in wanted}
    num_open = sum(1 for _, count in wanted.values() if count)
    for index in _walk(size, f"{seed}/{operation}/{num_digits}"):
        if not num_open:
            break
        problem = decode(index)
        if problem is None:
            continue
        if (split := problem.split()) not in wanted:
            continue
        taken, (_, count) = drawn[split], wanted[split]
        if len(taken) < count:
            taken.append(problem)
            num_open -= len(taken) == count
    for split, (field, count) in wanted.items():
        problems = drawn[split]
        if len(problems) < count:
            raise ConfigError(
                f"data.arithmetic.{field}",
                f"got {count} for {operation!r}; need at most {len(problems)}: all that "
                f"{num_digits} digits give this split; lower it or raise num_digits",
            )
    return drawn


def _problem_space(operation: str, num_digits: int) -> tuple[int, Callable[[int], Problem | None]]:
    """Return the number of indices, and the function from index to problem (None if invalid)."""
    base = 10**num_digits

    def pair(index: int) -> Problem | None:
        first, second = divmod(index, base)
        if (operation == "subtract" and first < second) or (operation == "modulo" and not second):
            return None
        return Problem(operation, (first, second))

    def chain(index: int) -> Problem | None:
        index, signs = divmod(index, 4)
        index, third = divmod(index, base)
        first, second = divmod(index, base)
        problem = Problem("chain", (first, second, third), ("++", "+-", "-+", "--")[signs])
        return problem if min(problem.results()) >= 0 else None

    return (4 * base**3, chain) if operation == "chain" else (base**2, pair)


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


def _answer_width(operation: str, num_digits: int) -> int:
    return {"add": num_digits + 1, "multiply": 2 * num_digits, "chain": num_digits + 1}.get(
        operation, num_digits
    )


def _share(total: int, place: int, num_operations: int) -> int:
    return total // num_operations + (place < total % num_operations)


def _interleave(parts: list[list[Problem]]) -> list[Problem]:
    longest = max(len(part) for part in parts)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


def _sft_row(problem: Problem, notation: Notation) -> SFTRow:
    answer = STEP_DELIMITER.join(notation.steps(problem))
    return SFTRow(
        (Message("user", notation.prompt(problem)), Message("assistant", answer)),
        f"arithmetic/{problem.operation}",
    )


def _rl_row(problem: Problem, notation: Notation, split: str, index: int) -> RLRow:
    extra_info: dict[str, object] = {"split": split, "index": index}
    if problem.operation == "chain":
        extra_info["answer_delimiter"] = STEP_DELIMITER
    return RLRow(
        data_source=f"arithmetic/{problem.operation}",
        prompt=(Message("user", notation.prompt(problem)),),
        ability="arithmetic",
        reward_model=RewardModel("rule", notation.steps(problem)[-1]),
        extra_info=extra_info,
    )


def _pair(problem: Problem, notation: Notation, seed: int) -> PreferenceRow:
    """Make a pair whose rejected answer has one symbol changed to its neighbour, chosen by a hash.

    A partly trained model mostly makes such mistakes; other wrong digits would train on answers
    that it does not give.
    """
    steps = notation.steps(problem)
    right, symbols = steps[-1], "<>=" if problem.operation == "compare" else "0123456789"
    key = f"{seed}/wrong/{problem.canonical()}".encode()
    draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    place, turn = draw % len(right), 1 if draw // len(right) % 2 else -1
    symbol = symbols[(symbols.index(right[place]) + turn) % len(symbols)]
    wrong = right[:place] + symbol + right[place + 1 :]
    return PreferenceRow(
        prompt=(Message("user", notation.prompt(problem)),),
        chosen=STEP_DELIMITER.join(steps),
        rejected=STEP_DELIMITER.join([*steps[:-1], wrong]),
        data_source=f"arithmetic/{problem.operation}",
    )
