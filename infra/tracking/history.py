"""What the store knows of stages: the shipper's and the report's source."""

import json
from contextlib import suppress

from infra.errors import ConfigError, JournalError
from infra.store import stage_log
from infra.store.stage_spec import CommitRecord, StageSpec
from infra.store.storage import Storage
from infra.tracking.journal import JournalRecord, read_journal


class StageHistory:
    """Stages of one store, without a tracker.

    Args:
        storage: where they work and are committed.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def records(
        self, fingerprint: str, position: str, generation: int | None = None
    ) -> tuple[list[JournalRecord], str]:
        """What a stage's journal gained since a position.

        Args:
            fingerprint: of the stage.
            position: empty for the start, or what an earlier call gave.
            generation: number of its first attempt; by default the newest.

        Returns:
            The records, and the position behind them.

        Raises:
            JournalError: the journal is damaged, or the position is none of this journal's.
        """
        try:
            read = {int(number): end for number, end in json.loads(position or "{}").items()}
        except (ValueError, AttributeError):
            raise JournalError(f"{position!r} is no position of a journal") from None
        records, new = read_journal(self.storage, fingerprint, read, generation)
        return records, json.dumps(new, sort_keys=True)

    def specification(self, fingerprint: str) -> StageSpec | None:
        """The newest specification of a stage; a process that was killed early wrote none."""
        for entry in reversed(self.storage.attempts.entries(fingerprint)):
            if entry.kind == "held":
                with suppress(ConfigError):
                    return self.storage.channel(fingerprint).read_specification(entry.number)
        return None

    def commit(self, fingerprint: str, generation: int) -> CommitRecord | None:
        """What a generation of a stage committed, if it is done.

        Args:
            fingerprint: of the stage.
            generation: number of its first attempt.

        Returns:
            Its record; None while it is not done.
        """
        log = self.storage.attempts.entries(fingerprint)
        members = stage_log.generation(log, generation)
        return members[-1].record if members else None
