"""What Prefect's own rules make of the automations, hours of events in seconds.

tests/e2e/test_healing.py has a server carry them out.
"""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import cast
from uuid import uuid4

import pytest
import yaml
from prefect.events import EventTrigger
from prefect.server.database import provide_database_interface
from prefect.server.events import triggers
from prefect.server.events.models.automations import create_automation
from prefect.server.events.schemas.automations import Automation, Firing
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL, temporary_settings
from prefect.types._datetime import DateTime, now

from flows.automations import MAX_RESUMES, SILENCE_S, STRANDED_S, TAG, automations
from infra.services.stack import HEARTBEAT_S, WORK_POOL

ROOT = Path(__file__).resolve().parents[3]


class Server:
    """The part of a Prefect server that decides which automation acts."""

    def __init__(self) -> None:
        self._start = now("UTC")
        self.fired: list[str] = []
        self._kept: list[Automation] = []
        """Triggers know their automations weakly, and the server reads those again meanwhile."""

    async def load(self) -> None:
        """Its database, and our automations in it."""
        database = provide_database_interface()
        await database.create_db()
        await triggers.reset()
        async with database.session_context(begin_transaction=True) as session:
            for each in automations():
                made = Automation(**each.model_dump(), id=uuid4())
                self._kept.append(await create_automation(session, made))
                triggers.load_automation(self._kept[-1])

    async def act(self, firing: Firing) -> None:
        """Stands for the actions."""
        self.fired.append(firing.trigger.automation.name)

    async def see(self, run: str, name: str, at_s: float, count: int = 1, tag: str = TAG) -> None:
        """An event of a run that began so many times."""
        at = self._start + timedelta(seconds=at_s)
        resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
        if name != "heartbeat":
            resource["prefect.run-count"] = str(count)
        related = {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
        event = name if name.startswith("rlhf.") else f"prefect.flow-run.{name}"
        await triggers.reactive_evaluation(
            ReceivedEvent.model_validate(
                {
                    "id": uuid4(),
                    "event": event,
                    "resource": resource,
                    "related": [related],
                    "occurred": at,
                    "received": at,
                }
            )
        )

    async def look(self, at_s: float) -> list[str]:
        """What acted until then, and was not told before."""
        offset = await triggers.get_events_clock_offset()
        for trigger in list(triggers.triggers.values()):
            if trigger.posture.value == "Proactive":
                at = self._start + timedelta(seconds=at_s - offset)
                await triggers.proactive_evaluation(trigger, cast(DateTime, at))
        fired, self.fired = self.fired, []
        return fired


Case = Callable[[Server], Coroutine[None, None, None]]


async def _silence(server: Server) -> None:
    # Running comes after the first heartbeat and is none: the process may die before the second.
    for name, at_s in (("Pending", 0), ("heartbeat", 10), ("Running", 11)):
        await server.see("a", name, at_s)
    assert await server.look(10 + SILENCE_S - 1) == []
    assert await server.look(10 + SILENCE_S + 1) == ["rlhf-silent-runs"]
    await server.see("b", "heartbeat", 200)
    await server.see("b", "Completed", 210)
    await server.see("c", "heartbeat", 200, tag="another")
    assert await server.look(800) == []
    await server.see("d", "rlhf.asked.RUNNING", 900)
    assert await server.look(900 + SILENCE_S + 1) == ["rlhf-silent-runs"]


async def _never_began(server: Server) -> None:
    await server.see("a", "Pending", 0, 0)
    await server.see("b", "Pending", 0, 0)
    await server.see("b", "heartbeat", 30)
    assert "rlhf-runs-that-never-began" not in await server.look(590)
    assert await server.look(610) == ["rlhf-runs-that-never-began"]


async def _stranded(server: Server) -> None:
    await server.see("a", "Crashed", 0)
    assert await server.look(STRANDED_S - 1) == []
    assert await server.look(STRANDED_S + 1) == ["rlhf-stranded-runs"]
    # A second report of the crash, when another process was already on its way, or lives.
    await server.see("b", "Crashed", 100)
    await server.see("b", "Running", 110)
    await server.see("c", "Crashed", 100)
    await server.see("c", "heartbeat", 100 + HEARTBEAT_S)
    await server.see("d", "Failed", 100)
    await server.see("e", "Cancelled", 100)
    assert await server.look(100 + STRANDED_S + 1) == []


async def _resumed(server: Server) -> None:
    for count in (*range(1, MAX_RESUMES + 3), 1, 1):
        await server.see("a", "Stranded", 10 * count, count)
    assert await server.look(100) == ["rlhf-resume-stranded-runs"] * MAX_RESUMES


async def _cancelling(server: Server) -> None:
    await server.see("a", "Cancelling", 0)
    await server.see("b", "Cancelling", 0)
    await server.see("b", "Cancelled", 5)
    assert await server.look(121) == ["rlhf-cancelled-runs"]


@pytest.mark.parametrize("case", [_silence, _never_began, _stranded, _resumed, _cancelling])
def test_prefect_does_with_them_what_they_say(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        server = Server()
        monkeypatch.setattr(triggers, "act", server.act)
        await server.load()
        await case(server)

    url = f"sqlite+aiosqlite:///{tmp_path / 'prefect.db'}"
    with temporary_settings({PREFECT_SERVER_DATABASE_CONNECTION_URL: url}):
        asyncio.run(run())


def test_the_deployment_has_the_tag_and_the_rate_of_heartbeats() -> None:
    deployment, *_ = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert TAG in deployment["tags"]
    pool = deployment["work_pool"]
    assert pool["name"] == WORK_POOL
    rate = pool["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
    assert rate == str(HEARTBEAT_S)


def test_silent_is_three_heartbeats_and_stranded_more_than_one() -> None:
    found = {each.name: each.trigger for each in automations()}
    silent, stranded = found["rlhf-silent-runs"], found["rlhf-stranded-runs"]
    assert isinstance(silent, EventTrigger)
    assert isinstance(stranded, EventTrigger)
    assert silent.within.total_seconds() >= 3 * HEARTBEAT_S
    assert stranded.within.total_seconds() > HEARTBEAT_S
