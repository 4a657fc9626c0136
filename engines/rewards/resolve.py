"""Find the reward function of `rl.reward.function`: a name, `path/to/file.py:name`, or a mixture.

Reward `mixture` is a weighted sum of other rewards, chosen by the row's `data_source`.
Promises: a wrong name, file or built-in option is a `ConfigError` before a process starts; no user
code runs for the check. Each component of a mixture is called as it would be alone. A sample that
one component leaves unscored is unscored, since a partial sum is another reward. The deadline is
per sample.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from engines.config.algorithm import RewardConfig, RewardFunction
from engines.config.options import check_reward, check_reward_function
from engines.config.plugins import REWARDS, RewardRow
from engines.rewards.base import (
    ANSWER,
    ComputeScore,
    Form,
    Score,
    ScoreRequest,
    form_of,
    is_correct,
    judge,
)
from infra.errors import ConfigError, on_failure
from infra.identity.fingerprint import parsed_file
from infra.plugins import load_target

_FIELD = REWARDS.setting


@dataclass(frozen=True)
class ResolvedReward:
    """A configured reward, checked; `kwargs` of a mixture contain its components' targets."""

    function: RewardRow
    kwargs: Mapping[str, Any]


def resolve(config: RewardConfig) -> ResolvedReward:
    """Return the configured function (a file as `/absolute/file.py:function`), without running it.

    Raises:
        UnknownPluginError: no function has that name.
        ConfigError: two functions have it, the file or its function is missing, or an option is
            unknown.
    """
    row = check_reward(config)
    parts = {path: _resolve_part(part, path) for path, part in config.parts.items()}
    if row is None or not config.components:
        return ResolvedReward(parts["rl.reward"], config.kwargs)
    rows = [parts[f"rl.reward.components.{name}"] for name in config.components]
    components = {
        name: {"target": of_part.target, "kwargs": part.kwargs, "weight": part.weight}
        for (name, part), of_part in zip(config.components.items(), rows, strict=True)
    }
    limits = [each.memory_limit_bytes for each in rows if each.memory_limit_bytes is not None]
    # A user's file may need more memory than any built-in reward.
    if any(part.file for part in config.components.values()):
        limits = []
    return ResolvedReward(
        replace(row, memory_limit_bytes=max(limits, default=None)),
        {"components": components, "routes": config.routes, "accuracy": config.accuracy},
    )


def _resolve_part(part: RewardFunction, path: str) -> RewardRow:
    row = check_reward_function(part, path)
    if row is not None:
        return row
    assert part.file is not None  # noqa: S101 - no row means a file
    file, name = part.file.expanduser().absolute(), part.function_in_file
    try:
        tree = parsed_file(file)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(_FIELD, f"{part.file} is not Python ({error})") from None
    defined: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name for alias in node.names}
    if name not in defined:
        names = ", ".join(sorted(defined)) or "nothing"
        raise ConfigError(_FIELD, f"{part.file} does not define {name!r}; it defines: {names}")
    return RewardRow(name=part.function, target=f"{file}:{name}")


def load(target: str) -> ComputeScore:
    """Import `module:function` or `/absolute/file.py:function`, which runs the module's code."""
    path, _, name = target.rpartition(":")
    if not path.endswith(".py"):
        return load_target(target)
    module_name = f"reward_{Path(path).stem}_{sha256(path.encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(_FIELD, f"got {target!r}; need a Python file")
    module = module_from_spec(spec)
    sys.path.insert(0, str(Path(path).parent))
    # Dataclasses look their module up in sys.modules while its code runs.
    sys.modules[module_name] = module
    with on_failure(lambda _: sys.modules.pop(module_name)):
        spec.loader.exec_module(module)
    return getattr(module, name)


OTHERS = "*"
"""`data_source` of the route for every value without a route of its own."""


def mixture(
    sample: ScoreRequest,
    *,
    components: Mapping[str, Mapping[str, Any]],
    routes: Mapping[str, Sequence[str]],
    accuracy: Sequence[str],
) -> dict[str, Any]:
    """Return `score`, the sum; each component's score by its name; `acc`; and `pred` if given.

    Args:
        components: `target` (see `resolve.load`), `kwargs` and `weight` of each, by name.
        routes: component names by `data_source`; if empty, all components judge every sample.
        accuracy: components that decide `acc` and `pred`: their `acc`, or a score >= 1.

    Raises:
        ValueError: the row has no route, or a component gives no score.
    """
    found: dict[str, Score] = {}
    for name in route_of(sample.data_source, routes, tuple(components)):
        function, form = _function(components[name]["target"])
        judged = judge(function, form, sample, components[name]["kwargs"])
        if not isinstance(judged, Score):
            raise ValueError(f"component {name} {judged.reason}")
        found[name] = judged
    total = sum(components[name]["weight"] * each.value for name, each in found.items())
    own = {name: each.value for name, each in found.items()}
    [verdict] = [each for name, each in found.items() if name in accuracy]
    said = {} if verdict.answer is None else {ANSWER: verdict.answer}
    return {**own, **said, "score": total, "acc": float(is_correct(verdict))}


def route_of(
    data_source: str, routes: Mapping[str, Sequence[str]], components: Sequence[str]
) -> Sequence[str]:
    """Return the components for a `data_source`; ValueError if routes exist, but none for it."""
    if not routes:
        return components
    names = routes.get(data_source, routes.get(OTHERS))
    if names is None:
        raise ValueError(f"no route for data_source {data_source!r}; routes: {', '.join(routes)}")
    return names


def check_data_sources(config: RewardConfig, data_sources: Iterable[str]) -> None:
    """Raise ConfigError that names the first row without a route."""
    for row, data_source in enumerate(data_sources):
        try:
            route_of(data_source, config.routes, tuple(config.components))
        except ValueError as error:
            raise ConfigError(
                "rl.reward.routes", f"row {row}: {error}; add it, or a route named {OTHERS!r}"
            ) from None


@lru_cache(maxsize=64)
def _function(target: str) -> tuple[Callable[..., Any], Form]:
    function = load(target)
    return function, form_of(function)
