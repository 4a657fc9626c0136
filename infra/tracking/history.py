"""What the store and the work directories know of stages: the shipper's and the report's source."""

from pathlib import Path

from infra.store.stage_spec import Artifact, CommitRecord
from infra.store.storage import Storage
from infra.tracking.journal import JournalRecord, read_records


class StageHistory:
    """Stages of one store, without a tracker.

    Args:
        work: directory of the stages' work directories.
        storage: where they are committed.
    """

    def __init__(self, work: Path, storage: Storage) -> None:
        self._work = work
        self.storage = storage

    def records(self, fingerprint: str, position: str) -> tuple[list[JournalRecord], str]:
        """What a stage's journal gained since a position.

        Args:
            fingerprint: of the stage.
            position: empty for the start, or what an earlier call gave.

        Returns:
            The records, and the position behind them.

        Raises:
            JournalError: the journal is damaged, or the position is none of this journal's.
        """
        path = self._work / fingerprint / "journal.jsonl"
        records, offset = read_records(path, int(position or 0))
        return records, str(offset)

    def commit(self, fingerprint: str) -> CommitRecord | None:
        """A stage's commit, if it is done."""
        return self.storage.committed(fingerprint)

    def files(self, artifact: Artifact) -> Path:
        """The directory of an artifact's files on this machine."""
        return artifact.local_path()
