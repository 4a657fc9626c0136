"""Rows without a ground truth are refused where a rule compares answers with one."""

import json
from pathlib import Path
from typing import Any

import pytest
from vision_cases import write_chat_model

from engines.jobs.preflight.run import check_request
from flows.preflight import request_of
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError

PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
DIALOGUE = {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
JUDGED = {"prompt": "a", "reward_model": {"style": "model", "ground_truth": None}}
RULED = {"prompt": "a", "reward_model": {"style": "rule", "ground_truth": "b"}}
NEED = "need rows with one, or a model that judges (rl.reward.function model or judge); choose one"


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def look_at(tmp_path: Path, rl: str, *changes: str) -> None:
    evaluation = write(tmp_path / "evaluation.jsonl", RULED)
    base = [
        "data.arithmetic=null",
        f"data.rl=[{rl}]",
        f"data.evaluation=[{{path: {evaluation}}}]",
        "sft=null",
    ]
    asked = request_of(load_recipe("quickstart", [*base, *changes]))
    assert asked is not None
    check_request(asked)


def error_of(*arguments: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        look_at(*arguments)
    return str(refused.value)


def judge(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    model = write_chat_model(tmp_path / "model")
    asked = f"path: {model}, prompt: '{{{{ answer }}}}', max_length: 64"
    return f"judge: {{{asked}, sampling: {{max_new_tokens: 8}}}}"


@pytest.mark.parametrize("function", ["exact", "math", "gsm8k", "math_boxed", "math_dapo"])
@pytest.mark.parametrize("row", [PAIR, DIALOGUE, JUDGED])
def test_a_rule_has_nothing_to_compare_with(
    tmp_path: Path, row: dict[str, Any], function: str
) -> None:
    source = f"{{path: {write(tmp_path / 'rows.jsonl', row)}}}"
    assert error_of(tmp_path, source, f"rl.reward={{function: {function}}}") == (
        f"rl.reward.function: got {function}, which compares answers with a ground truth; "
        f"data.rl.0 has rows without one; {NEED}"
    )


@pytest.mark.parametrize("layout", ["pairs", "hh_rlhf", "ultrafeedback"])
def test_rows_on_the_hub_are_known_by_their_layout(tmp_path: Path, layout: str) -> None:
    source = f"{{path: of/somebody, format: {layout}}}"
    assert "got exact, which compares" in error_of(tmp_path, source, "rl.reward={function: exact}")


def test_whoever_needs_no_ground_truth_passes(tmp_path: Path) -> None:
    source = f"{{path: {write(tmp_path / 'rows.jsonl', PAIR)}}}"
    look_at(tmp_path, source, "rl.reward={function: length, kwargs: {max_tokens: 4}}")
    (tmp_path / "own.py").write_text("def compute_score(**_):\n    return 1.0\n")
    look_at(tmp_path, source, f"rl.reward={{function: {tmp_path}/own.py}}")
    look_at(tmp_path, source, f"rl.reward={{function: judge, {judge(tmp_path)}}}")
    # Nothing reads them where no round samples.
    sft = f"data.sft=[{{path: {write(tmp_path / 'sft.jsonl', {'prompt': 'a', 'answer': 'b'})}}}]"
    look_at(tmp_path, source, "rl.num_rounds=0", sft, "sft={num_steps: 8}")


def test_components_judge_the_rows_of_their_route(tmp_path: Path) -> None:
    parts = "a: {function: exact}, b: {function: judge}"
    mixture = f"function: mixture, components: {{{parts}}}, {judge(tmp_path)}"
    source = f"{{path: {write(tmp_path / 'rows.jsonl', {**PAIR, 'data_source': 'said'})}}}"
    told = error_of(tmp_path, source, f"rl.reward={{{mixture}, accuracy: [a]}}")
    assert told.startswith("rl.reward.components.a.function: got exact, which compares")
    routed = f"rl.reward={{{mixture}, accuracy: [a, b], routes: {{said: [b], '*': [a]}}}}"
    look_at(tmp_path, source, routed)
    write(tmp_path / "rows.jsonl", PAIR)
    assert "got exact, which compares" in error_of(tmp_path, source, routed)


def test_problems_of_an_evaluation_and_of_a_suite(tmp_path: Path) -> None:
    source = f"{{path: {write(tmp_path / 'rows.jsonl', RULED)}}}"
    pairs = f"[{{path: {write(tmp_path / 'pairs.jsonl', PAIR)}}}]"
    exact = "rl.reward={function: exact}"
    assert "; data.evaluation.0 has rows" in error_of(
        tmp_path, source, exact, f"data.evaluation={pairs}"
    )
    suite = f"suites.x.data.evaluation={pairs}"
    told = error_of(tmp_path, source, exact, suite)
    assert told.startswith("rl.reward.function: got exact")
    assert "; suites.x.data.evaluation.0 has rows" in told
    own = error_of(tmp_path, source, exact, suite, "suites.x.reward.function=math")
    assert own.startswith("suites.x.reward.function: got math, which compares")
