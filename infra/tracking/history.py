"""Read access to the journals and commits of stages, for the shipper and the report."""

import json
from contextlib import suppress

from infra.errors import ConfigError, JournalError
from infra.store.stage_spec import CommitRecord, StageSpec
from infra.store.storage import Storage
from infra.tracking.journal import JournalRecord, read_journal


class StageHistory:
    """Reads journals, specifications and commits of the stages of one store."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def records(
        self, fingerprint: str, position: str, generation: int | None = None
    ) -> tuple[list[JournalRecord], str]:
        """Return the journal records of a stage after a position, and the new position.

        An empty position is the start. `generation` is its first attempt's number; None: the
        newest.

        Raises:
            JournalError: the journal is damaged, or the position does not belong to it.
        """
        try:
            read = {int(number): end for number, end in json.loads(position or "{}").items()}
        except (ValueError, AttributeError):
            raise JournalError(f"{position!r} is no position of a journal") from None
        records, new = read_journal(self.storage, fingerprint, read, generation)
        return records, json.dumps(new, sort_keys=True)

    def specification(self, fingerprint: str) -> StageSpec | None:
        """Return the newest readable specification of a stage; None if there is none."""
        for entry in reversed(self.storage.attempts.entries(fingerprint)):
            if entry.kind == "held":
                with suppress(ConfigError):
                    return self.storage.channel(fingerprint).read_specification(entry.number)
        return None

    def commit(self, fingerprint: str, generation: int) -> CommitRecord | None:
        """Return the commit of a generation (number of its first attempt); None without one."""
        members = self.storage.attempts.generation(fingerprint, generation)
        return members[-1].record if members else None
