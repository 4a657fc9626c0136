"""Decides which project code can change a result, and so counts for the stages that import it.

Promises: everything that a job imports counts, except what is listed here with its reason.
"""

from collections.abc import Mapping, Sequence
from functools import cache

from infra.identity.fingerprint import source_closure

UNCOUNTED: Mapping[str, str] = {
    "infra": "moves bytes that digests verify, starts processes, tells people",
    "engines.config.base": "what a configuration says counts by its values",
    "engines.config.stages": "the same; a stage more is no change of the others",
    "engines.config.rows": "tables of names; what a stage names of them counts",
    "engines.config.rules": "only refuses",
    "engines.config.backends": "a table of names; what a stage names of it counts",
    "engines.config.plugins": "a table of names; what a stage names of it counts",
    "engines.errors": "wording",
    "engines.jobs.process.causes": "wording",
    "engines.jobs.process.runtime": "specification in, published artifact out",
    "engines.trainers.loop.phases": "measures time",
    "hardware.detection": "chooses a platform",
    "hardware.platforms": "a table of names",
    "hardware.cpu_megatron": "counts for stages of that backend",
    "hardware.cpu_torchtitan": "counts for stages of that backend",
}
"""Modules and packages that cannot change a result, with the reason."""

COUNTED: Mapping[str, str] = {
    "infra.store.canonical": "writes files of artifacts",
    "infra.tracking.comparison": "says which of two models is better",
    "infra.tracking.promotion": "says whether a model beats the incumbent, and what it becomes",
}
"""Exceptions to `UNCOUNTED`, with the reason."""


def numeric_sources(roots: Sequence[str]) -> dict[str, str]:
    """Return sha256 by module that the `roots` reach and that can change a result, sorted.

    Read once per process; a job compares the files with these digests before it begins.
    """
    return dict(_closure(tuple(sorted(set(roots)))))


@cache
def _closure(roots: tuple[str, ...]) -> dict[str, str]:
    return source_closure(roots, counts=_counts)


def _counts(module: str) -> bool:
    if module in COUNTED:
        return True
    parts = module.split(".")
    return not any(".".join(parts[:length]) in UNCOUNTED for length in range(1, len(parts) + 1))
