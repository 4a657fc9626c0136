"""Job `soup`: averages the weights of several models (arXiv:2203.05482 sec. 3).

Promises: at most two tensors are in memory besides those the caller keeps; the sum is in float32 in
the order of the models, so that the same models give the same bytes.
Does not promise a good model: for that the models must share a starting point.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engines.checkpoint.export import write_model
from engines.config.stages.final import SoupStageConfig
from engines.config.training import HardwareConfig
from engines.jobs.process.policy import write_hf_files
from engines.jobs.process.runtime import DEADLINES_S, JobContext, JobOutput, run_job
from engines.jobs.process.torch_setup import prepare_torch
from infra.errors import ConfigError


def soup(context: JobContext[SoupStageConfig]) -> JobOutput:
    """Average the weights of the input models."""
    config = context.config
    # Without a device, so that the result is the same on every machine.
    prepare_torch(HardwareConfig(platform="cpu"), 1, context.journal.log)
    models = [context.input(config.input_name(place)) for place in range(config.num_models)]
    hf_dir = context.attempt_dir / "hf"
    write_hf_files(models[0], hf_dir, None)
    context.heartbeat.enter("merge", DEADLINES_S["merge"])
    with context.clock("save"):
        write_model(
            mean_tensors(models), hf_dir, context.output_dir, config.dtype, config.max_shard_bytes
        )
    return JobOutput("model", {"num_models": float(config.num_models)})


def mean_tensors(model_dirs: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the float32 mean of every weight, in the order of the first model's files.

    Weights that are not floating point are yielded unchanged. Raises `ConfigError` if the models
    have different weights, or such weights differ.
    """
    with ExitStack() as stack:
        opened = [_opened(directory, stack) for directory in model_dirs]
        first, *others = opened
        for directory, other in zip(model_dirs[1:], others, strict=True):
            for name in sorted(first.keys() | other.keys()):
                shape, needed = (
                    tuple(held[name].get_slice(name).get_shape()) if name in held else "none"
                    for held in (other, first)
                )
                if shape != needed:
                    raise ConfigError(
                        "soup",
                        f"{directory} has {shape} as {name}, the first model {needed}; need "
                        "models of one architecture",
                    )
        for name in first:
            total = first[name].get_tensor(name)
            if not total.is_floating_point():
                if not all(torch.equal(total, other[name].get_tensor(name)) for other in others):
                    raise ConfigError(
                        "soup",
                        f"the models differ in {name}, a {total.dtype} tensor without an average; "
                        "choose models with equal ones",
                    )
                yield name, total
                continue
            total = total.to(torch.float32, copy=True)
            for other in others:
                total += other[name].get_tensor(name)
            yield name, total.div_(len(opened))


def _opened(directory: Path, stack: ExitStack) -> dict[str, safe_open]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        file = stack.enter_context(safe_open(path, framework="pt"))
        found.update(dict.fromkeys(file.keys(), file))
    return found


if __name__ == "__main__":
    run_job(SoupStageConfig, soup)
