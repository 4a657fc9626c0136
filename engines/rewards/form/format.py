"""Reward `format`: whether a completion has the asked form, whatever it says.

Promises: 1 or 0 by a pattern that the whole completion has to match, or by tags that have to come
once each, in their order, with text in each.
Does not promise: an end to a pattern that backtracks for ever; the sample's deadline is that.
"""

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
    """Judge the form of a completion.

    Args:
        data_source: not used.
        solution_str: the completion.
        ground_truth: not used.
        extra_info: not used.
        tags: `<tag>text</tag>` of each, in this order, with white space alone around them.
        pattern: a regular expression (`.` is any character) in the place of the tags.

    Returns:
        1.0 or 0.0.
    """
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
