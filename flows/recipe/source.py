"""Reads recipe and suite files as plain data: strict YAML, `extends`, and dotted overrides.

Promises: nothing in a file can run code. Duplicate keys (both lines are named), tags, and documents
that are too large, too deep or expand too far through aliases are refused; `refuse_secrets` refuses
credentials. `1e-5` is a number. Neither pydantic nor torch is imported: `rlhf --help` stays fast.
Does not promise: that the data are a valid recipe; see `flows.recipe.recipe`. An override of an
unknown key is refused there.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from infra.errors import ConfigError
from infra.names import unknown_name
from infra.redact import looks_secret

RECIPES_DIR = Path(__file__).resolve().parents[1] / "recipes"
SUITES_DIR = Path(__file__).resolve().parents[1] / "suites"
MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 20
MAX_NODES = 10_000
MAX_EXTENDS = 5

_ALLOWED_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")
)


class _Loader(yaml.SafeLoader):
    """SafeLoader without dates, and with `1e-5` as a number (YAML 1.2)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def shipped_names(directory: Path) -> list[str]:
    """Return the names of the files in `RECIPES_DIR` or `SUITES_DIR`."""
    return sorted(path.stem for path in directory.glob("*.yaml"))


def _find(what: str, directory: Path, name_or_path: str) -> Path:
    """Return the file of a shipped name, or of a path (with a YAML suffix or a directory).

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        if not path.is_file():
            raise ConfigError(
                what, f"{name_or_path} is no file (cwd is {Path.cwd()}); need a YAML file"
            )
        return path.resolve()
    names = shipped_names(directory)
    if name_or_path not in names:
        raise ConfigError(what, unknown_name(name_or_path, [*names, f"path/to/{what}.yaml"]))
    return directory / f"{name_or_path}.yaml"


_find_recipe = partial(_find, "recipe", RECIPES_DIR)
_find_suite = partial(_find, "suite", SUITES_DIR)


def read_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe as plain data, merged over its bases and with overrides applied.

    Arguments as for `load_recipe`; raises `ConfigError` if anything cannot be read.
    """
    return with_overrides(_read_with_bases(_find_recipe(name_or_path), _find_recipe), overrides)


def with_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply overrides to a recipe as plain data.

    Raises:
        ConfigError: an override, or a suite that it names, cannot be read.
    """
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError("--set", f"got {dotted!r}; need path.to.key=value")
        data = with_suites(_with_value(data, keys, parse_yaml(text, f"--set {dotted}"), ""))
    return data


def with_suites(data: dict[str, Any]) -> dict[str, Any]:
    """Replace suites that are given by name with the content of their files.

    Raises:
        ConfigError: a suite's file or one of its bases cannot be read.
    """
    suites = data.get("suites")
    if not isinstance(suites, Mapping):
        return data
    read = {
        name: _read_with_bases(_find_suite(suite), _find_suite) if isinstance(suite, str) else suite
        for name, suite in suites.items()
    }
    return {**data, "suites": read}


def parse_yaml(text: str, name: str) -> Any:
    """Parse one YAML document into plain data; None if it is empty. Errors begin with `name`.

    Raises:
        ConfigError: it is not YAML, too large or deep, or has a duplicate or odd key or a tag.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_FILE_BYTES:
        raise ConfigError(name, f"larger than {MAX_FILE_BYTES // 1024} KiB; this is no recipe")
    try:
        node = yaml.compose(text, _Loader)
        return None if node is None else _Builder(name).build(node, depth=0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(where, f"not YAML ({error.problem or error.context})") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(name, f"not YAML ({str(error).splitlines()[0]})") from None


class _Builder:
    """Turns a node graph into data, and counts nodes with aliases expanded."""

    def __init__(self, name: str) -> None:
        self._loader = _Loader("")  # for its rules of what a scalar is
        self._name = name
        self._num_nodes = 0

    def build(self, node: yaml.Node, depth: int) -> Any:
        where = f"{self._name}:{node.start_mark.line + 1}"
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise ConfigError(where, f"more than {MAX_NODES} values after expanding its aliases")
        if depth > MAX_DEPTH:
            raise ConfigError(where, f"nested deeper than {MAX_DEPTH} levels")
        if node.tag not in _ALLOWED_TAGS:
            raise ConfigError(where, f"tag not allowed: {node.tag}; write a plain value")
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, depth + 1) for child in node.value]
        if not isinstance(node, yaml.MappingNode):
            return self._loader.construct_object(node)
        data: dict[str, Any] = {}
        first_lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self.build(key_node, depth + 1)
            if not isinstance(key, str):
                raise ConfigError(f"{self._name}:{line}", f"key {key!r} is not text; quote it")
            if key in first_lines:
                raise ConfigError(
                    f"{self._name}:{line}",
                    f"duplicate key {key!r} (first on line {first_lines[key]}); remove one",
                )
            first_lines[key] = line
            data[key] = self.build(value_node, depth + 1)
        return data


def _read_with_bases(
    path: Path, find: Callable[[str], Path], seen: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Read a file as plain data, merged over its bases; `seen` are the files that extend it."""
    if path in seen or len(seen) >= MAX_EXTENDS:
        chain = " -> ".join(each.name for each in (*seen, path))
        raise ConfigError(
            f"{path.name}: extends", f"circular, or more than {MAX_EXTENDS} levels: {chain}"
        )
    try:
        data = parse_yaml(path.read_bytes().decode("utf-8"), path.name)
    except UnicodeDecodeError as error:
        raise ConfigError(path.name, f"byte {error.start} is not UTF-8") from None
    if not isinstance(data, dict):
        raise ConfigError(path.name, "need a mapping of recipe fields; see `rlhf recipes`")
    base = data.pop("extends", None)
    if find is _find_recipe:  # before merging, so that this file can change parts of a suite
        data = with_suites(data)
    if base is None:
        return data
    if not isinstance(base, str):
        raise ConfigError(f"{path.name}: extends", f"got {base!r}; need a recipe name or a path")
    beside = path.parent / base
    below = _read_with_bases(
        beside.resolve() if beside.is_file() else find(base), find, (*seen, path)
    )
    return overlay(below, data)


def overlay(below: Any, above: Any) -> Any:
    """Merge `above` into `below`; mappings merge, everything else replaces."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{key: overlay(below.get(key), value) for key, value in above.items()}}


def _with_value(level: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """Return a copy of `level` with a value at the end of the keys; missing mappings are created.

    The value is merged into a mapping, but replaces an entry of a list.
    """
    if not keys:
        return overlay(level, value)
    key, *rest = keys
    if isinstance(level, list):
        if not key.isdigit() or int(key) >= len(level):
            raise ConfigError(
                f"{path}.{key}", f"{path} has {len(level)} entries; need the index of one, from 0"
            )
        at = int(key)
        changed = _with_value(level[at] if rest else None, rest, value, f"{path}.{key}")
        return [*level[:at], changed, *level[at + 1 :]]
    mapping = level if isinstance(level, Mapping) else {}
    path = f"{path}.{key}" if path else key
    return {**mapping, key: _with_value(mapping.get(key), rest, value, path)}


_REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)@(?P<alias>[^/@]+)")


def registered_model(setting: str, path: str) -> tuple[str, str] | None:
    """Return name and alias if `path` names a model in the registry of the recipe's tracker.

    Raises:
        ConfigError: it begins with `models:` and is malformed.
    """
    if not path.startswith("models:"):
        return None
    found = _REGISTERED.fullmatch(path)
    if found is None:
        raise ConfigError(
            setting,
            f"got {path!r}; need models:/NAME@ALIAS (models:/quickstart@champion); a version has "
            "to bear an alias: give it one",
        )
    return found["name"], found["alias"]


_SECRET_KEY = re.compile(
    r"(?i)(^|_)(password|passwd|secret|api_?key|access_key|credentials?)$"
    r"|^((auth|access|hf|api|bearer|tracking)_)?token$"
)
_VARIABLE_BY_SECTION: Mapping[str, str] = {
    "location": "MLFLOW_TRACKING_TOKEN",
    "tracking": "MLFLOW_TRACKING_TOKEN",
    "model": "HF_TOKEN",
    "data": "HF_TOKEN",
}


def refuse_secrets(data: Any, path: str = "recipe") -> None:
    """Refuse text in plain data that looks like a credential, or has a key that names one.

    Raises:
        ConfigError: names the place, never the value.
    """
    if isinstance(data, str) and looks_secret(data):
        raise _secret_error(path)
    if isinstance(data, Mapping):
        for key, value in data.items():
            refuse_secrets(key, f"a key of {path}")
            where = str(key) if path == "recipe" else f"{path}.{key}"
            if isinstance(value, str) and value and _SECRET_KEY.search(str(key)):
                raise _secret_error(where)
            refuse_secrets(value, where)
    elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
        for index, value in enumerate(data):
            refuse_secrets(value, f"{path}.{index}")


def _secret_error(path: str) -> ConfigError:
    variable = _VARIABLE_BY_SECTION.get(path.partition(".")[0])
    remedy = f"set {variable}" if variable else "set the environment variable of the service"
    return ConfigError(path, f"secrets do not go into config files; {remedy}")
