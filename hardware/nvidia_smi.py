"""Asks `nvidia-smi`, which opens no device, for the driver and the links between devices.

Promises: an absent, failing or slow command gives None by the deadline.
"""

import re
import subprocess
from collections import Counter

DEADLINE_S = 10.0


def driver_version() -> str | None:
    """Return the version of the loaded driver."""
    answer = _ask("--query-gpu=driver_version", "--format=csv,noheader")
    return answer.splitlines()[0].strip() if answer else None


def links() -> str | None:
    """Return the number of device pairs per kind of link, as `24 x NV18, 4 x SYS`.

    NV and a number are NVLinks; PIX, PXB, PHB, NODE and SYS are ever longer ways over PCIe.
    None for a single device.
    """
    rows = [
        cells[1:]
        for line in (_ask("topo", "-m") or "").splitlines()
        # The header begins like a row, and has no cell of a device with itself.
        if "X" in (cells := line.split()) and re.fullmatch(r"GPU\d+", cells[0])
    ]
    kinds = Counter(cells[other] for at, cells in enumerate(rows) for other in range(at))
    return ", ".join(f"{num} x {kind}" for kind, num in sorted(kinds.items())) or None


def _ask(*arguments: str) -> str | None:
    try:
        ended = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=DEADLINE_S,
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return ended.stdout
