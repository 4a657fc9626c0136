"""Report of the stages of a store that attempts hold now."""

import time
from collections.abc import Iterator
from pathlib import Path

from infra.store.process_stamp import is_dead
from infra.store.storage import open_storage


def held_stages(store: str | Path) -> Iterator[str]:
    """Yield a line for each held stage whose attempt is not known to have ended."""
    storage = open_storage(str(store))
    for fingerprint, stored in storage.inventory.stages().items():
        log, channel = storage.attempts.entries(fingerprint), storage.channel(fingerprint)
        if not log or log[-1].kind == "committed" or channel.read_error(log[-1].number):
            continue
        held, beat = log[-1], channel.read_beat(log[-1].number)
        if is_dead(beat.process if beat else held.holder.process):
            continue
        pids = (f"pid {pid}" for pid in held.holder.process.split(".")[1:2])
        by = " ".join([held.host or "another host", *pids])
        gone = ", which is gone" if is_dead(held.holder.process) else ""
        at = "" if beat is None else f", {beat.phase} step {beat.step or 0}"
        yield (
            f"{fingerprint[:12]} is held by {by} since {held.made_at}{gone}: {held.holder.ray_job}"
            f"{at} (last sign of life {max(0.0, time.time() - stored.work.touched_at):.0f} s ago)"
        )
