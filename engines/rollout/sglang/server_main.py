"""SGLang's HTTP server as a child process that ends with its owner.

`python -m engines.rollout.sglang.server_main DIRECTORY` reads the arguments of `ServerArgs` from
`DIRECTORY/arguments.json`. Secrets are passed only in the environment.
Promises: arguments that SGLang refuses, and models that it would compute differently from
transformers, are reported in `DIRECTORY/refusal`. When the owner is gone, the process group is
killed within `POLL_S`, and its shared memory and directory are removed.
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
SHARED_MEMORY = "/dev/shm/sglang_"  # noqa: S108  a prefix of names, not a file

# At import and not in `main`: SGLang spawns its other processes, which import this module first.
if env.SGLANG_USE_CPU_ENGINE.get():
    install()


def shared_memory_of(pid: int) -> set[Path]:
    """Return the files in `/dev/shm` that a process has mapped; a killed SGLang leaves them."""
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
    """Serve until the owner ends this process, or is gone."""
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
    """Refuse, with a ValueError, a model whose sliding window SGLang would silently ignore.

    SGLang 0.5 has a class per architecture; those without a method that returns the window, such as
    Mistral's, attend to everything.
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
