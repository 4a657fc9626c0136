"""Rewards that read what a model said about an answer, and the question to a judge.

`judge_score` is reward `judge`: the number in the text that a judge wrote. Without a pattern it is
the last number as people write ratings: `7/10` and `7 out of 10` are 7, `1e-3` and `1,000` are
numbers, `a scale of 1 to 10` is ignored. A range (`4-5`), a whole without a number before it
(`seven out of 10`) and an ambiguous comma (`7,5`) give no number, since a guess would reward the
policy. A number after the rating is mistaken for the rating.

`model_score` is reward `model`: the score that the role `reward` gave before the call.
"""

import re
from collections.abc import Sequence

from engines.data.read.chat import render_text
from engines.data.read.rows import Message
from engines.rewards.base import ScoreRequest

_NUMBER = r"[-+\u2212]?(?:\d+(?:,\d+)*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_MARKS = r"[ \t*_`$)\]}]*"
"""Allowed between a number and its continuation: blanks, Markdown, closing LaTeX."""
_OPENINGS = r"[ \t*_`$(\[{]*"
_ARTICLES = r"(?:[ ]+(?:the|an?|of|all|possible|maximum|max|total|at[ ]most))*"
"""Words allowed before the whole, as in `7 out of a possible 10`."""
_TO = rf"{_MARKS}(?:[-\u2010-\u2014~]|\bto\b){_OPENINGS}{_NUMBER}"
_WORDS = "out|zero|one|two|three|four|five|six|seven|eight|nine|ten"
_RATING = re.compile(
    rf"(?P<scale>\bscale[ ]+(?:(?:of|from|is)[ ]+)?{_NUMBER}(?:{_TO})?)"
    # No number begins inside a word or another number.
    rf"|(?<![^\W_])(?<!\d\.)(?P<number>{_NUMBER})(?P<range>(?:{_TO})+)?"
    rf"(?:{_MARKS}(?:/|\b(?:out[ ]+)?of\b){_ARTICLES}{_OPENINGS}{_NUMBER})?"
    rf"|(?:/|\b(?:{_WORDS})[ ]+of\b){_ARTICLES}{_OPENINGS}{_NUMBER}",
    re.IGNORECASE,
)


def last_rating(text: str) -> float | None:
    """Return the last number of a judgement; None if there is none or it is ambiguous."""
    found = [each for each in _RATING.finditer(text) if not each["scale"]]
    last = found[-1] if found else None
    if last is None or last["number"] is None or last["range"]:
        return None
    number = last["number"].replace("\u2212", "-")
    if "," in number and not re.match(r"[-+]?\d{1,3}(?:,\d{3})+(?![\d,])", number):
        return None
    return float(number.replace(",", ""))


def judge_score(
    sample: ScoreRequest,
    *,
    pattern: str | None = None,
    scale: float = 1.0,
    threshold: float = 0.5,
) -> dict[str, float]:
    """Return `score`, the judge's number times `scale`, and `acc`, 1 or 0. See `JudgeOptions`.

    Raises:
        ValueError: the judge did not finish, or wrote no number that can be read.
    """
    if sample.judgement is None:
        raise ValueError(
            "the judge did not finish; raise rl.reward.judge.max_length or its "
            "sampling.max_new_tokens"
        )
    if pattern is None:
        number = last_rating(sample.judgement)
    else:
        matches = list(re.finditer(pattern, sample.judgement))
        number = float(matches[-1][1] or "") if matches else None
    if number is None:
        what = "an unambiguous last number" if pattern is None else "a match of pattern"
        raise ValueError(f"the judge wrote {sample.judgement!r}, without {what}")
    return {"score": number * scale, "acc": float(number * scale > threshold)}


def model_score(sample: ScoreRequest, *, threshold: float = 0.0) -> dict[str, float]:
    """Return the reward model's number as `score`, and `acc`, 1 or 0.

    Choose `threshold` from observed scores: those of a model trained on pairs have no fixed zero.

    Raises:
        ValueError: the model did not read the answer.
    """
    if sample.model_score is None:
        raise ValueError("the conversation is longer than rl.reward.model.max_length; raise it")
    return {"score": sample.model_score, "acc": float(sample.model_score > threshold)}


def question(template: str, prompt: Sequence[Message], sample: ScoreRequest) -> str:
    """Return the user's message to a judge; ConfigError names a wrong line of the template."""
    values = {
        "question": prompt[-1].content,
        "answer": sample.solution_str,
        "ground_truth": sample.ground_truth,
        "data_source": sample.data_source,
        "extra_info": sample.extra_info,
    }
    return render_text(template, values, "rl.reward.judge.prompt")
