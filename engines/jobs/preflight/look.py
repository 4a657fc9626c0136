"""A look at what a recipe names, before anything trains.

Called as `python -m engines.jobs.preflight.look < LOOK`. Reads a `Look` as JSON and answers with
one JSON line: the first problem, or none. It opens the headers of safetensors files, the first row
of each local source and the tokenizer, and calls a reward of the user's once with that row, in a
process of its own.
Promises: no weight is read, torch is not imported; what it refuses would have ended the run later,
with the same field named. Does not promise that the rest of the rows is as good as the first.
"""

import sys

from engines.config.data import DataConfig
from engines.config.look import Answer, Look
from engines.config.suite import suite_sections
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.jobs.preflight.commits import with_commits
from engines.jobs.preflight.engine_support import look_at_training
from engines.jobs.preflight.images import look_at_images
from engines.jobs.preflight.models import checkpoint_bytes, look_at_answers, look_at_policy
from engines.jobs.preflight.other_models import (
    look_at_against,
    look_at_judge,
    look_at_reward_model,
    look_at_teacher,
)
from engines.jobs.preflight.reward import look_at_reward, look_at_truths
from engines.jobs.preflight.rows import (
    first_row,
    first_rows,
    look_at_prompt,
    show_images,
    without_truth,
)
from infra.errors import ConfigError
from infra.section_names import renamed_sections


def look(at: Look) -> Look:
    """Refuse what could not be trained on.

    Args:
        at: what the recipe names.

    Returns:
        The same, with the commit of everything on the hub, and the size of a checkpoint.

    Raises:
        ConfigError: names the field and what to do.
    """
    tokenizer, of_other = look_at_policy(at), look_at_against(at)
    row = look_at_rows(at, at.data, "data", tokenizer) if at.data else None
    if of_other is not None and row is not None:
        with renamed_sections({"model": "against"}):
            look_at_prompt(row, of_other)
    row = look_at_suites(at, tokenizer, row)
    look_at_answers(at)
    if at.trains_values:
        look_at_training(at.model.path, at.training, values=True)
    if at.reward_model is not None:
        look_at_reward_model(at.reward_model, at.reward_training, row)
    if at.judge is not None:
        look_at_judge(at.judge, at.rollout_engine, row)
    if at.teacher is not None:
        look_at_teacher(at.teacher, at.training, at.model, at.rollout_engine)
    if at.reward is not None:
        look_at_reward(at.reward, row)
    found = with_commits(at)
    return found.model_copy(update={"checkpoint_bytes": checkpoint_bytes(at)})


def look_at_rows(
    at: Look, data: DataConfig, section: str, tokenizer: DirectoryTokenizer | None
) -> RLRow | None:
    """Check the first rows of a recipe or a suite, who sees their images, and their ground truth.

    Args:
        at: what the recipe names.
        data: of it, or of a suite.
        section: of the data, for errors.
        tokenizer: of the model; None looks at no template.

    Returns:
        A row with a prompt; None if all of the data is on the hub.

    Raises:
        ConfigError: names the setting.
    """
    rows = first_rows(data, section, tokenizer)
    look_at_images(at, show_images(data, rows, section))
    if at.scoring is not None:
        look_at_truths(at.scoring, without_truth(data, rows, section, at.scored))
    return first_row(data, rows)


def look_at_suites(
    at: Look, tokenizer: DirectoryTokenizer | None, row: RLRow | None
) -> RLRow | None:
    """Check the rows and rewards of the suites that have rows.

    Args:
        at: what the recipe names.
        tokenizer: of the model; None looks at no template.
        row: of the recipe's own data.

    Returns:
        That row; without it, one of a suite.

    Raises:
        ConfigError: names the setting below `suites`.
    """
    for name, suite in at.suites.items():
        if suite.data is None:
            continue
        sections = suite_sections(name)
        if suite.reward is None:
            of_suite = look_at_rows(at, suite.data, sections["data"], tokenizer)
        else:  # of its own: one of functions, whoever judges
            own = {"reward_model": None, "judge": None, "scoring": suite.reward}
            judged = at.model_copy(update=own)
            with renamed_sections({"rl.reward": sections["rl.reward"]}):
                of_suite = look_at_rows(judged, suite.data, sections["data"], tokenizer)
                look_at_reward(suite.reward, of_suite)
        row = row or of_suite
    return row


def main() -> int:
    """Answer one look."""
    try:
        answer = Answer(look=look(Look.model_validate_json(sys.stdin.read())))
    except ConfigError as error:
        answer = Answer(path=error.path, problem=error.problem)
    sys.stdout.write(answer.model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
