import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engines.errors import WeightSyncError
from engines.rollout.served.weight_receiver import source_from_json, source_to_json
from engines.weight_sync.in_process import SafetensorsSource


@dataclass(frozen=True)
class Elsewhere:
    path: Path

    def tensors(self):
        yield from ()


def test_a_source_arrives_as_it_was_sent(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "weights.safetensors")
    source = SafetensorsSource(tmp_path / "weights.safetensors")
    arrived = source_from_json(json.loads(json.dumps(source_to_json(source))))
    assert arrived == source
    found = dict(arrived.tensors())
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_class_of_another_package_is_neither_sent_nor_taken(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="Elsewhere"):
        source_to_json(Elsewhere(tmp_path))
    for module, name in (
        ("subprocess", "Popen"),
        ("engines.weight_sync.in_process", "Path"),
        ("engines.weight_sync.base", "WeightSource"),
    ):
        with pytest.raises(WeightSyncError, match="no weight source"):
            source_from_json({"module": module, "name": name, "fields": {"path": "/"}})


def test_other_fields_are_refused() -> None:
    data = {"module": "engines.weight_sync.in_process", "name": "SafetensorsSource", "fields": {}}
    with pytest.raises(WeightSyncError, match="fields"):
        source_from_json(data)


@pytest.mark.parametrize("content", [None, b"", b"\x08\0\0\0\0\0\0\0notjson!"])
def test_a_file_that_is_missing_or_damaged_is_a_sync_error(tmp_path: Path, content) -> None:
    path = tmp_path / "weights.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WeightSyncError):
        list(SafetensorsSource(path).tensors())
