"""The child process of the engine: SGLang's HTTP server, which ends with the process that owns it.

`python -m engines.rollout.sglang.server_main DIRECTORY`, with the arguments of `ServerArgs` in
`DIRECTORY/arguments.json`. A secret is in the environment, never in the arguments.
Promises: arguments that SGLang refuses, and a model that it would compute otherwise than
transformers, are answered by `DIRECTORY/refusal` and an end; when the owner is gone, however it
went, the whole process group is killed within `POLL_S` and what it has left in memory and in the
directory is removed.
Does not promise an orderly end then: nobody is left to serve.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from engines.rollout.sglang.options import NUM_HELD_BACK
from engines.rollout.sglang.stand_ins import install
from infra import env

ARGUMENTS, REFUSAL = "arguments.json", "refusal"
POLL_S = 0.5
SHARED_MEMORY = "/dev/shm/sglang_"  # noqa: S108  a beginning of names, not a file

# Here and not in `main`: SGLang starts its other processes from this module again, as
# multiprocessing's method "spawn" does, before they import anything of it.
if env.SGLANG_USE_CPU_ENGINE.get():
    install()


def shared_memory_of(pid: int) -> set[Path]:
    """What a server has mapped of `/dev/shm`, which SGLang does not remove when it is killed.

    Args:
        pid: of its first process; it may be gone.

    Returns:
        Files, which may be gone as well.
    """
    found: set[Path] = set()
    with suppress(psutil.Error):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.Error, NotImplementedError):
                found |= {Path(each.path) for each in process.memory_maps()}
    return {path for path in found if str(path).startswith(SHARED_MEMORY)}


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone already."""
    for path in paths:
        path.unlink(missing_ok=True)


def main() -> None:
    """Serve until the owner ends us, or is gone."""
    directory = Path(sys.argv[1])
    owner = os.getppid()
    threading.Thread(
        target=_end_with, args=(owner, directory), name="watch-owner", daemon=True
    ).start()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.plugins import load_plugins

    load_plugins()
    arguments = json.loads((directory / ARGUMENTS).read_text(encoding="utf-8"))
    try:
        server_args = _accepted(arguments)
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        (directory / REFUSAL).write_text(" ".join(str(error).split()), encoding="utf-8")
        raise
    launch_server(server_args)


def _accepted(arguments: dict[str, Any]) -> Any:
    from sglang.srt.server_args import ServerArgs

    made = ServerArgs(**arguments, api_key=env.RLHF_SGLANG_KEY.require())
    made.resolve_once()
    check_window(Path(made.model_path), made.context_length - NUM_HELD_BACK, _model_class)
    return made


def check_window(
    hf_dir: Path, context_length: int, model_class: Callable[[str], type[Any]]
) -> None:
    """Refuse a model whose sliding window SGLang passes over without a word.

    SGLang 0.5 has a class of its own for each architecture; those without the method that says how
    wide the window is, Mistral's for one, attend to everything.

    Args:
        hf_dir: model directory.
        context_length: tokens of the longest sequence.
        model_class: SGLang's, by the architecture; asked for where a window is shorter.

    Raises:
        ValueError: the window would matter.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config: Any = AutoConfig.from_pretrained(
        hf_dir, trust_remote_code=False, local_files_only=True
    ).get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or window >= context_length or (kinds and "sliding_attention" not in kinds):
        return
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    if not hasattr(model_class(name), "get_attention_sliding_window_size"):
        raise ValueError(
            f"it computes {name} without its sliding window of {window} tokens; set max_model_len "
            "to that, or choose another engine"
        )


def _model_class(name: str) -> type[Any]:
    from sglang.srt.models.registry import ModelRegistry

    return ModelRegistry.resolve_model_cls([name])[0]


def _end_with(owner: int, directory: Path) -> None:
    while os.getppid() == owner:
        time.sleep(POLL_S)
    remove(shared_memory_of(os.getpid()))
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
