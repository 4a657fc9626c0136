"""A tracker that takes connections and never answers: what a job's steps have to do with it."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from job_bench import Bench, metrics_of
from tiny_stages import DATA, MODEL, SFT

from infra.waiting import wait_for


@dataclass
class MuteServer:
    """Listens, and says nothing."""

    listener: socket.socket
    opened_at: list[float] = field(default_factory=list)
    held: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self) -> None:
        """Until the listener is closed."""
        while True:
            try:
                self.held.append(self.listener.accept()[0])
            except OSError:
                return
            self.opened_at.append(time.monotonic())

    def waited_s(self, until: float) -> float:
        """Seconds that somebody waited for an answer."""
        return sum(until - opened_at for opened_at in self.opened_at)


@pytest.fixture
def mute() -> Iterator[MuteServer]:
    server = MuteServer(socket.create_server(("127.0.0.1", 0)))
    threading.Thread(target=server.accept, daemon=True).start()
    yield server
    server.listener.shutdown(socket.SHUT_RDWR)
    server.listener.close()
    for held in server.held:
        held.close()


@pytest.mark.slow
def test_fault_row_21_steps_never_wait_for_a_hanging_tracker(
    mute: MuteServer, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    bench = Bench(tmp_path, {"MLFLOW_TRACKING_URI": mute.url, "WANDB_BASE_URL": mute.url})
    dataset = bench.run(bench.spec("preprocess", {"data": DATA, "model": MODEL}, {})).artifact
    spec = bench.spec("sft", SFT, {"dataset": dataset})
    bench.run(spec)
    waited_s = mute.waited_s(time.monotonic())
    record_property("F9", waited_s)
    assert waited_s == 0
    assert len(metrics_of(spec)) == SFT["sft"]["num_steps"], "what is to be told later is there"
    with socket.create_connection(mute.listener.getsockname()):
        wait_for(lambda: mute.opened_at, "somebody to be noticed who does wait", 60.0, poll_s=0.01)
        assert mute.waited_s(time.monotonic()) >= 0
