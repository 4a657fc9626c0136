"""A run that is killed while it saves continues from its last whole checkpoint, bit for bit.

`pytest --pyargs rlhf.testing.test_checkpoint_kill --backend NAME`. Every rank is killed (SIGKILL)
while a checkpoint is written, or when all of it is written and only its name is missing.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlhf.testing.context import check_runnable
from rlhf.testing.killed import MOMENTS, SAVED
from rlhf.testing.launch import launch
from rlhf.testing.layouts import LAYOUTS
from rlhf.testing.tiny_models import write_tiny_models

DEADLINE_S = 300.0
FAULT = "atomic.before_publish=kill@2"
"""Kills the process that publishes, at its second checkpoint."""
SIZES = {layout.name: layout.world_size for layout in LAYOUTS}
KILLS = {"alone": ("writing",), "data2": MOMENTS}
"""Layout -> moments; each costs the start of all its ranks."""

Start = Callable[..., None]


@pytest.fixture(scope="module", autouse=True)
def _runnable(request: pytest.FixtureRequest) -> None:
    check_runnable(request.config)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("killed")
    write_tiny_models(root)
    return root


@pytest.fixture
def start(root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Start:
    """`start(layout, *arguments, expected_code=...)`: run `rlhf.testing.killed` to its end."""
    backend, platform = (request.config.getoption(o) for o in ("--backend", "--platform"))
    program = [
        "-m", "rlhf.testing.killed", f"--backend={backend}", f"--platform={platform}",
        f"--root={root}", f"--out={tmp_path}",
    ]  # fmt: skip

    def run(layout: str, *arguments: str, expected_code: int = 0) -> None:
        launch(
            [*program, f"--layout={layout}", *arguments],
            SIZES[layout],
            tmp_path,
            DEADLINE_S,
            expected_code,
        )

    return run


def torn_files(checkpoints: Path) -> list[str]:
    """Names of the files of the checkpoint that was not published."""
    return sorted(
        file.name for file in checkpoints.glob(f".tmp-step-*{SAVED + 1}-*/**/*") if file.is_file()
    )


@pytest.mark.parametrize("layout", KILLS)
def test_a_killed_run_continues_bit_for_bit(
    start: Start, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("RLHF_FAULTS", FAULT)
        for moment in KILLS[layout]:
            start(layout, f"--moment={moment}", expected_code=-signal.SIGKILL)
            published = [path.name for path in (tmp_path / moment).glob("step-*")]
            assert published == [f"step-{SAVED:08d}"], moment
            torn = torn_files(tmp_path / moment)
            assert torn, moment
            assert ("manifest.json" in torn) == (moment == "written")
    start(layout, f"--carry-on={','.join(KILLS[layout])}")
    for rank in range(SIZES[layout]):
        results: dict[str, Any] = json.loads((tmp_path / f"continued-{rank}.json").read_text())
        for moment in KILLS[layout]:
            assert results[moment]["step"] == results[moment]["loaded"] == SAVED
            assert results[moment]["steps"] == results["whole"][SAVED:], moment
