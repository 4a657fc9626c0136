"""Prefect automations that restart a flow run after its process was killed.

They apply to runs with the tag `self-healing`. The deployment in `prefect.yaml` and `rlhf run` set
it, and both send heartbeats at the rate that `SILENCE_S` assumes.

    Running -> (silence) -> Crashed -> (not picked up) -> Stranded -> AwaitingRetry -> Running

*Stranded* is Prefect's state type *Crashed* under another name. A worker reports a crash twice, the
second time after it looked for hooks. A run that was restarted in between would be marked as
crashed by the second report while it is alive.
Promises: a silent run becomes *Crashed*, which frees its slot in the deployment. A stranded run of
a deployment is restarted at most once after each start, and at most `MAX_RESUMES` times, or once
more if a start failed; then it stays stranded, with the reason. A run that failed, was cancelled or
is being cancelled is not restarted. An unchanged automation is not updated, because an update makes
the server forget the events that it saw. A paused automation stays paused.
Does not promise: to distinguish a process that was suspended for long from one that was killed. If
it wakes up, both processes follow the same job.
"""

from datetime import timedelta

from httpx import HTTPError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import StateType
from prefect.events import (
    AutomationCore,
    ChangeFlowRunState,
    EventTrigger,
    Posture,
    ResourceSpecification,
    emit_event,
)
from prefect.events.worker import EventsWorker

from infra.errors import ServiceError
from infra.services.stack import HEARTBEAT_S

TAG = "self-healing"
SILENCE_S = 3 * HEARTBEAT_S
START_S = 600
"""Time limit from the moment a worker takes a run to the first heartbeat."""
CANCEL_S = 120
STRANDED_S = HEARTBEAT_S + 5
"""A run that is marked as crashed but is alive sends a heartbeat within this time."""
MAX_RESUMES = 3
SEEN = timedelta(days=30)
"""How long the server remembers that it restarted a run."""
DRAIN_DEADLINE_S = 10.0
UNFINISHED = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]

_RUN = "prefect.flow-run"
_BEAT = f"{_RUN}.heartbeat"
_CRASHED, _STRANDED = f"{_RUN}.Crashed", "Stranded"
_OTHER_ENDS = {f"{_RUN}.Completed", f"{_RUN}.Failed", f"{_RUN}.Cancelled"}
_STARTS = {f"{_RUN}.AwaitingRetry", f"{_RUN}.Pending", f"{_RUN}.Running"}
_ASKED = "rlhf.asked"
"""Event that counts like the start of a state: the next heartbeat is expected after it."""
_OURS = ResourceSpecification(
    {"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"}
)


def automations() -> list[AutomationCore]:
    """Return the automations that the server should have."""
    dead = StateType.CRASHED
    return [
        AutomationCore(
            name="rlhf-silent-runs",
            description=f"a run without a heartbeat for {SILENCE_S} s is Crashed",
            trigger=_silence({_BEAT, f"{_ASKED}.RUNNING"}, {_BEAT, _CRASHED}, SILENCE_S),
            actions=[_change(dead, f"no sign of life for {SILENCE_S} s")],
        ),
        AutomationCore(
            name="rlhf-runs-that-never-began",
            description=f"a run that was taken and did not begin within {START_S} s is Crashed",
            trigger=_silence({f"{_RUN}.Pending", f"{_ASKED}.PENDING"}, {_BEAT, _CRASHED}, START_S),
            actions=[_change(dead, f"did not begin within {START_S} s")],
        ),
        AutomationCore(
            name="rlhf-cancelled-runs",
            description=f"a run that is being cancelled for {CANCEL_S} s is Cancelled",
            trigger=_silence({f"{_RUN}.Cancelling", f"{_ASKED}.CANCELLING"}, set(), CANCEL_S),
            actions=[_change(StateType.CANCELLED, f"it did not end within {CANCEL_S} s")],
        ),
        AutomationCore(
            name="rlhf-stranded-runs",
            description=f"a crashed run that was not picked up within {STRANDED_S} s is Stranded",
            trigger=_silence({_CRASHED}, {_BEAT, *_STARTS}, STRANDED_S),
            actions=[
                _change(
                    dead,
                    "its process is gone; a run is started again by itself once for each time that "
                    f"it began, at most {MAX_RESUMES} times, then Retry continues",
                    name=_STRANDED,
                    force=True,  # from Crashed to Crashed
                )
            ],
        ),
        AutomationCore(
            name="rlhf-resume-stranded-runs",
            description=f"a stranded run is started again, at most {MAX_RESUMES} times",
            # Once for each pair of a run and the number of times that it began.
            trigger=EventTrigger(
                match=ResourceSpecification(
                    {
                        "prefect.resource.id": f"{_RUN}.*",
                        "prefect.run-count": [str(count) for count in range(MAX_RESUMES + 1)],
                    }
                ),
                match_related=_OURS,
                expect={f"{_RUN}.{_STRANDED}"},
                for_each={"prefect.resource.id", "prefect.run-count"},
                posture=Posture.Reactive,
                threshold=1,
                within=SEEN,
            ),
            actions=[
                _change(StateType.SCHEDULED, "started again after a crash", name="AwaitingRetry")
            ],
        ),
    ]


def apply_automations() -> list[tuple[AutomationCore, str]]:
    """Create or update the automations; return each with `created`, `changed` or `unchanged`.

    A tagged run in progress has to send a heartbeat from now on, so a dead one is found.

    Raises:
        ServiceError: the server refuses them or does not answer.
    """
    try:
        with get_client(sync_client=True) as client:
            applied = [_applied(client, wanted) for wanted in automations()]
            _ask(client)
    except HTTPError as error:
        raise ServiceError(f"the Prefect server takes no automations: {error}") from error
    return applied


def _applied(client: SyncPrefectClient, wanted: AutomationCore) -> tuple[AutomationCore, str]:
    found = next(iter(client.read_automations_by_name(wanted.name)), None)
    if found is None:
        client.create_automation(wanted)
        return wanted, "created"
    wanted = wanted.model_copy(update={"enabled": found.enabled})
    if AutomationCore.model_validate(found.model_dump()) == wanted:
        return wanted, "unchanged"
    client.update_automation(found.id, wanted)
    return wanted, "changed"


def _ask(client: SyncPrefectClient) -> None:
    """Restart the silence limits of the tagged runs that are pending, running or cancelling."""
    of = FlowRunFilter(
        tags=FlowRunFilterTags(all_=[TAG]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED)),
    )
    for run in client.read_flow_runs(flow_run_filter=of):
        emit_event(
            event=f"{_ASKED}.{run.state_type.value}" if run.state_type else _ASKED,
            resource={
                "prefect.resource.id": f"{_RUN}.{run.id}",
                "prefect.resource.name": run.name,
            },
            related=[{"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}],
        )
    EventsWorker.drain_all(timeout=DRAIN_DEADLINE_S, at_exit=False)


def _silence(after: set[str], signs: set[str], within_s: int) -> EventTrigger:
    """Return a trigger that fires if no event of `signs` and no end follows `after` in time."""
    return EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": f"{_RUN}.*"}),
        match_related=_OURS,
        after=after,
        expect={*signs, *_OTHER_ENDS},
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=within_s),
    )


def _change(
    state: StateType, message: str, *, name: str | None = None, force: bool = False
) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=state, name=name, message=message, force=force)
