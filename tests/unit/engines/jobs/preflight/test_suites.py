"""Suites are looked at with the reward that judges them."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow
from vision_cases import write_chat_model

from engines.jobs.preflight.run import check_request
from flows.preflight import request_of
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError


@pytest.fixture
def changes(tmp_path: Path) -> list[str]:
    """A model that judges text, and a suite whose rows show images."""
    (tmp_path / "model").mkdir()
    model = write_chat_model(tmp_path / "model")
    buffer = io.BytesIO()
    Pillow.new("RGB", (4, 4)).save(buffer, "PNG")
    shown = {"images": [{"bytes": buffer.getvalue(), "path": None}], "problem": "<image>x?"}
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{**shown, "answer": "3"}]), rows)
    judge = f"path: {model}, prompt: '{{{{ answer }}}}', max_length: 64"
    judge = f"{{{judge}, sampling: {{max_new_tokens: 8}}}}"
    return [
        "model.init=pretrained",
        f"model.path={model}",
        f"rl.reward={{function: judge, judge: {judge}}}",
        f"suites.shown.data.evaluation=[{{path: {rows}}}]",
    ]


def test_images_of_a_suite_are_seen_by_whoever_judges_it(changes: list[str]) -> None:
    asked = request_of(load_recipe("quickstart", changes))
    assert asked is not None
    with pytest.raises(ConfigError, match=r"suites\.shown\.data\.evaluation\.0 .*not see") as found:
        check_request(asked)
    assert found.value.path == "rl.reward.judge"
    ruled = request_of(load_recipe("quickstart", [*changes, "suites.shown.reward.function=math"]))
    assert ruled is not None
    check_request(ruled)
