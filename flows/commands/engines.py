"""`rlhf engines`: tables of training and rollout engines, with their features and tests.

Promises: the tables are made without an import of torch or of a plugin's target.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from engines.config.backends import BACKENDS, ENGINES, Backend, Tested
from engines.config.options import schema_of
from engines.config.plugins import ROLLOUT_ENGINES
from engines.config.rollout import RoutingName
from infra.errors import ConfigError
from infra.plugins import RUN_TIME_OWNER, PluginTable, Row, import_external_modules

HEADINGS = ("backend", "model type", "device", "parallelism", "features", "needs")
OUTSIDE = "plugin"
_LANGUAGE_MODEL_ONLY = frozenset({"vlm"})
"""Features that value models do not have."""
_LIMITS: Mapping[str, str] = {
    "fsdp": "builds the whole model on each rank before sharding",
    "megatron": "llama, qwen2, qwen3 and qwen3_moe; no DoRA, with TransformerEngine no adapter",
    "veomni": "causal text models of VeOmni whose weights need no conversion",
    "automodel": "with tensor parallelism no adapter, no ulysses, and logits of all predicted "
    "tokens at once",
    "torchtitan": "dense qwen3 and llama; trains all weights",
}
"""Limits of each backend; kept here so that the text is not part of a job's sources."""


@dataclass(frozen=True)
class MatrixRow:
    """One engine on one device; the fields are in the order of `HEADINGS`.

    Attributes:
        model_type: `language_model` or `value_model`.
        device: torch device type, and whether a test runs on it.
        parallelism: dimensions, grouped by how they are tested.
        needs: what has to be installed, and limits of the backend.
    """

    backend: str
    model_type: str
    device: str
    parallelism: str
    features: str
    needs: str


def engine_matrix(*, installed: bool) -> Iterator[MatrixRow]:
    """Yield a row for every engine, built-in backends first.

    Args:
        installed: also report what is missing on this machine, and list outside plugins; False
            gives the same rows on every machine.
    """
    for name, backend in BACKENDS.items():
        for model_type in backend.targets:
            without = _LANGUAGE_MODEL_ONLY if model_type == "value_model" else frozenset()
            features = {k: how for k, how in backend.features.items() if k not in without}
            for device, tested in backend.devices.items():
                yield MatrixRow(
                    name,
                    model_type,
                    device if tested is not Tested.GPU else f"{device} (one rank: {tested.value})",
                    _grouped(backend.parallelism, tested),
                    _grouped(features, tested),
                    _needs(name, backend, installed=installed),
                )
    for row in ENGINES.outside() if installed else ():
        name, _, model_type = row.name.partition(".")
        model_type, devices = model_type or "language_model", ", ".join(row.devices) or "any"
        yield MatrixRow(name, model_type, devices, OUTSIDE, OUTSIDE, _brought(row))


ROLLOUT_HEADINGS = ("rollout engine", "capabilities", "several replicas", "options", "needs")
_ROUTINGS: Mapping[RoutingName, str] = {
    "by_place": "each its own places of a batch",
    "least_loaded": "the least loaded takes the next",
}


@dataclass(frozen=True)
class RolloutMatrixRow:
    """One rollout engine; the fields are in the order of `ROLLOUT_HEADINGS`.

    Attributes:
        capabilities: capabilities beyond the contract; some depend on options and platform.
        needs: what has to be installed and, if it was looked up, whether it is.
    """

    engine: str
    capabilities: str
    routing: str
    options: str
    needs: str


def rollout_matrix(*, installed: bool) -> Iterator[RolloutMatrixRow]:
    """Yield a row for every rollout engine; `installed` is as in `engine_matrix`."""
    for row in (*ROLLOUT_ENGINES.rows, *(ROLLOUT_ENGINES.outside() if installed else ())):
        schema = schema_of(row, ROLLOUT_ENGINES.setting) if row.is_ours else None
        needs = [] if row.is_ours else [_brought(row)]
        if row.environment:
            needs.append(f"its own environment: make env-{row.environment}")
        if installed and row.requires:
            needs.append("installed" if _is_usable(ROLLOUT_ENGINES, row.name) else "not installed")
        yield RolloutMatrixRow(
            row.name,
            ", ".join(row.capabilities),
            _ROUTINGS[row.routing],
            ", ".join(schema.model_fields) if schema else "",
            "; ".join(needs),
        )


def _brought(row: Row) -> str:
    return row.owner if row.owner == RUN_TIME_OWNER else f"by {row.owner}"


def _grouped(claims: Mapping[str, Tested], on_device: Tested) -> str:
    """Return text such as `contract: data, tensor; gpu: context`."""
    groups: dict[str, list[str]] = {}
    for claim, tested in claims.items():
        how = on_device if on_device is Tested.REGISTRY else tested
        if on_device is Tested.GPU and tested is not Tested.GPU:
            how = Tested.CPU_TWIN
        groups.setdefault(how.value, []).append(claim)
    return "; ".join(f"{how}: {', '.join(names)}" for how, names in groups.items())


def _needs(name: str, backend: Backend, *, installed: bool) -> str:
    parts = []
    if backend.environment:
        parts.append(f"its own environment: make env-{backend.environment}")
    elif backend.extra and not (installed and _is_usable(ENGINES, name)):
        parts.append(f"pip install 'rlhf-pipeline[{backend.extra}]'")
    if name in _LIMITS:
        parts.append(_LIMITS[name])
    return "; ".join(parts)


def _is_usable(table: PluginTable[Any], name: str) -> bool:
    try:
        table.find(name)
    except ConfigError:
        return False
    return True


PIPE_WIDTH = 240
"""Columns of output that is not a terminal, so that nothing is cut."""
MEANINGS = {
    Tested.CONTRACT.value: "contract tests on CPU process groups, in continuous integration",
    Tested.ENVIRONMENT.value: "the same, inside the backend's own environment",
    Tested.RANKS.value: "tests of its own on CPU process groups, in continuous integration",
    Tested.GPU.value: "a test under tests/gpu that needs an accelerator",
    Tested.CPU_TWIN.value: "the same code by the contract tests on CPU; not on the device itself",
    Tested.REGISTRY.value: "found, and says what it lacks; no such device was at hand",
    OUTSIDE: "brought by another package, which answers for it",
}


def main(arguments: argparse.Namespace) -> int:
    """Print both tables; name external modules that cannot be imported on stderr."""
    rows, engines = list(engine_matrix(installed=True)), list(rollout_matrix(installed=True))
    if arguments.json:
        plain = {"training": [*map(asdict, rows)], "rollout": [*map(asdict, engines)]}
        sys.stdout.write(json.dumps(plain, indent=1) + "\n")
    else:
        console = Console()
        if not console.is_terminal:
            console.width = PIPE_WIDTH
        cells, above = [], ""
        training = folded(rows)
        for row in training:
            cells.append(("" if row.backend == above else row.backend, *astuple(row)[1:-1]))
            above = row.backend
        console.print(_table(HEADINGS[:-1], cells))
        console.print()
        for line in dict.fromkeys(f"{row.backend}: {row.needs}" for row in training if row.needs):
            console.print(line, highlight=False)
        console.print()
        for how, meaning in MEANINGS.items():
            console.print(f"{how}: {meaning}", highlight=False)
        console.print()
        console.print(_table(ROLLOUT_HEADINGS, map(astuple, engines)))
    sys.stderr.writelines(f"{broken}\n" for broken in import_external_modules())
    return 0


def _table(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    table = Table(
        *(Column(heading, overflow="fold") for heading in headings), box=None, pad_edge=False
    )
    for row in rows:
        table.add_row(*row)
    return table


def folded(rows: list[MatrixRow]) -> list[MatrixRow]:
    """Join rows that differ only in the model type; the joined `model_type` lists all of them."""
    groups: dict[MatrixRow, list[str]] = {}
    for row in rows:
        groups.setdefault(replace(row, model_type=""), []).append(row.model_type)
    return [replace(row, model_type=", ".join(types)) for row, types in groups.items()]
