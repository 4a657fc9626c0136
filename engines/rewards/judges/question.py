"""The question to a judge: the user's Jinja template with an answer filled in."""

from collections.abc import Sequence

from engines.data.read.chat_template import render_text
from engines.data.read.rows import Message
from engines.rewards.base import ScoreRequest


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
