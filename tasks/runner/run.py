"""The request of a stage with its fingerprint, what runs it (`StageRunner`), and its result.

Promises: two requests have one fingerprint exactly if `StageRequest.identity` is the same: stage,
schema version, counted configuration, input digests, seed, reachable sources, chosen engine device
and vendor, libraries, named plugins and the imports of a user's scripts. Project code that a job
imports counts, except what `UNCOUNTED` lists with its reason.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from engines.config.plugins import PluginKind, named_rows
from engines.config.stages.base import StageConfig
from infra import env
from infra.frozen_model import FrozenModel
from infra.identity.fingerprint import (
    environment_digest,
    installed_libraries,
    outside_code,
    project_modules,
    source_closure,
    stage_identity,
)
from infra.identity.imported_code import SCRIPT_KIND, ImportedCode, imported_code, script_artifact
from infra.store.artifacts import external_artifact
from infra.store.canonical import sha256_json
from infra.store.stage_spec import Adoption, Artifact
from infra.tracking.comparison import BEFORE, GAIN, MARGIN, PAIR_ACCURACY, verdicts

UNCOUNTED: Mapping[str, str] = {
    "infra": "moves bytes that digests verify, starts processes, tells people",
    "engines.config.base": "what a configuration says counts by its values",
    "engines.config.stages": "the same; a stage more is no change of the others",
    "engines.config.rows": "tables of names; what a stage names of them counts",
    "engines.config.rules": "only refuses",
    "engines.config.backends": "a table of names; what a stage names of it counts",
    "engines.config.plugins": "a table of names; what a stage names of it counts",
    "engines.errors": "wording",
    "engines.jobs.process.runtime": "specification in, published artifact out",
    "engines.trainers.step_timer": "measures time",
    "hardware.detection": "chooses a platform",
    "hardware.platforms": "a table of names",
    "hardware.cpu_megatron": "counts for stages of that backend",
    "hardware.cpu_torchtitan": "counts for stages of that backend",
}
"""Modules and packages that cannot change a result, with the reason."""

COUNTED: Mapping[str, str] = {
    "infra.store.canonical": "writes files of artifacts",
    "infra.tracking.comparison": "says which of two models is better",
    "infra.tracking.promotion": "says whether a model beats the incumbent, and what it becomes",
}
"""Exceptions to `UNCOUNTED`, with the reason."""


def numeric_sources(roots: Sequence[str]) -> dict[str, str]:
    """Return sha256 by module that the `roots` reach and that can change a result, sorted.

    Read once per process; a job compares the files with these digests before it begins.
    """
    return dict(_closure(tuple(sorted(set(roots)))))


def _counts(module: str) -> bool:
    return module in COUNTED or not any(
        package in UNCOUNTED for package in accumulate(module.split("."), "{}.{}".format)
    )


_closure = cache(partial(source_closure, counts=_counts))
STAGE_SCHEMA_VERSION = 2
NUMERIC_DISTRIBUTIONS = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "peft",
    "megatron-core", "mbridge", "liger-kernel", "transformer-engine", "jinja2",
    "math-verify", "sympy", "latex2sympy2-extended", "pillow",
)  # fmt: skip
"""Libraries whose version can change what a job computes; Pillow because data may have images."""


@dataclass(frozen=True)
class StageRequest:
    """One stage to be run, before it is known whether its output exists.

    Attributes:
        given: artifacts of other stages, by input name of the job.
        then: a stage that only waits for this one's output; not part of the identity.
    """

    config: StageConfig
    given: Mapping[str, Artifact]
    seed: int
    then: "StageRequest | None" = None

    @cached_property
    def inputs(self) -> Mapping[str, Artifact]:
        """Given artifacts, and external inputs by their bytes; `ConfigError` if one is missing."""
        outside = {
            name: (script_artifact if source.is_script else external_artifact)(
                source.path, source.setting
            )
            for name, source in self.config.external_inputs(self.given.keys()).items()
        }
        return {**self.given, **outside}

    @cached_property
    def label(self) -> str:
        """Name of this stage within the run (`rl_round_3`)."""
        return self.config.label

    @cached_property
    def interpreter(self) -> Path | None:
        """Path of the Python that runs the job; None: this process's own."""
        return self.config.interpreter

    @cached_property
    def sources(self) -> dict[str, str]:
        """sha256 by module of project code and scripts' imports that can change the output."""
        used = [module for script in self._scripts for module in project_modules(script)]
        ours = numeric_sources([self.config.job_module, *self.config.plugin_modules(), *used])
        return {**ours, **self._imported.sources}

    @property
    def _scripts(self) -> list[Path]:
        return [Path(each.uri) for each in self.inputs.values() if each.kind == SCRIPT_KIND]

    @cached_property
    def _imported(self) -> ImportedCode:
        """Third-party code that scripts import; a job environment counts as a whole."""
        return imported_code(() if self.interpreter else self._scripts)

    @cached_property
    def libraries(self) -> dict[str, str | None]:
        """Versions by distribution that can change the job's output."""
        return installed_libraries(
            (*NUMERIC_DISTRIBUTIONS, *self._imported.distributions), self.interpreter
        )

    @property
    def rollout_libraries(self) -> dict[str, str | None]:
        """Library versions of a rollout environment; empty without one."""
        return installed_libraries((), self.config.rollout_interpreter)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the output."""
        config = self.config
        chosen = [env.RLHF_ENGINE_DEVICE.get(), env.RLHF_ENGINE_VENDOR.get()]
        # With the facts of the plugins' rows that can change numbers.
        targets = [row.counted for row in named_rows(config.plugins())]
        return stage_identity(
            stage=config.stage,
            schema_version=STAGE_SCHEMA_VERSION,
            config=config.identity_values(),
            inputs=self.inputs,
            seed=self.seed,
            sources_digest=sha256_json([targets, self.sources, *chosen]),
            environment_digest=environment_of(
                frozenset(config.plugins()),
                self.interpreter,
                config.rollout_interpreter,
                self._imported.distributions,
            ),
        )

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the identity."""
        return sha256_json(self.identity)


@cache
def environment_of(
    named: frozenset[tuple[PluginKind, str]],
    interpreter: Path | None,
    rollout_interpreter: Path | None = None,
    imported: tuple[str, ...] = (),
) -> str:
    """Return the digest of what is installed, cached per process.

    Args:
        named: kind and name of parts; an outside plugin counts only if it is named.
        interpreter: path of the Python that runs the job; None: this process's own.
        rollout_interpreter: path of the Python that runs rollout replicas; None: the job's.
    """
    job = environment_digest(
        (*NUMERIC_DISTRIBUTIONS, *imported), outside_code(named_rows(named)), interpreter
    )
    if rollout_interpreter is None:
        return job
    return sha256_json([job, environment_digest((), None, rollout_interpreter)])


def stage_request(
    config: StageConfig, seed: int, then: StageRequest | None = None, /, **given: Artifact | None
) -> StageRequest:
    """Build the request of a stage, with those of the `given` artifacts that it reads."""
    there = {name: artifact for name, artifact in given.items() if artifact is not None}
    return StageRequest(config, config.inputs(there), seed, then)


COUNT_METRICS = ("num_rows", "num_rl", "num_sft", "num_eval", "num_steps", "size_bytes")


def headline_metric(metrics: Mapping[str, float]) -> str:
    """Return a stage's most important metrics as short text; empty if no metric is known here."""
    if "promoted" in metrics:
        verdict = "promoted" if metrics["promoted"] else "not promoted"
        if "gain" not in metrics:
            return verdict
        return f"{verdict}, gain {metrics['gain']:+.3g}, chance {metrics['gain_margin']:.3g}"
    if found := verdicts(metrics):
        metric = "accuracy" if "accuracy" in found else next(iter(found))
        gain, margin = metrics[GAIN + metric], metrics[MARGIN + metric]
        return f"{metric} {gain:+.3g}, chance {margin:.3g}: {found[metric]}"
    if "accuracy" in metrics:
        return f"accuracy {metrics['accuracy']:.1%}"
    if PAIR_ACCURACY in metrics:
        start = metrics.get(BEFORE + PAIR_ACCURACY)
        was = f"{start:.1%} -> " if start is not None else ""
        return f"pair accuracy {was}{metrics[PAIR_ACCURACY]:.1%}"
    return next((f"{name} {metrics[name]:,.0f}" for name in COUNT_METRICS if metrics.get(name)), "")


class StageResult(FrozenModel):
    """Result of a finished stage."""

    label: str
    """Name of the stage within the run (`rl_round_2`)."""
    fingerprint: str
    artifact: Artifact
    reused: bool
    """True if the output existed before this run requested it."""
    wall_s: float
    """Seconds that this run spent on the stage, including the lookup."""
    metrics: dict[str, float]
    """Headline metrics from the commit record."""
    adopted: Adoption | None = None
    """Half-trained work of another fingerprint that the result continues."""
    job_seconds: dict[str, float]
    """Wall seconds of the job's phases, from the commit record."""

    @property
    def digest(self) -> str:
        """Digest of the output artifact."""
        return self.artifact.digest


class StageRunner(Protocol):
    """Runs stages, or only plans them."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """Seed of the run, from which all randomness of every stage derives."""

    @abstractmethod
    def run(self, request: StageRequest) -> StageResult:
        """Run one stage, or return its existing result."""


def run_stage(
    run: StageRunner,
    config: StageConfig,
    then: StageRequest | None = None,
    /,
    **given: Artifact | None,
) -> StageResult:
    """Run one stage with those of the given artifacts that it reads.

    Args:
        then: a stage that only waits for this one's output; the same job process runs it next.

    Raises:
        ValueError: an artifact is missing that the stage needs.
    """
    request = stage_request(config, run.seed, then, **given)
    absent = [name for name in config.needs if name not in request.given]
    if absent:
        raise ValueError(
            f"stage {config.label}: got the artifacts {sorted(request.given)}; "
            f"need {', '.join(absent)} too"
        )
    return run.run(request)
