r"""Extraction and normal forms of final answers, and the rewards that compare texts by them.

    exact        the answer equals the ground truth, with white space collapsed
    format       a completion has the required form, independent of its content
    length       shorter completions earn more; see also `rl.algorithm.overlong`
    gsm8k        verl's rule for `openai/gsm8k`, which compares the number as text
    math_boxed   verl's rule for MATH: the last `\boxed{}` in that data set's normal form
    math_dapo    DAPO's rule (arXiv:2503.14476), with scores 1 and -1

An extraction returns the text of the last answer of its form, or None, in linear time. Answers with
equal normal forms count as equal: `math_form` is the rule of the MATH data set (Hendrycks et al.,
arXiv:2103.03874), `minerva_form` that of Minerva (Lewkowycz et al., arXiv:2206.14858, appendix
D.1), which DAPO uses.
Promises verl's scores for the last three, including their strictness: for `gsm8k`, `#### 5.`
is not 5, and the flexible last number of `10-5` is -5; reward `math` accepts equal numbers in other
spellings. Exception in `math_boxed`: a `\fbox` counts only without any `\boxed`, and a brace after
a backslash closes no box.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from engines.rewards.base import ANSWER, ScoreRequest

Extraction = Literal["any", "boxed", "hash", "answer", "last_number"]

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<![^\W_])(?<![)\]}])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")


def boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, or of the last `\fbox{...}` if none is boxed.

    Braces are balanced; escaped ones are text. `\boxed 5$` holds the text up to the dollar sign or
    the end of the line. None: there is no box, or the last one is not closed.
    """
    boxes = list(re.finditer(r"\\(boxed|fbox)\s*(\{)?", text))
    last = next((box for box in reversed(boxes) if box[1] == "boxed"), boxes[-1] if boxes else None)
    if last is None:
        return None
    if last[2] is None:
        return re.split(r"[$\n]", text[last.end() :], maxsplit=1)[0]
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, last.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[last.end() : brace.start()]
    return None


def after_hash(text: str) -> str | None:
    """Return the rest of the line after the last `####`; None if it is empty."""
    _, found, rest = text.rpartition("####")
    return rest.split("\n", 1)[0].strip() or None if found else None


def after_answer(text: str) -> str | None:
    """Return the rest of the line after the last `Answer:`, in any case; None if it is empty."""
    found = _ANSWER.findall(text)
    return found[-1].strip() or None if found else None


def last_number(text: str) -> str | None:
    """Return the last decimal number, with commas between groups of three digits.

    A minus after a letter, a digit or a closing bracket is a subtraction: 5 for `10-5`.
    """
    found = _NUMBER.findall(text)
    return found[-1] if found else None


EXTRACTIONS: Mapping[Extraction, Callable[[str], str | None]] = {
    "boxed": boxed,
    "hash": after_hash,
    "answer": after_answer,
    "last_number": last_number,
}
"""Extractions by name; `any` is not here, since it combines several forms."""


def truth_text(ground_truth: object) -> str:
    """Return a ground truth as stripped text; ValueError if it is empty or no text or number."""
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float):
        raise ValueError(
            f"the ground truth is a {type(ground_truth).__name__}; need text or a number"
        )
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

    Removes units after `\text{ `, degrees, escaped percent and dollar signs, `\left`/`\right` and
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
        form = boxed(solution_str[-100:])
    else:
        answer = after_answer(solution_str[-_NUM_CHARACTERS:])
        form = None if answer is None else minerva_form(answer)
        truth = minerva_form(truth)
    right = form == truth
    return {"score": 1.0 if right else -1.0, "acc": float(right), ANSWER: form}
