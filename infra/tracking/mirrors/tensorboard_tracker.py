"""TensorBoard as a tracker: `tensorboard --logdir <home>/tensorboard`.

Promises: one event file per run, which TensorBoard follows while it grows; its library is imported
at the first point. Values are float32, TensorBoard's format.
Does not promise: to show states and tags; they are in `run.json` beside the event file.
"""

import importlib
import json
import struct
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from infra.redact import redact
from infra.tracking.mirrors.directory_tracker import DirectoryTracker, StoredRun
from infra.tracking.tracker import MetricPoint, TrackerSettings

FILE_VERSION = "brain.Event:2"
SETTINGS = "settings"
LENGTH = struct.Struct("<Q")


class TensorBoardTracker(DirectoryTracker):
    """A `Tracker` over a log directory: the settings' `uri`, else `<home>/tensorboard`."""

    points_name = "events.out.tfevents.0000000000.rlhf"
    """TensorBoard requires `tfevents` and a timestamp in the name."""

    def __init__(self, settings: TrackerSettings) -> None:
        super().__init__(self.root_of(settings, "tensorboard"))

    def encode(self, run: StoredRun, points: Sequence[MetricPoint]) -> bytes:
        """Return one event per (step, time); the file begins with its version and the settings."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        new_event, new_summary = _proto("event").Event, _proto("summary").Summary
        data = BytesIO()
        writer = RecordWriter(data)
        if not run.num_bytes:
            began_s = points[0].time_ms / 1000
            writer.write(
                new_event(wall_time=began_s, file_version=FILE_VERSION).SerializeToString()
            )
            settings = new_summary(value=[_text(redact(json.dumps(run.params, indent=2)))])
            writer.write(new_event(wall_time=began_s, step=0, summary=settings).SerializeToString())
        moments: dict[tuple[int, int], list[MetricPoint]] = {}
        for point in points:
            moments.setdefault((point.step, point.time_ms), []).append(point)
        for (step, time_ms), here in moments.items():
            values = [new_summary.Value(tag=p.name, simple_value=p.value) for p in here]
            event = new_event(
                wall_time=time_ms / 1000, step=step, summary=new_summary(value=values)
            )
            writer.write(event.SerializeToString())
        return data.getvalue()

    def names_in(self, path: Path, num_bytes: int) -> set[tuple[str, int]]:
        """Parse records: a length (8 bytes), its checksum (4), an event, its checksum (4)."""
        parse = _proto("event").Event.FromString
        data, names = (path.read_bytes() if num_bytes else b"")[:num_bytes], set[tuple[str, int]]()
        start = 0
        while start < len(data):
            (length,) = LENGTH.unpack_from(data, start)
            event = parse(data[start + 12 : start + 12 + length])
            names |= {(value.tag, event.step) for value in event.summary.value}
            start += length + 16
        return names


def _text(text: str) -> Any:
    summary, shown = _proto("summary"), "\n".join(f"    {line}" for line in text.splitlines())
    plugin = summary.SummaryMetadata.PluginData(plugin_name="text")
    tensor = _proto("tensor").TensorProto(
        dtype=_proto("types").DT_STRING, string_val=[shown.encode()]
    )
    return summary.Summary.Value(
        tag=SETTINGS, metadata=summary.SummaryMetadata(plugin_data=plugin), tensor=tensor
    )


def _proto(name: str) -> Any:
    """Import a message module of TensorBoard; its classes are created at run time."""
    return importlib.import_module(f"tensorboard.compat.proto.{name}_pb2")
