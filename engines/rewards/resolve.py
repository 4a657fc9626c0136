"""Reward functions by what `rl.reward.function` says: a name, or `path/to/file.py:name`.

Promises: a wrong name, file or option is a `ConfigError` before any process starts, and no user
code runs to find that out.
"""

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from engines.config.algorithm import RewardConfig
from engines.config.options import check_reward
from engines.config.plugins import REWARDS, RewardRow
from engines.rewards.base import ComputeScore
from infra.errors import ConfigError
from infra.plugins import load_target

_FIELD = REWARDS.setting


def resolve(config: RewardConfig) -> RewardRow:
    """The function that a configuration names, checked without running it.

    Args:
        config: its `function` and `kwargs`.

    Returns:
        Where the function is, and how it may be run; of a file, `/absolute/file.py:function`.

    Raises:
        UnknownPluginError: no function has that name.
        ConfigError: two have it, the file or the function in it is absent, or an option is
            unknown.
    """
    row = check_reward(config)
    if row is not None:
        return row
    assert config.file is not None  # noqa: S101 - no row means a file
    name = config.function_in_file
    return RewardRow(name=config.function, target=f"{_check_file(config.file, name)}:{name}")


def load(target: str) -> ComputeScore:
    """Import a function. Runs the code of its module, which may import what lies beside it.

    Args:
        target: `module:function` or `/absolute/file.py:function`.

    Returns:
        The function.
    """
    path, _, name = target.rpartition(":")
    if not path.endswith(".py"):
        return load_target(target)
    spec = spec_from_file_location(f"reward_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(_FIELD, f"got {target!r}; need a Python file")
    module = module_from_spec(spec)
    sys.path.insert(0, str(Path(path).parent))
    spec.loader.exec_module(module)
    return getattr(module, name)


def _check_file(path: Path, name: str) -> Path:
    file = path.expanduser().absolute()
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
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
