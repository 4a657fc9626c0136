"""Extract the final answer of a completion.

Each function returns the text of the last answer of its form, or None, in linear time.

Normal forms of answers, so that equal answers become equal texts; verl's for both data sets.

`math_form` is the rule of the MATH data set (Hendrycks et al., arXiv:2103.03874), `minerva_form`
that of Minerva (Lewkowycz et al., arXiv:2206.14858, appendix D.1), which DAPO uses.
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


_MATH_REMOVED = (
    "\n", r"\!", r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$", r"\%",
)  # fmt: skip
_INTEGER = r"(0|-?[1-9]\d*)"

_MINERVA_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
_MINERVA_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots",
    "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds",
    "meters", "meals", "edges", "students", "childrentickets", "multiples", r"\text{s}",
    r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}",
    r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
"""Applied in this order: units, then what their removal leaves of a text."""
_MINERVA_PATTERNS = (
    # The first formula replaces the line that contains it.
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    (r"(\\text\{)(.*?)(\})", r"\2"),
    (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    # \frac12 and \sqrt3 get their braces.
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


def math_form(text: str) -> str:
    r"""Return the form by which MATH's answers are compared.

    Removes units behind `\text{ `, degrees, escaped percent and dollar signs, `\left`/`\right` and
    white space; completes `\frac12`, `a/b` and `.5`; keeps the 5 of `x = 5`. An answer with two
    units is returned unchanged.
    """
    form = text.replace(r"\\", "\\")
    for removed in _MATH_REMOVED:
        form = form.replace(removed, "")
    form = form.replace("tfrac", "frac").replace("dfrac", "frac")
    form, *units = form.split(r"\text{ ")
    if len(units) > 1:
        return text
    form = form.replace(" .", " 0.").replace("{.", "{0.")
    form = f"0{form}" if form.startswith(".") else form
    left, equals, right = form.partition("=")
    if equals and len(left) <= 2 and "=" not in right:
        form = right
    form = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", form).replace(" ", "")
    form = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", form)
    form = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", form)
    if form == "0.5":
        return r"\frac{1}{2}"
    return re.sub(rf"\A{_INTEGER}/{_INTEGER}\Z", r"\\frac{\1}{\2}", form)


def minerva_form(text: str) -> str:
    """Return the form by which Minerva and DAPO compare; for texts of some hundred characters."""
    form = text.split("=")[-1]
    for before, after in _MINERVA_REPLACED:
        form = form.replace(before, after)
    for removed in _MINERVA_REMOVED:
        form = form.replace(removed, "")
    for pattern, after in _MINERVA_PATTERNS:
        form = re.sub(pattern, after, form)
    form = form.replace("$", "")
    digits = form.replace(",", "")
    return (digits if digits.isdigit() else form).strip()
