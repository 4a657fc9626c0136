"""Reward functions by the name that `rl.reward.function` gives them.

A name is built in (`exact`, `math`) or other people's (`infra.plugins`: an entry point
`reward.<name>`, `register_plugin`), or it is a file: `path/to/file.py:name` (`:compute_score` when
left out).
Promises: a name with two owners is an error; a wrong name, file or option is a `ConfigError`
before any process starts, and no user code runs to find that out.
"""

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from engines.config.algorithm import RewardConfig
from engines.config.plugins import BUILT_IN, check_plugin
from engines.rewards.base import ComputeScore
from infra.errors import ConfigError
from infra.plugins import outside_plugins

DEFAULT_FUNCTION = "compute_score"
_FIELD = "rl.reward.function"
_FILE_SUFFIX = ".py"


@dataclass(frozen=True)
class RewardFunction:
    """Where a reward function is, and how it may be run.

    Attributes:
        target: `module:function` or `/absolute/file.py:function`.
        in_process: it is pure, fast and cannot hang, so it needs no process of its own.
        options: keyword arguments it takes; None leaves them unchecked.
        memory_limit_bytes: address space of its process; None sets no limit.
    """

    target: str
    in_process: bool = False
    options: tuple[str, ...] | None = None
    memory_limit_bytes: int | None = None


_OWN: Mapping[str, RewardFunction] = {
    "exact": RewardFunction(
        BUILT_IN["reward"]["exact"].target,
        in_process=True,
        options=("answer_delimiter", "ignore_case"),
    ),
    "math": RewardFunction(
        BUILT_IN["reward"]["math"].target,
        options=("num_decimals",),
        # A power tower in an answer must end in MemoryError, not take the machine down.
        memory_limit_bytes=4 * 2**30,
    ),
}


def names() -> tuple[str, ...]:
    """Names of functions, sorted; other people's included."""
    return tuple(sorted({*_OWN, *(plugin.name for plugin in outside_plugins("reward"))}))


def resolve(config: RewardConfig) -> RewardFunction:
    """The function that a configuration names, checked without running it.

    Args:
        config: its `function` and `kwargs`.

    Returns:
        Where the function is.

    Raises:
        UnknownPluginError: no function has that name.
        ConfigError: two have it, the file or the function in it is absent, or an option is
            unknown.
    """
    path, name = _split(config.function)
    if path is not None:
        return RewardFunction(f"{_check_file(path, name)}:{name}")
    if check_plugin("reward", name, _FIELD) is None:
        function = next(
            RewardFunction(o.target) for o in outside_plugins("reward") if o.name == name
        )
    else:
        function = _OWN[name]
    for option in config.kwargs:
        if function.options is not None and option not in function.options:
            raise ConfigError(
                f"rl.reward.kwargs.{option}",
                f"not an option of {config.function}; known: {', '.join(function.options)}",
            )
    return function


def load(target: str) -> ComputeScore:
    """Import a function. Runs the code of its module, which may import what lies beside it.

    Args:
        target: `module:function` or `/absolute/file.py:function`.

    Returns:
        The function.
    """
    path, name = _split(target)
    if path is None:
        module_name, _, name = target.partition(":")
        return getattr(import_module(module_name), name)
    spec = spec_from_file_location(f"reward_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(_FIELD, f"got {target!r}; need a Python file")
    module = module_from_spec(spec)
    sys.path.insert(0, str(Path(path).parent))
    spec.loader.exec_module(module)
    return getattr(module, name)


def _split(function: str) -> tuple[str | None, str]:
    """The file and the function's name; (None, ...) for a registered name."""
    path, _, name = function.rpartition(":")
    if path.endswith(_FILE_SUFFIX) and name:
        return path, name
    return (function, DEFAULT_FUNCTION) if function.endswith(_FILE_SUFFIX) else (None, function)


def _check_file(path: str, name: str) -> Path:
    file = Path(path).expanduser().absolute()
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except FileNotFoundError:
        raise ConfigError(_FIELD, f"{path} does not exist (cwd is {Path.cwd()})") from None
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
