"""Reward `exact`: 1 if the answer equals the ground truth as text, with white space collapsed."""

from collections.abc import Mapping
from typing import Any

from engines.rewards.answers.extraction import ANSWER, truth_text


def compute_score(
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
    texts = [_text(truth) for truth in accepted]
    if not texts:
        raise ValueError("the ground truth is empty")
    given = " ".join(answer.split())
    if ignore_case:
        given, texts = given.casefold(), [text.casefold() for text in texts]
    return {"score": float(given in texts), ANSWER: given}


def _text(truth: object) -> str:
    return " ".join(truth_text(truth).split())
