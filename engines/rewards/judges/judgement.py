"""Reward `judge`: the number in what a judge wrote of the answer, before this was asked.

Promises: without a pattern of the recipe, the last number as people write ratings: `7/10` and
`7 out of 10` are 7, `1e-3` and `1,000` are numbers, those of `a scale of 1 to 10` do not count; a
range (`4-5`), a whole without its part (`seven out of 10`) and a comma that may be a decimal one
(`7,5`) are no number, for to guess would pay the policy for it.
Does not promise: to tell a rating from another number that comes after it.
"""

import re

from engines.rewards.base import ScoreRequest

_NUMBER = r"[-+\u2212]?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_MARKS = r"[ \t*_`$)\]}]*"
"""What may stand between a number and what belongs to it: blanks, Markdown, ends of LaTeX."""
_OPENINGS = r"[ \t*_`$(\[{]*"
_ARTICLES = r"(?:[ ]+(?:the|an?|of|all|possible|maximum|max|total|at[ ]most))*"
"""What may stand in front of a whole: `7 out of a possible 10`."""
_TO = rf"{_MARKS}(?:[-\u2010-\u2014~]|\bto\b){_OPENINGS}{_NUMBER}"
_WORDS = "out|zero|one|two|three|four|five|six|seven|eight|nine|ten"
_RATING = re.compile(
    rf"(?P<scale>\bscale[ ]+(?:(?:of|from|is)[ ]+)?{_NUMBER}(?:{_TO})?)"
    # No number begins inside of a word or of another number.
    rf"|(?<![^\W_])(?<!\d\.)(?P<number>{_NUMBER})(?P<range>(?:{_TO})+)?"
    rf"(?:{_MARKS}(?:/|\b(?:out[ ]+)?of\b){_ARTICLES}{_OPENINGS}{_NUMBER})?"
    rf"|(?:/|\b(?:{_WORDS})[ ]+of\b){_ARTICLES}{_OPENINGS}{_NUMBER}",
    re.IGNORECASE,
)
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?![\d,])")


def last_rating(text: str) -> float | None:
    """The last number that a judge wrote.

    Args:
        text: the judgement.

    Returns:
        The number; None where there is none, or the last one may be read as two.
    """
    found = [each for each in _RATING.finditer(text) if not each["scale"]]
    last = found[-1] if found else None
    if last is None or last["number"] is None or last["range"]:
        return None
    number = last["number"].replace("\u2212", "-")
    if "," in number and not _GROUPED.match(number):
        return None
    return float(number.replace(",", ""))


def score(
    sample: ScoreRequest,
    *,
    pattern: str | None = None,
    scale: float = 1.0,
    threshold: float = 0.5,
) -> dict[str, float]:
    """The last number that a judge wrote.

    Args:
        sample: with `judgement`.
        pattern: a regular expression whose first group is the number, as Python writes it; its
            last match counts. None reads as `last_rating` does.
        scale: the score is the number times it.
        threshold: a larger score counts as a right answer.

    Returns:
        `score`, and `acc` of 1 or 0.

    Raises:
        ValueError: the judge came to no end, or wrote no number that is read.
    """
    if sample.judgement is None:
        raise ValueError(
            "the judge came to no end within rl.reward.judge: max_length, sampling.max_new_tokens"
        )
    if pattern is None:
        number = last_rating(sample.judgement)
    else:
        matches = list(re.finditer(pattern, sample.judgement))
        number = float(matches[-1][1] or "") if matches else None
    if number is None:
        what = "one number at its end" if pattern is None else "what pattern finds"
        raise ValueError(f"the judge wrote {sample.judgement!r}, without {what}")
    value = number * scale
    return {"score": value, "acc": float(value > threshold)}
