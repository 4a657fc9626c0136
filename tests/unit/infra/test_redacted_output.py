import signal
import subprocess
import sys
from pathlib import Path

import pytest

SECRET = "correct-horse-battery"
HEAD = "import os, subprocess, sys, time\nfrom infra.redact import redact_output\n"


def run(body: str, tmp_path: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr as they arrive in files, as a job's log does."""
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        ended = subprocess.run(
            [sys.executable, "-c", HEAD + body],
            stdout=out,
            stderr=err,
            env={"PATH": "/usr/bin:/bin", "HF_TOKEN": SECRET},
            timeout=60,
            start_new_session=True,
        )
    return ended.returncode, (tmp_path / "out").read_text(), (tmp_path / "err").read_text()


def test_python_native_code_and_children_are_redacted(tmp_path: Path) -> None:
    code, out, err = run(
        "end = redact_output()\n"
        "print('token', os.environ['HF_TOKEN'], flush=True)\n"
        "os.write(1, b'native ' + os.environ['HF_TOKEN'].encode() + b'\\n')\n"
        "subprocess.run(['sh', '-c', 'echo child $HF_TOKEN >&2'])\n"
        "sys.stderr.write('no end of line')\n"
        "end()\n",
        tmp_path,
    )
    assert code == 0
    assert out.splitlines() == ["token ***", "native ***"]
    assert err.splitlines() == ["child ***", "no end of line"]


def test_a_killed_process_loses_no_line(tmp_path: Path) -> None:
    body = (
        "redact_output()\n"
        "for number in range(2000):\n"
        "    print(number, os.environ['HF_TOKEN'], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    code, _, _ = run(body, tmp_path)
    assert code == -signal.SIGKILL
    for _ in range(200):
        lines = (tmp_path / "out").read_text().splitlines()
        if len(lines) == 2000:
            break
        subprocess.run(["sleep", "0.05"], check=True)
    assert lines == [f"{number} ***" for number in range(2000)]


def test_a_signal_to_the_whole_group_does_not_cut_the_last_words(tmp_path: Path) -> None:
    body = (
        "import signal\n"
        "end = redact_output()\n"
        "def last(*_):\n"
        "    print('last words', os.environ['HF_TOKEN']); end(); os._exit(3)\n"
        "signal.signal(signal.SIGTERM, last)\n"
        "os.killpg(os.getpgrp(), signal.SIGTERM)\n"
        "time.sleep(30)\n"
    )
    code, out, _ = run(body, tmp_path)
    assert (code, out) == (3, "last words ***\n")


@pytest.mark.parametrize("size", [1 << 16, (1 << 20) + 7])
def test_a_line_longer_than_the_buffer_arrives_whole(size: int, tmp_path: Path) -> None:
    _, out, _ = run(f"end = redact_output()\nprint('x' * {size})\nend()\n", tmp_path)
    assert out == "x" * size + "\n"
