r"""Rewards that compare texts by simple rules, without a parser of mathematics.

    exact        the answer equals the ground truth, with white space collapsed
    format       a completion has the required form, independent of its content
    length       shorter completions earn more; see also `rl.algorithm.overlong`
    gsm8k        verl's rule for `openai/gsm8k`, which compares the number as text
    math_boxed   verl's rule for MATH: the last `\boxed{}` in that data set's normal form
    math_dapo    DAPO's rule (arXiv:2503.14476), with scores 1 and -1

Promises verl's scores for the last three, including their strictness: for `gsm8k`, `#### 5.` is
not 5, and the flexible last number of `10-5` is -5; reward `math` accepts equal numbers in other
spellings. Exception in `math_boxed`: the last `\boxed` precedes every `\fbox`, and a brace behind
a backslash closes no box.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from engines.rewards.answers.extraction import (
    ANSWER,
    after_answer,
    boxed,
    math_form,
    minerva_form,
    truth_text,
)
from engines.rewards.base import ScoreRequest


def exact(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    answer_delimiter: str | None = None,
    ignore_case: bool = False,
) -> dict[str, Any]:
    """Return `score`, 1.0 or 0.0, and `pred`, the text that was compared.

    `ground_truth` may be a list of accepted answers. Options: see `ExactOptions`.

    Raises:
        ValueError: the ground truth is empty or of another type.
    """
    delimiter = answer_delimiter or (extra_info or {}).get("answer_delimiter")
    answer = solution_str.rpartition(delimiter)[2] if delimiter else solution_str
    accepted = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    texts = [" ".join(truth_text(truth).split()) for truth in accepted]
    if not texts:
        raise ValueError("the ground truth is empty")
    given = " ".join(answer.split())
    if ignore_case:
        given, texts = given.casefold(), [text.casefold() for text in texts]
    return {"score": float(given in texts), ANSWER: given}


def required_form(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    tags: Sequence[str] = ("think", "answer"),
    pattern: str | None = None,
) -> float:
    """Return 1.0 if the completion has the form of `FormatOptions`, else 0.0."""
    text = solution_str.strip()
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    if any(text.count(mark) != 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")):
        return 0.0
    for tag in tags:
        content, closed, rest = text.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not (text.startswith(f"<{tag}>") and closed and content.strip()):
            return 0.0
        text = rest.lstrip()
    return float(not text)


def length(
    sample: ScoreRequest,
    *,
    max_tokens: int,
    free_tokens: int = 0,
    shape: Literal["linear", "cosine"] = "linear",
) -> float:
    """Return 1.0 up to `free_tokens`, 0.0 from `max_tokens` on; ValueError without tokens."""
    if sample.tokens is None:
        raise ValueError("the sample has no tokens; need a completion that was sampled")
    excess = len(sample.tokens.token_ids) - free_tokens
    share = min(1.0, max(0.0, excess / (max_tokens - free_tokens)))
    return 1.0 - share if shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))


_NUM_CHARACTERS = 300
"""Only this many last characters are searched."""


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """Return `score` (0 without a number), `acc` (1.0 or 0.0) and `pred`, the number.

    Options: see `Gsm8kOptions`.

    Raises:
        ValueError: the ground truth is empty or of another type.
    """
    truth = truth_text(ground_truth)
    text, answer = solution_str[-_NUM_CHARACTERS:], None
    if method == "flexible":
        found = [each for each in re.findall(r"-?[0-9.,]+", text) if each != "."]
        answer = found[-1] if found else None
    elif found := re.findall(r"#### (-?[0-9.,]+)", text):
        answer = found[-1].replace(",", "")
    if answer is None:
        return {"score": 0.0, "acc": 0.0, ANSWER: None}
    right = answer == truth
    return {"score": score if right else format_score, "acc": float(right), ANSWER: answer}


def math_boxed(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `score`, 1.0 or 0.0, and `pred`, the normal form of the boxed answer.

    Raises:
        ValueError: the ground truth is empty or of another type.
    """
    truth, answer = math_form(truth_text(ground_truth)), boxed(solution_str)
    form = None if answer is None else math_form(answer)
    return {"score": float(form == truth), ANSWER: form}


_NUM_CHARACTERS_BOXED = 100


def math_dapo(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    strict_box_verify: bool = False,
) -> dict[str, Any]:
    """Return `score` (1.0 or -1.0), `acc` (1.0 or 0.0) and `pred`, the form that was compared.

    Options: see `MathDapoOptions`.

    Raises:
        ValueError: the ground truth is empty or of another type.
    """
    truth = truth_text(ground_truth)
    if strict_box_verify:
        form = boxed(solution_str[-_NUM_CHARACTERS_BOXED:])
    else:
        answer = after_answer(solution_str[-_NUM_CHARACTERS:])
        form = None if answer is None else minerva_form(answer)
        truth = minerva_form(truth)
    right = form == truth
    return {"score": 1.0 if right else -1.0, "acc": float(right), ANSWER: form}
