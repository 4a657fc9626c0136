"""The project stays as small as it is; raising a limit is a decision of its own."""

import pytest
from project_size import Size, size_of, sources_now

MAX_STATEMENTS = 33_940
MAX_DOC_SHARE = 0.18
MAX_FUNCTION_LINES = 60
MAX_BROAD_EXCEPTS_PER_KLOC = 0.5


@pytest.fixture(scope="module")
def size() -> Size:
    return size_of(text for _, text in sources_now())


def test_statements(size: Size) -> None:
    assert size.num_statements <= MAX_STATEMENTS


def test_documentation_tells_more_than_the_code(size: Size) -> None:
    assert size.doc_share <= MAX_DOC_SHARE


def test_functions_fit_on_a_screen(size: Size) -> None:
    assert size.function_lines[-1] <= MAX_FUNCTION_LINES


def test_only_boundaries_catch_every_error(size: Size) -> None:
    assert 1000 * size.num_broad_excepts / size.num_lines <= MAX_BROAD_EXCEPTS_PER_KLOC


def test_what_is_counted() -> None:
    text = '"""Text."""\n\n# Why.\n\ndef f() -> None:\n    """More."""\n    try:\n        x = 1\n'
    text += "    except (ValueError, Exception):\n        pass  # no line of its own\n"
    size = size_of([text])
    assert (size.num_lines, size.num_doc_lines) == (10, 3)
    assert size.num_statements == 4
    assert (size.num_broad_excepts, size.function_lines) == (1, (6,))
