"""`rlhf merge`: write a policy checkpoint as a Hugging Face directory, without a pipeline.

It runs the job of the stage `merge` in a child process, with a temporary store.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from engines.config.stages.final import MergeStageConfig
from infra import env
from infra.errors import ArtifactError, ConfigError, JobFailedError
from infra.store.artifacts import MANIFEST_NAME, external_artifact, verify_directory
from infra.store.atomic import publish_directory
from infra.store.canonical import sha256_json
from infra.store.process_stamp import own_stamp
from infra.store.stage_log import Holder
from infra.store.stage_spec import StageSpec
from infra.store.storage import open_storage

POLICY_KIND = "policy"


def main(arguments: argparse.Namespace) -> int:
    """Merge one checkpoint."""
    checkpoint = Path(arguments.checkpoint).expanduser().resolve()
    out = Path(arguments.out).expanduser().resolve()
    if not checkpoint.is_dir():
        raise ConfigError(
            "CHECKPOINT",
            f"{checkpoint} is no directory (cwd is {Path.cwd()}); need a policy below "
            "<home>/store/artifacts/policy",
        )
    try:
        kind = verify_directory(checkpoint).kind
    except ArtifactError as error:
        raise ConfigError(
            "CHECKPOINT", f"{error}; need a policy below <home>/store/artifacts/policy"
        ) from None
    if kind != POLICY_KIND:
        raise ConfigError("CHECKPOINT", f"{checkpoint} is a {kind}; need a policy")
    if out.exists():
        raise ConfigError("OUT", f"{out} exists; name a new directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that a rename can publish the result.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        merged = run_merge(
            checkpoint, Path(scratch), arguments.dtype, adapter_only=arguments.adapter_only
        )
        (merged / MANIFEST_NAME).unlink()
        publish_directory(merged, out)
    sys.stdout.write(f"{out}\n")
    return 0


def run_merge(
    checkpoint: Path, scratch: Path, dtype: Literal["float32", "bfloat16"], *, adapter_only: bool
) -> Path:
    """Run the merge job in the empty directory `scratch` and return its output there.

    Raises:
        JobFailedError: the job failed; its log is on stderr.
    """
    state = json.loads((checkpoint / "checkpoint" / "engine.json").read_text(encoding="utf-8"))
    config = MergeStageConfig(backend=state["backend"], dtype=dtype, adapter_only=adapter_only)
    policy = external_artifact(checkpoint)
    holder = Holder(id="merge", process=own_stamp())
    spec = StageSpec(
        stage=config.stage,
        job_module=config.job_module,
        fingerprint=sha256_json(
            {"policy": policy.digest, "dtype": dtype, "adapter_only": adapter_only}
        ),
        attempt=0,
        holder=holder.id,
        config=config.model_dump(mode="json"),
        inputs={"policy": policy},
        seed=0,
        store_uri=str(scratch / "store"),
    )
    storage = open_storage(spec.store_uri)
    storage.attempts.hold(spec.fingerprint, holder, spec.attempt)
    channel = storage.channel(spec.fingerprint)
    channel.write_specification(spec)
    ended = subprocess.run(
        [sys.executable, *spec.job_argv],
        env=env.child_environment(),
        check=False,
    )
    record = storage.lookup(spec.fingerprint)
    if record is None:
        problem = channel.read_error(spec.attempt)
        reason = problem.message if problem else f"ended with exit code {ended.returncode}"
        raise JobFailedError(f"merge: {reason}")
    return storage.local_copy(record.artifact)
