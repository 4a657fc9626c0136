"""Results of families: what is tried next, how they are kept, and their page."""

from importlib.metadata import version
from pathlib import Path

import pytest
from model_zoo import FAMILIES, PAGE, ended_early, ending_of
from zoo_table import (
    COLUMNS,
    MAX_REASON_CHARS,
    FamilyResult,
    keep_result,
    kept_result,
    page,
    reason_of,
)

from infra.errors import ConfigError


def result_of(*outcomes: bool, why_not: str = "") -> FamilyResult:
    return FamilyResult("tiny", dict(zip(COLUMNS, outcomes, strict=False)), why_not)


def tried(result: FamilyResult, failing: str) -> list[str]:
    """The columns that are tried in order when one does not hold."""
    found = []
    for column in COLUMNS:
        if result.can_try(column):
            found.append(column)
            result = result.with_outcome(column, "no" if column == failing else None)
    return found


@pytest.mark.parametrize(
    ("failing", "columns"),
    [
        ("builds", ["builds"]),
        ("trains", ["builds", "trains"]),
        ("samples", ["builds", "trains", "samples", "exports"]),
        ("agrees", [*COLUMNS]),
        ("exports", [*COLUMNS]),
    ],
)
def test_a_column_is_tried_where_what_it_needs_holds(failing: str, columns: list[str]) -> None:
    assert tried(FamilyResult("tiny"), failing) == columns


def test_the_first_reason_stays() -> None:
    result = result_of(True, True).with_outcome("samples", "a\n  b").with_outcome("exports", "c")
    assert result.why_not == "a b"
    assert result.row() == ("`tiny`", "yes", "yes", "no", "", "no", "a b")
    assert len(result_of().with_outcome("builds", "long " * 99).why_not) == MAX_REASON_CHARS


def test_a_result_is_kept_for_the_sources_it_rests_on(tmp_path: Path) -> None:
    path = tmp_path / "results" / "tiny.json"
    assert kept_result(path, "now") is None
    result = FamilyResult("tiny", {"builds": True, "trains": False}, "why", "now")
    keep_result(result, path)
    assert kept_result(path, "now") == result
    assert kept_result(path, "later") is None
    assert [file.name for file in path.parent.iterdir()] == ["tiny.json"]


def test_the_page_has_a_row_for_each_and_counts() -> None:
    text = page([result_of(*[True] * 5), result_of(True, False, why_not="a | b")], 1e-4, 2e-4)
    assert (
        "2 families, 1 do everything (builds 2, trains 1, samples 1, agrees 1, exports 1)" in text
    )
    assert "within 0.0001 of its norm" in text
    assert "within 0.0002" in text
    header, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert header == "| family | builds | trains | samples | agrees | exports | why not |"
    assert rule.count("|") == header.count("|")
    assert rows == [
        "| `tiny` | yes | yes | yes | yes | yes |  |",
        "| `tiny` | yes | no |  |  |  | a \\| b |",
    ]


def test_the_page_is_of_the_installed_transformers() -> None:
    """Otherwise run `make zoo`."""
    text = PAGE.read_text(encoding="utf-8")
    assert f"transformers {version('transformers')}: " in text
    assert [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")] == [
        *FAMILIES
    ]


def test_early_process_end_fails_the_column_it_was_in() -> None:
    assert ended_early(result_of(True), "killed") == result_of(True, False, why_not="killed")
    whole = result_of(*[True] * 5)
    assert ended_early(whole, "killed") == whole


def test_an_ending_in_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\n  ...\nMemoryError: 8 GB\n\n")
    assert ending_of(0, log) is None
    assert ending_of(-11, log) == "its process is ended by SIGSEGV"
    assert ending_of(1, log) == "MemoryError: 8 GB"
    log.write_text("")
    assert ending_of(3, log) == "exit code 3"


def test_reasons_leave_out_place_and_advice(tmp_path: Path) -> None:
    problem = f"{tmp_path / 'hf'} has layers of type x; choose another architecture"
    assert reason_of(ConfigError("model.path", problem), tmp_path) == "it has layers of type x"
    problem = f"got {tmp_path / 'hf'}, a model with sinks; need none; choose another architecture"
    assert (
        reason_of(ConfigError("model.path", problem), tmp_path) == "a model with sinks; need none"
    )
    assert reason_of(KeyError("y"), tmp_path) == "KeyError: 'y'"
