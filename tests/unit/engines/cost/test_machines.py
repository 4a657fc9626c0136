"""Names and files of machines."""

import json
from pathlib import Path

import pytest

from engines.cost.machines import KINDS, machine_like, machine_of, read_machine
from hardware.amd import AMDPlatform
from hardware.nvidia import NvidiaPlatform
from infra.errors import ConfigError


def test_a_name_is_a_kind_and_a_number() -> None:
    node = machine_of("H100x8")
    assert (node.name, node.num_devices, node.platform) == ("h100x8", 8, "nvidia")
    assert node.exchange_bytes_per_s == node.link_bytes_per_s
    sixteen = machine_of("h100x128")
    assert sixteen.exchange_bytes_per_s == sixteen.network_bytes_per_s
    assert sixteen.host_memory_bytes == node.host_memory_bytes
    one = machine_of("h200x1")
    assert (one.num_per_node, one.host_memory_bytes) == (1, KINDS["h200"].host_memory_bytes // 8)
    assert machine_of("mi300x8").platform == "amd"


def test_peaks_are_those_of_the_platforms() -> None:
    for kind in KINDS.values():
        peaks = NvidiaPlatform.peaks if kind.platform == "nvidia" else AMDPlatform.peaks
        assert kind.peak_flops_per_s == dict(peaks)[kind.name]
    assert machine_of("h100x1").peak("int8") == 66.9e12


@pytest.mark.parametrize("name", ["h100", "cpux8", "h100x0", "h100x8x", "x8", "8", "h100x1234567"])
def test_an_unknown_machine_names_the_known(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        machine_of(name)
    assert str(refused.value) == (
        f"--on: got {name!r}; need a100xN, h100xN, h200xN, b200xN, mi300xN (N devices, as in "
        "h100x8), or a .json file that describes a machine; choose one"
    )


def test_a_machine_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    values = machine_of("h100x4").model_dump()
    file.write_text(json.dumps({**values, "name": "own", "memory_bytes": 10**10}))
    found = machine_of(str(file))
    assert (found.name, found.memory_bytes, found.num_devices) == ("own", 10**10, 4)
    file.write_text(json.dumps({**values, "num_devices": 0}))
    with pytest.raises(ConfigError, match=r"--on own.json.num_devices"):
        read_machine(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_machine(file)
    with pytest.raises(ConfigError, match="No such file"):
        machine_of(str(tmp_path / "absent.json"))


def test_a_machine_like_the_one_here() -> None:
    found = machine_like("nvidia", "NVIDIA H200", 150 * 10**9, 2)
    assert (found.memory_bytes, found.num_devices) == (150 * 10**9, 2)
    assert found.memory_bytes_per_s == KINDS["h200"].memory_bytes_per_s
    other = machine_like("nvidia", "NVIDIA GeForce RTX 3060", 12 * 10**9, 1)
    assert other.memory_bytes_per_s == KINDS["h100"].memory_bytes_per_s
