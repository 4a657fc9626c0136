"""Reads the stages of a run from the store for a diagnosis."""

from collections.abc import Iterable

from pydantic import ValidationError

from engines.config.stages.base import StageConfig
from engines.config.stages.data import PreprocessStageConfig
from engines.config.stages.final import (
    CompareStageConfig,
    EvaluateStageConfig,
    MergeStageConfig,
    PromoteStageConfig,
    SoupStageConfig,
)
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.serving import SelfPlayStageConfig
from engines.config.stages.supervised import (
    PreferenceStageConfig,
    RewardModelStageConfig,
    SFTStageConfig,
)
from flows.diagnosis.findings import StageView
from infra.store.process_stamp import is_dead
from infra.store.runs import KnownRun
from infra.store.stage_log import latest_commit
from infra.tracking.history import StageHistory

_STAGES: dict[str, type[StageConfig]] = {
    each.stage: each
    for each in (
        PreprocessStageConfig,
        SFTStageConfig,
        RewardModelStageConfig,
        SelfPlayStageConfig,
        PreferenceStageConfig,
        RLRoundStageConfig,
        MergeStageConfig,
        SoupStageConfig,
        EvaluateStageConfig,
        CompareStageConfig,
        PromoteStageConfig,
    )
}


def run_views(history: StageHistory, run: KnownRun, only: str = "") -> list[StageView]:
    """Return the stages of a run, in the order in which it last requested them.

    Of several stages with one label, only the last is returned. `only` selects one by fingerprint.
    """
    asked = sorted(run.used_at, key=lambda fingerprint: run.used_at[fingerprint])
    return stage_views(history, [each for each in asked if only in {"", each}])


def stage_views(history: StageHistory, fingerprints: Iterable[str]) -> list[StageView]:
    """Return the stages that have a readable specification; of several with one label, the last."""
    views = (_view(history, fingerprint) for fingerprint in fingerprints)
    newest: dict[str, StageView] = {}
    for view in views:
        if view is not None:
            newest.pop(view.label, None)
            newest[view.label] = view
    return list(newest.values())


def _view(history: StageHistory, fingerprint: str) -> StageView | None:
    """Read a stage; None if no attempt left a specification that this code can read."""
    spec = history.specification(fingerprint)
    if spec is None or spec.stage not in _STAGES:
        return None
    try:
        config = _STAGES[spec.stage].model_validate(spec.config)
    except ValidationError:
        return None
    records, _ = history.records(fingerprint, "")
    steps: dict[int, dict[str, float]] = {}
    for record in records:
        if record.step is not None:
            steps.setdefault(record.step, {}).update(record.values)
    log = history.storage.attempts.entries(fingerprint)
    channel = history.storage.channel(fingerprint)
    is_open = bool(log) and log[-1].kind == "held"
    problem = channel.read_error(log[-1].number) if is_open else None
    beat = channel.read_beat(log[-1].number) if is_open else None
    commit = latest_commit(log)
    return StageView(
        label=config.label,
        config=config,
        steps=steps,
        messages=tuple(record.message for record in records if record.kind == "log"),
        problem=problem,
        phase=beat.phase if beat else "",
        is_gone=problem is None and beat is not None and is_dead(beat.process),
        is_committed=commit is not None,
        metrics=commit.metrics if commit else {},
        seconds=commit.seconds if commit else {},
    )
