"""Reward `format`: 1 if a completion has the required form, else 0, independent of its content."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

THINK_THEN_ANSWER = ("think", "answer")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    tags: Sequence[str] = THINK_THEN_ANSWER,
    pattern: str | None = None,
) -> float:
    """Return 1.0 if the completion has the form of `FormatOptions`, else 0.0."""
    del data_source, ground_truth, extra_info
    text = solution_str.strip()
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return 0.0
    for tag in tags:
        content, closed, rest = text.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not (text.startswith(f"<{tag}>") and closed and content.strip()):
            return 0.0
        text = rest.lstrip()
    return float(not text)
