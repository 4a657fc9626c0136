"""Run tasks of lm-evaluation-harness by its API (`lm_eval.simple_evaluate`).

Promises: nothing is cached as a pickle, no code of a data set is run, and a task that the harness
marks as unsafe is refused. Python functions of the user's own tasks are run, like a reward file.
Does not promise reproducible data: the harness fetches a hub's data sets without a commit.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from numbers import Real
from pathlib import Path
from statistics import NormalDist
from typing import Any

from datasets.exceptions import DatasetsError
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from engines.config.suite import HarnessConfig
from engines.trainers.evaluation.documents import Document, metric_name
from engines.trainers.evaluation.harness.model import HarnessModel
from infra import env
from infra.errors import ConfigError

_STDERR = "_stderr"


@dataclass(frozen=True)
class Measurement:
    """Results of the harness.

    `metrics` are finite, by `metric_name`, with `_low` and `_high` if there is a standard error.
    `tasks` has version, numbers of examples and documents, and metric directions.
    """

    metrics: dict[str, float]
    tasks: dict[str, Any]
    documents: tuple[Document, ...]


class _Tasks(TaskManager):
    """The harness's and the user's tasks; paths in the user's are relative to `include`."""

    def __init__(self, include: Path | None, section: str) -> None:
        super().__init__(include_path=None if include is None else str(include))
        self._include, self._setting = include, f"{section}.tasks"

    def load(self, task_list: Any) -> Any:
        """Build tasks and read their data; `ConfigError` if a task, library or data is missing."""
        known = set(self.all_tasks)
        for name in task_list:
            if name not in known:
                near = ", ".join(get_close_matches(name, sorted(known))) or "none"
                raise ConfigError(
                    self._setting,
                    f"no {name!r}; nearest: {near}; need a task, group or tag of the harness or of "
                    "include; `.envs/lm-eval/bin/lm_eval ls tasks` lists its own",
                )
        with contextlib.chdir(self._include or Path.cwd()):
            try:
                return super().load(task_list)
            except (OSError, DatasetsError, ImportError) as error:
                told = " ".join(str(error).split())
                raise ConfigError(
                    self._setting,
                    f"got {', '.join(task_list)}, which cannot be loaded ({type(error).__name__}: "
                    f"{told}); need its data, from the hub or a cache (HF_HOME); fetch it, or "
                    "leave the task out",
                ) from error


def run_tasks(
    config: HarnessConfig,
    model: HarnessModel,
    include: Path | None,
    seed: int,
    confidence: float,
    section: str,
) -> Measurement:
    """Ask a model everything and compute the metrics, with two-sided intervals.

    `seed` is not for few-shot examples. Raises `ConfigError` if a task cannot be loaded or asked.
    """
    if config.apply_chat_template and not model.tokenizer.chat_template:
        raise ConfigError(
            "model.chat_template",
            f"missing, and {section}.apply_chat_template is on; set one, or switch it off",
        )
    # Otherwise bootstraps fork a process pool from a process with torch threads.
    env.set_for_process(env.DISABLE_MULTIPROC.name, "1")
    found = simple_evaluate(
        model=model,
        tasks=[*config.tasks],
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        bootstrap_iters=config.bootstrap_iters,
        system_instruction=config.system_instruction,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=config.fewshot_as_multiturn,
        task_manager=_Tasks(include, section),
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=config.fewshot_seed,
    )
    return Measurement(
        _metrics(found, confidence),
        {
            name: {
                "version": str(found["versions"].get(name)),
                "num_fewshot": found["n-shot"].get(name),
                "num_documents": counts["effective"],
                "higher_is_better": found["higher_is_better"].get(name),
            }
            for name, counts in found["n-samples"].items()
        },
        tuple(_documents(found["samples"])),
    )


def _metrics(found: Mapping[str, Any], confidence: float) -> dict[str, float]:
    """Return metrics by name, with normal intervals if the harness gives a standard error."""
    width = NormalDist().inv_cdf((1 + confidence) / 2)
    num_documents = sum(counts["effective"] for counts in found["n-samples"].values())
    metrics = {"num_problems": float(num_documents)}
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith(_STDERR) or not _is_number(value):
                continue
            name = metric_name(task, metric, filter_name)
            metrics[name] = float(value)
            error = values.get(f"{metric}{_STDERR},{filter_name}")
            if _is_number(error):
                metrics[f"{name}_low"] = float(value - width * error)
                metrics[f"{name}_high"] = float(value + width * error)
    return metrics


def _documents(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Document]:
    for task, rows in sorted(samples.items()):
        for row in rows:
            metrics = {
                metric_name(task, name, row["filter"]): float(row[name])
                for name in row["metrics"]
                if _is_number(row[name])
            }
            yield Document(
                task=task,
                filter=row["filter"],
                index=row["doc_id"],
                digest=row["doc_hash"],
                document=_json(row["doc"]),
                target=row["target"] if isinstance(row["target"], str) else _json(row["target"]),
                requests=tuple(_json(each) for each in row["arguments"]),
                responses=tuple(_json(each) for each in row["resps"]),
                metrics=metrics,
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and isfinite(value)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
