"""Checks the models, data and rewards that a recipe names, before anything trains.

`python -m engines.jobs.preflight.run` reads a `PreflightRequest` as JSON from standard input and
writes a `PreflightAnswer` as one line of JSON. It reads headers of safetensors files, the tokenizer
and the first row of each local source, calls a user's reward once in its own process, and resolves
the hub revisions that the recipe names to commits.
Promises: no weight is read, torch is not imported; what it refuses would have ended the run later
with the same field named. Each repository and revision has one commit in the whole answer, so
tokenizer and weights, or the splits of one data set, cannot come from different commits.
Does not promise that later rows are valid.
"""

import sys
from typing import TypeVar

from engines.checkpoint.teacher import TEACHER_SECTION
from engines.config.base import local_path
from engines.config.data import SOURCE_SPLITS, DataConfig, SourceConfig
from engines.config.model import ModelConfig, NamedModelConfig
from engines.config.preflight_request import PreflightAnswer, PreflightRequest
from engines.config.suite import suite_sections
from engines.data.read.rows import RLRow
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.jobs.preflight.models import (
    checkpoint_bytes,
    look_at_against,
    look_at_answers,
    look_at_judge,
    look_at_policy,
    look_at_reward_model,
    look_at_teacher,
    look_at_training,
)
from engines.jobs.preflight.rows import (
    first_row,
    first_rows,
    look_at_images,
    look_at_prompt,
    look_at_reward,
    look_at_truths,
    show_images,
    without_truth,
)
from infra.errors import ConfigError
from infra.identity.hub import RepoType, hub_commit
from infra.names import renamed_sections

OnHub = TypeVar("OnHub", bound=ModelConfig | NamedModelConfig | SourceConfig)

_MODELS = {
    "model": "model",
    "against": "against",
    "reward_model": "rl.reward.model",
    "judge": "rl.reward.judge",
    "teacher": TEACHER_SECTION,
}
"""Section of a recipe for each model field of a `PreflightRequest`, for errors."""


def with_commits(at: PreflightRequest) -> PreflightRequest:
    """Return the request with a commit as the `revision` of every hub id.

    A ConfigError names the field that cannot be resolved.
    """
    hub = _Hub()
    found: dict[str, object] = {"data": hub.of_data(at.data, "data") if at.data else None}
    for name, section in _MODELS.items():
        model: ModelConfig | NamedModelConfig | None = getattr(at, name)
        found[name] = model and hub.resolved(model, "model", section)
    found["suites"] = {
        name: suite.model_copy(
            update={"data": suite.data and hub.of_data(suite.data, f"suites.{name}.data")}
        )
        for name, suite in at.suites.items()
    }
    return at.model_copy(update=found)


class _Hub:
    """Resolves each repository and revision once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, RepoType, str | None], str] = {}

    def resolved(self, config: OnHub, repo_type: RepoType, section: str) -> OnHub:
        """Return the configuration with a commit as revision; a local path stays as it is."""
        if config.path is None or local_path(config.path):
            return config
        key = (config.path, repo_type, config.revision)
        if key not in self._known:
            self._known[key] = hub_commit(*key, section)
        return config.model_copy(update={"revision": self._known[key]})

    def of_data(self, data: DataConfig, section: str) -> DataConfig:
        """Return the data configuration with commits for all sources."""
        sources = {
            split: tuple(
                self.resolved(source, "dataset", f"{section}.{split}.{place}")
                for place, source in enumerate(getattr(data, split))
            )
            for split in SOURCE_SPLITS
        }
        return data.model_copy(update=sources)


def check_request(at: PreflightRequest) -> PreflightRequest:
    """Return the request with hub commits and the checkpoint size, or raise a ConfigError."""
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
    at: PreflightRequest, data: DataConfig, section: str, tokenizer: DirectoryTokenizer | None
) -> RLRow | None:
    """Check the first rows of a recipe or a suite: template, images and ground truth.

    `section` is the data's configuration path. Returns a row with a prompt, or None if all data are
    on the hub.
    """
    rows = first_rows(data, section, tokenizer)
    look_at_images(at, show_images(data, rows, section))
    if at.scoring is not None:
        look_at_truths(at.scoring, without_truth(data, rows, section, at.scored))
    return first_row(data, rows)


def look_at_suites(
    at: PreflightRequest, tokenizer: DirectoryTokenizer | None, row: RLRow | None
) -> RLRow | None:
    """Check rows and rewards of the suites; return `row`, or a suite's row if that is None."""
    for name, suite in at.suites.items():
        if suite.data is None:
            continue
        sections = suite_sections(name)
        if suite.reward is None:
            of_suite = look_at_rows(at, suite.data, sections["data"], tokenizer)
        else:  # its own reward has functions only, no judges
            own = {"reward_model": None, "judge": None, "scoring": suite.reward}
            judged = at.model_copy(update=own)
            with renamed_sections({"rl.reward": sections["rl.reward"]}):
                of_suite = look_at_rows(judged, suite.data, sections["data"], tokenizer)
                look_at_reward(suite.reward, of_suite)
        row = row or of_suite
    return row


def main() -> int:
    """Read a request and write its answer."""
    try:
        request = PreflightRequest.model_validate_json(sys.stdin.read())
        answer = PreflightAnswer(found=check_request(request))
    except ConfigError as error:
        answer = PreflightAnswer(path=error.path, problem=error.problem)
    sys.stdout.write(answer.model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
