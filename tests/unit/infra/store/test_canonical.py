import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from infra.store.canonical import canonical_json, sha256_file, sha256_json

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)


class Point(BaseModel):
    y: int
    x: float
    where: Path


def test_text_is_written_out_by_hand() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"é": 'q"'}, "c": ()}
    assert canonical_json(value) == b'{"a":{"\\u00e9":"q\\""},"b":[1,2.5,null,true],"c":[]}'


def test_known_digest() -> None:
    # printf '{"a":1}' | sha256sum
    assert sha256_json({"a": 1}) == (
        "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    )


@given(JSON_VALUES)
def test_parses_back_to_the_same_value(value: object) -> None:
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(st.text(), st.integers(), min_size=2))
def test_order_of_insertion_does_not_count(value: dict[str, int]) -> None:
    assert canonical_json(dict(reversed(list(value.items())))) == canonical_json(value)


def test_models_and_nested_models() -> None:
    point = Point(y=1, x=2, where=Path("/a"))
    assert canonical_json({"p": point}) == b'{"p":{"where":"/a","x":2.0,"y":1}}'


@pytest.mark.parametrize(
    ("value", "error", "where"),
    [
        ({"a": [0.0, float("nan")]}, ValueError, r"^\$\.a\[1\]: nan"),
        (float("-inf"), ValueError, r"^\$: -inf"),
        ({"a": {1: 2}}, TypeError, r"^\$\.a: key 1 is not a string"),
        ({"a": {1, 2}}, TypeError, r"^\$\.a: set has no"),
        ({"a": Path("/x")}, TypeError, r"^\$\.a: PosixPath has no"),
        ([b"x"], TypeError, r"^\$\[0\]: bytes has no"),
    ],
)
def test_refusals_name_the_place(value: object, error: type[Exception], where: str) -> None:
    with pytest.raises(error, match=where):
        canonical_json(value)


def test_sha256_file_matches_hashlib(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(data)
    assert sha256_file(tmp_path / "f") == hashlib.sha256(data).hexdigest()
    with pytest.raises(FileNotFoundError):
        sha256_file(tmp_path / "absent")
