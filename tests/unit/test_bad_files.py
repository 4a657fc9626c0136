"""What a bad file costs that a recipe is, or names: one line with the place in it."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from engines.jobs.preflight.run import check_request
from flows.preflight import request_of
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError

SHIPPED = ", ".join(
    sorted(path.stem for path in (Path(__file__).parents[2] / "flows" / "recipes").glob("*.yaml"))
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "name: a\nseed: 1\nname: b\n",
            "r.yaml:3: duplicate key 'name' (first on line 1); remove one",
        ),
        ("name: [a\n", "r.yaml:2: not YAML (expected ',' or ']', but got '<stream end>')"),
        ("- 1\n", "r.yaml: need a mapping of recipe fields; see `rlhf recipes`"),
        ("1: a\n", "r.yaml:1: key 1 is not text; quote it"),
        (
            "extends: quickstar\n",
            f"recipe: no 'quickstar'; known: {SHIPPED}, path/to/recipe.yaml; did you mean "
            "quickstart?",
        ),
        (
            "extends: r.yaml\n",
            "r.yaml: extends: circular, or more than 5 levels: r.yaml -> r.yaml",
        ),
        ("a: " + "[" * 30 + "]" * 30 + "\n", "r.yaml:1: nested deeper than 20 levels"),
        ("a: !ruby/object x\n", "r.yaml:1: tag not allowed: !ruby/object; write a plain value"),
    ],
)
def test_a_bad_file_names_its_line(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    assert str(caught.value) == line


def num_calls(work: Callable[[], object]) -> int:
    """Of functions in Python, in this thread."""
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, _: calls.update([event]))
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls["call"]


def test_alias_bomb_costs_no_more_than_the_value_limit(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"

    def refuse(num_levels: int) -> None:
        levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, num_levels)]
        path.write_text("\n".join(levels), encoding="utf-8")
        with pytest.raises(ConfigError, match="more than 10000 values after expanding its aliases"):
            load_recipe(str(path))

    refuse(5)
    five, nine = (num_calls(partial(refuse, num_levels)) for num_levels in (5, 9))
    assert nine <= 2 * five, "of ten thousand times as many values"


def test_a_file_that_is_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"# " + b"x" * 300_000)
    with pytest.raises(ConfigError, match="r.yaml: larger than 256 KiB"):
        load_recipe(str(path))
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match="r.yaml: byte 6 is not UTF-8"):
        load_recipe(str(path))


DATA_RECIPE = """
name: mine
model: {init: random, max_length: 64}
data:
  sft: [{path: %(sft)s}]
  rl: [{path: %(sft)s}]
  evaluation: [{path: %(sft)s}]
  max_prompt_length: 16
rl: {sampling: {max_new_tokens: 8}}
"""


def test_a_missing_data_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(DATA_RECIPE % {"sft": tmp_path / "tran.jsonl"})
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(recipe))
    assert str(caught.value) == (
        f"data.sft.0.path: {tmp_path}/tran.jsonl does not exist (cwd is {Path.cwd()}; beside it: "
        "train.jsonl)"
    )


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    recipe = tmp_path / "r.yaml"
    recipe.write_text(DATA_RECIPE % {"sft": tmp_path / "empty"})
    seen = request_of(load_recipe(str(recipe), ["sft=null", "data.sft=[]"]))
    assert seen is not None
    with pytest.raises(
        ConfigError, match=r"data.rl.0.path: no .parquet, .json, .jsonl, .csv, .*file"
    ):
        check_request(seen)


def test_a_split_that_a_stage_needs_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(DATA_RECIPE % {"sft": tmp_path / "train.jsonl"})
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(recipe), ["data.evaluation=[]"])
    assert str(caught.value) == (
        "data.evaluation: missing; the recipe has a stage that reads it; add a source"
    )
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(recipe), ["data.sft=[]"])
    assert str(caught.value) == (
        "data.sft: missing; the recipe has a stage that reads it; add a source, or set sft: null"
    )


def look_at(model: Path) -> None:
    seen = request_of(load_recipe("quickstart", ["model.init=pretrained", f"model.path={model}"]))
    assert seen is not None
    check_request(seen)


def model_error(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        look_at(path)
    return str(caught.value)


def test_model_directories_that_are_none(tmp_path: Path) -> None:
    # Rows 27 and 29.
    assert model_error(tmp_path / "no" / "such" / "model") == (
        f"model.path: {tmp_path}/no/such/model does not exist (cwd is {Path.cwd()})"
    )
    run = tmp_path / "run"
    for name in ("step_10/hf", "step_20"):
        (run / name).mkdir(parents=True)
    (run / "step_20" / "config.json").write_text("{}")
    assert model_error(run) == (
        f"model.path: {run} is not a model directory: no config.json; it holds: step_10, step_20 "
        f"(a run? pass {run}/step_20)"
    )
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    assert model_error(pickled) == (
        f"model.path: {pickled} holds only pytorch_model.bin (pickle can run code); "
        "refused; convert it to safetensors with save_pretrained on a machine you can lose"
    )
