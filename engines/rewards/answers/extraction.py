"""Extract the final answer of a completion.

Each function returns the text of the last answer of its form, or None, in linear time.
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal

Extraction = Literal["any", "boxed", "hash", "answer", "last_number"]

ANSWER = "pred"
"""Key of the extracted answer in a reward function's result, as in verl's `math_dapo`."""

_BOX = re.compile(r"\\(boxed|fbox)\s*(\{)?")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<![^\W_])(?<![)\]}])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, or of the last `\fbox{...}` if none is boxed.

    Braces are balanced; escaped ones are text. `\boxed 5$` holds the text up to the dollar sign or
    the end of the line. None: there is no box, or the last one is not closed.
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
    """Return the rest of the line behind the last `####`; None if it is empty."""
    _, found, rest = text.rpartition("####")
    return rest.split("\n", 1)[0].strip() or None if found else None


def after_answer(text: str) -> str | None:
    """Return the rest of the line behind the last `Answer:`, in any case; None if it is empty."""
    found = _ANSWER.findall(text)
    return found[-1].strip() or None if found else None


def last_number(text: str) -> str | None:
    """Return the last decimal number, with commas between groups of three digits.

    A minus behind a letter, a digit or a closing bracket is a subtraction: 5 for `10-5`.
    """
    found = _NUMBER.findall(text)
    return found[-1] if found else None


EXTRACTIONS: Mapping[Extraction, Callable[[str], str | None]] = {
    "boxed": boxed,
    "hash": after_hash,
    "answer": after_answer,
    "last_number": last_number,
}
"""By name; `any` is not here, since it combines several forms."""


def truth_text(ground_truth: object) -> str:
    """Return a ground truth as stripped text; ValueError if it is empty or no text or number."""
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float):
        kind = type(ground_truth).__name__
        raise ValueError(f"the ground truth is a {kind}; need text or a number")
    text = str(ground_truth).strip()
    if not text:
        raise ValueError("the ground truth is empty")
    return text
