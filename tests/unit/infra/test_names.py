"""The text about an unknown name."""

import pytest

from infra.names import unknown_name


@pytest.mark.parametrize(
    ("name", "known", "text"),
    [
        ("grpoo", ["grpo", "gae"], "no 'grpoo'; known: grpo, gae; did you mean grpo?"),
        ("xyz", ["grpo", "gae"], "no 'xyz'; known: grpo, gae"),
        ("a", [], "no 'a'; known: none"),
        # Shown in the order given: a probing order must stay one.
        ("cpuu", ["nvidia", "cpu"], "no 'cpuu'; known: nvidia, cpu; did you mean cpu?"),
    ],
)
def test_what_exists_and_what_is_near(name: str, known: list[str], text: str) -> None:
    assert unknown_name(name, known) == text
