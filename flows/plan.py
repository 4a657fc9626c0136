"""Plans a run: each stage with its fingerprint, and whether its output would be reused.

The fingerprint of a stage after one that is to run is unknown, because it depends on that stage's
output. The plan then estimates: a stage that is forced, or changed only in code or libraries, is
expected to produce its earlier output again, so the stages after it are likely reused. A stage with
a new configuration or new inputs is expected to produce something new.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from engines.config.recipe import Recipe
from flows.run.registry import Registry, RoundGate, open_tracker
from flows.stage_order import run_stages
from infra.errors import ArtifactCorruptError, ConfigError
from infra.names import unknown_name
from infra.store.stage_log import latest_commit
from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import Storage, open_storage
from infra.tracking.journal import StageHistory
from tasks.runner.earlier_work import DIGITS, EarlierRuns, find_adoptable, half_trained, own_step
from tasks.runner.run import StageRequest, StageResult

Status = Literal["hit", "miss", "likely_run", "likely_reuse"]

_NOT_MADE = "not made"
"""Kind of the placeholder for an output that does not exist yet; its uri is the stage's label."""


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan; text fields without information are empty.

    Attributes:
        status: `hit` is reused, `miss` would run, `likely_*` is an estimate after a miss.
        inputs: digest by input name; empty where it is unknown.
        digest: output digest of a `hit`.
        adoption: half-trained work that a hit continued, or that lies ahead of a miss.
        why: reason why the stage runs, or condition of its reuse.
        rejected: reason why the policy of a reused round is rejected.
    """

    label: str
    status: Status
    fingerprint: str
    inputs: Mapping[str, str]
    digest: str
    adoption: str = ""
    why: str = ""
    rejected: str = ""


@dataclass(frozen=True)
class _Expected:
    """Expected output of a stage that is not a hit; `output` is None if it is something new.

    `given`: by label of a stage that is to run, the digest that it must produce for this to hold.
    """

    output: Artifact | None
    given: Mapping[str, str]


class Planner:
    """Stage runner that only looks up every stage and records what it found.

    Args:
        force: token by stage label; of such a stage only a commit made under the token is a hit.
        adopt: labels of stages that must find something to adopt if they are not hits.
    """

    def __init__(
        self,
        storage: Storage,
        seed: int,
        force: Mapping[str, str],
        adopt: Collection[str] = (),
    ) -> None:
        self._storage = storage
        self.seed = seed
        self._force, self._adopt = force, adopt
        self._earlier = EarlierRuns(storage)
        self._expected: dict[str, _Expected] = {}
        self.stages: list[PlannedStage] = []

    @property
    def all_hit(self) -> bool:
        """True if nothing would run."""
        return all(stage.status == "hit" for stage in self.stages)

    def run(self, request: StageRequest) -> StageResult:
        """Look up one stage; if it is not done, its result holds a placeholder artifact.

        Raises:
            ConfigError: the stage is to adopt half-trained work, and `find_adoptable` refuses.
            ArtifactCorruptError: the stage is done, but its output is damaged.
        """
        label, inputs = request.label, request.inputs
        known = all(each.digest for each in inputs.values())
        likely = replace(
            request, given={name: self.likely(each) for name, each in request.given.items()}
        )
        found = self._lookup(likely, known)
        hit = found if known else None
        status: Status = "hit" if found else "miss"
        if not known:
            status = "likely_reuse" if found else "likely_run"
        artifact = hit.artifact if hit else Artifact(kind=_NOT_MADE, uri=label, digest="")
        stage = PlannedStage(
            label=label,
            status=status,
            fingerprint=likely.fingerprint if known else "",
            inputs={name: each.digest for name, each in inputs.items()},
            digest=artifact.digest,
            adoption=self._adoption(likely, hit) if known else "",
            why="" if hit else self._expect(request, likely, found),
        )
        self.stages.append(stage)
        return StageResult(
            label=label,
            fingerprint=stage.fingerprint,
            artifact=artifact,
            reused=hit is not None,
            wall_s=0.0,
            metrics=hit.metrics if hit else {},
            job_seconds=hit.seconds if hit else {},
        )

    def reject(self, label: str, text: str) -> None:
        """Note why the policy of the finished round `label` is rejected, and what replaces it."""
        at = [stage.label for stage in self.stages].index(label)
        self.stages[at] = replace(self.stages[at], rejected=text)

    def likely(self, artifact: Artifact) -> Artifact:
        """Return the artifact, or what is expected for a placeholder; no digest if that is new."""
        if artifact.kind != _NOT_MADE:
            return artifact
        return self._expected[artifact.uri].output or artifact

    def _lookup(self, request: StageRequest, known: bool) -> CommitRecord | None:
        if not all(each.digest for each in request.inputs.values()):
            return None
        try:
            return self._storage.lookup(request.fingerprint, self._force.get(request.label, ""))
        except ArtifactCorruptError:
            if known:
                raise
            return None  # with other inputs the run may not read it

    def _expect(
        self, request: StageRequest, likely: StageRequest, found: CommitRecord | None
    ) -> str:
        """Record the expected output of a stage that is not a hit; return why it runs or is reused.

        `likely` has expected inputs in place of unknown ones.
        """
        unsure = {name: each.uri for name, each in request.inputs.items() if not each.digest}
        if found is not None:
            given = [self._expected[label].given for label in unsure.values()]
            given = {label: digest for each in given for label, digest in each.items()}
            self._expected[request.label] = _Expected(found.artifact, given)
            return f"reused if {_again(given)}"
        new = {name: label for name, label in unsure.items() if not likely.inputs[name].digest}
        before = None if new else latest_commit(self._storage.attempts.entries(likely.fingerprint))
        nearest = self._earlier.nearest(likely)
        output = before.artifact if before else None
        if before is None and nearest and not new and not nearest.differs.changes:
            output = nearest.output
        given = {request.label: output.digest} if output else {}
        self._expected[request.label] = _Expected(output, given)
        if before is not None:
            return f"forced; it yielded {before.artifact.digest[:DIGITS]} before"
        if not unsure and (step := own_step(self._storage, likely)):
            return f"goes on from its step {step}"
        if nearest is None or nearest.differs or not new:
            return str(nearest or "")
        inputs = nearest.spec.inputs
        return f"runs unless {_again({label: inputs[name].digest for name, label in new.items()})}"

    def _adoption(self, request: StageRequest, record: CommitRecord | None) -> str:
        if record is not None:
            return f"adopted {record.adopted}" if record.adopted else ""
        if request.label in self._adopt:
            find_adoptable(self._storage, request)
        found = half_trained(self._storage, request)
        return found[0].offer(request.label) if found else ""


def plan_run(
    recipe: Recipe,
    force: Mapping[str, str],
    adopt: Collection[str] = (),
    start_from: str | None = None,
) -> Planner:
    """Look up every stage of a recipe.

    Args:
        force: token by label of each stage that is to run anew.
        adopt: labels of stages that continue half-trained work of another fingerprint.
        start_from: label of a stage; all stages before it have to be done.

    Raises:
        ConfigError: a label is unknown, `adopt` fails, or a stage before `start_from` is not done.
    """
    storage = open_storage(recipe.store_uri)
    planner = Planner(storage, recipe.seed, force, adopt)
    registry = Registry(recipe.promote, open_tracker(recipe.location), storage)
    # A model that is expected to equal the incumbent is not compared with itself.
    gate = RoundGate(recipe.diagnosis, StageHistory(storage), planner.reject)
    run_stages(
        recipe,
        planner,
        lambda model: registry.incumbent(planner.likely(model)),
        gate.accepts,
    )
    labels = [stage.label for stage in planner.stages]
    for option, named in (("--from", [start_from]), ("--force", force), ("--adopt", adopt)):
        for label in filter(None, named):
            if label not in labels:
                raise ConfigError(option, unknown_name(label, labels))
    for stage in planner.stages[: labels.index(start_from) if start_from else 0]:
        if stage.status != "hit":
            raise ConfigError(
                "--from",
                f"got {start_from!r}; need every stage before it done, and {stage.label} is not; "
                f"run --from {stage.label}, or without --from",
            )
    return planner


@dataclass(frozen=True)
class AskedRun:
    """A requested run that was planned without an error; `force` as for `Planner`."""

    recipe: Recipe
    force: dict[str, str]
    adopt: list[str]
    start_from: str | None
    is_done: bool


def ask(
    recipe: Recipe, force: Collection[str], adopt: Collection[str], start_from: str | None
) -> AskedRun:
    """Plan a run before anything is started for it; `force` are labels of stages to run again.

    Raises:
        ConfigError: raised by `plan_run`.
    """
    # A new token for every run, because an old one would match the commit made under it.
    token = datetime.now(UTC).isoformat(timespec="microseconds")
    tokens = dict.fromkeys(filter(None, (*force, start_from)), token)
    return AskedRun(
        recipe, tokens, [*adopt], start_from, plan_run(recipe, tokens, adopt, start_from).all_hit
    )


def _again(digests: Mapping[str, str]) -> str:
    return " and ".join(f"{label} yields {each[:DIGITS]} again" for label, each in digests.items())
