"""What a judge is asked: the user's Jinja text with an answer in it."""

from collections.abc import Sequence

from engines.data.read.chat_template import render_text
from engines.data.read.rows import Message
from engines.rewards.base import ScoreRequest


def question(template: str, prompt: Sequence[Message], sample: ScoreRequest) -> str:
    """The user's message to a judge.

    Args:
        template: `rl.reward.judge.prompt`.
        prompt: messages that the policy answered.
        sample: the answer, and what its row says.

    Returns:
        The text.

    Raises:
        ConfigError: the template does not compile or fails; names the line.
    """
    values = {
        "question": prompt[-1].content,
        "answer": sample.solution_str,
        "ground_truth": sample.ground_truth,
        "data_source": sample.data_source,
        "extra_info": sample.extra_info,
    }
    return render_text(template, values, "rl.reward.judge.prompt")
