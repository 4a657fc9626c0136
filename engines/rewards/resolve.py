"""Find the reward function of `rl.reward.function`: a name, or `path/to/file.py:name`.

Promises: a wrong name, file or option is a `ConfigError` before any process starts, and no user
code runs for the check.
"""

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from engines.config.algorithm import RewardConfig, RewardFunction
from engines.config.options import check_reward, check_reward_function
from engines.config.plugins import REWARDS, RewardRow
from engines.rewards.base import ComputeScore
from infra.errors import ConfigError
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
    is_limited = limits and not any(part.file for part in config.components.values())
    return ResolvedReward(
        replace(row, memory_limit_bytes=max(limits) if is_limited else None),
        {"components": components, "routes": config.routes, "accuracy": config.accuracy},
    )


def _resolve_part(part: RewardFunction, path: str) -> RewardRow:
    row = check_reward_function(part, path)
    if row is not None:
        return row
    assert part.file is not None  # noqa: S101 - no row means a file
    name = part.function_in_file
    return RewardRow(name=part.function, target=f"{_check_file(part.file, name)}:{name}")


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
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return getattr(module, name)


def _check_file(path: Path, name: str) -> Path:
    file = path.expanduser().absolute()
    try:
        tree = parsed_file(file)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(_FIELD, f"{path} is not Python ({error})") from None
    defined = sorted(set(_names_defined(tree)))
    if name not in defined:
        raise ConfigError(
            _FIELD,
            f"{path} does not define {name!r}; it defines: {', '.join(defined) or 'nothing'}",
        )
    return file


def _names_defined(tree: ast.Module) -> list[str]:
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign):
            found += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found += [alias.asname or alias.name for alias in node.names]
    return found
