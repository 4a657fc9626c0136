"""What is read from `nvidia-smi`, on a program of that name."""

from pathlib import Path

import pytest

from hardware import nvidia_smi

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tPXB\t0-47\t0\n"
    "GPU1\tNV18\t X \tSYS\tSYS\t0-47\t0\n"
    "GPU2\tNV18\tSYS\t X \tSYS\t48-95\t1\n"
    "NIC0\tPXB\tSYS\tSYS\t X \n\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n"
)
ONE = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-47\n"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def put(script: str) -> None:
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    return put


@pytest.mark.parametrize(
    ("topology", "links"), [(TOPOLOGY, "2 x NV18, 1 x SYS"), (ONE, None), ("", None)]
)
def test_links_count_each_pair_of_devices_once(program, topology: str, links: str | None) -> None:
    program(f"[ \"$*\" = 'topo -m' ] && printf '%s' '{topology}'")
    assert nvidia_smi.links() == links


def test_the_driver_is_that_of_the_first_device(program) -> None:
    program("[ $1 = --query-gpu=driver_version ] && printf '580.95.05\\n580.95.05\\n'")
    assert nvidia_smi.driver_version() == "580.95.05"


@pytest.mark.parametrize("script", ["exit 9", "printf ''", "exec sleep 60", "printf '\\377'"])
def test_a_program_that_does_not_answer_is_no_driver(
    program, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(nvidia_smi, "DEADLINE_S", 0.5)
    program(script)
    assert nvidia_smi.driver_version() is None
    assert nvidia_smi.links() is None
