r"""Where the final answer of a completion stands.

Promises: each function gives the text of the last answer of its form, or None; any text is taken,
in time that grows with its length only.
Does not promise: that what it finds is mathematics.
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal

Extraction = Literal["any", "boxed", "hash", "answer", "last_number"]

ANSWER = "pred"
"""Key of the answer in what a reward function returns, as in verl's `math_dapo`."""

_BOX = re.compile(r"\\(boxed|fbox)\s*(\{)?")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<![^\W_])(?<![)\]}])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, or in the last `\fbox{...}` where none is boxed.

    Braces are balanced, and one behind a backslash is text. `\boxed 5$` holds what comes before
    the dollar or the end of the line.

    Args:
        text: of a completion.

    Returns:
        The content, or None: there is no box, or the last one is never closed.
    """
    boxes = list(_BOX.finditer(text))
    last = next((box for box in reversed(boxes) if box[1] == "boxed"), boxes[-1] if boxes else None)
    if last is None:
        return None
    if last[2] is None:
        return re.split(r"[$\n]", text[last.end() :], maxsplit=1)[0]
    depth = 1
    for brace in _BRACE.finditer(text, last.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[last.end() : brace.start()]
    return None


def after_hash(text: str) -> str | None:
    """The rest of the line behind the last `####`; None where that is nothing."""
    _, found, rest = text.rpartition("####")
    return rest.split("\n", 1)[0].strip() or None if found else None


def after_answer(text: str) -> str | None:
    """The rest of the line behind the last `Answer:`, in any case; None where that is nothing."""
    found = _ANSWER.findall(text)
    return found[-1].strip() or None if found else None


def last_number(text: str) -> str | None:
    """The last decimal number; commas between groups of three digits belong to it.

    A minus behind a letter, a digit or a closing bracket is that of a subtraction: 5 of `10-5`.
    """
    found = _NUMBER.findall(text)
    return found[-1] if found else None


EXTRACTIONS: Mapping[Extraction, Callable[[str], str | None]] = {
    "boxed": boxed,
    "hash": after_hash,
    "answer": after_answer,
    "last_number": last_number,
}
"""By name; `any` has no one place."""


def truth_text(ground_truth: object) -> str:
    """A ground truth as text.

    Args:
        ground_truth: text or a number.

    Returns:
        Without white space at its ends.

    Raises:
        ValueError: it is empty or of another type.
    """
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float):
        kind = type(ground_truth).__name__
        raise ValueError(f"the ground truth is a {kind}; need text or a number")
    text = str(ground_truth).strip()
    if not text:
        raise ValueError("the ground truth is empty")
    return text
