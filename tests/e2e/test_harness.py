"""A model on tasks of lm-evaluation-harness, beside the harness's own `hf` model."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file
from tiny_pipeline import Home, ran

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.data.prepare.tokenizer_training import train_tokenizer
from infra.job_environments import interpreter_of

pytestmark = pytest.mark.stacks

SHAPE = ArchitectureConfig(
    hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64
)
MAX_LENGTH = 64
SCALE = 20.0
CHARACTERS = "0123456789+= "
LOCAL = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: train.jsonl, test: {test}.jsonl}}}}
training_split: train
test_split: test
fewshot_split: train
target_delimiter: ""
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "+", "=", " ", "12+3"]
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWER = """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
  - {name: first, filter: [{function: regex, regex_pattern: "(.)"}, {function: take_first}]}
  - {name: whole, filter: [{function: take_first}]}
"""
TASKS = {
    "choice": CHOICE,
    "until": f'{ANSWER}generation_kwargs: {{until: ["15", "44"], max_gen_toks: 8}}\n',
    "sampled": f"{ANSWER}repeats: 2\ngeneration_kwargs: {{until: ['='], max_gen_toks: 8, "
    "do_sample: true, temperature: 1.0}\n",
    "text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}
SUITES = {
    "plain": {"tasks": ["choice", "until", "sampled", "text"]},
    "turns": {"tasks": ["choice", "until"], "num_fewshot": 2, "apply_chat_template": True},
}
QUESTIONS = [f"{a}+{b}=" for a in range(6) for b in range(4, 9)]
LONG = "12+3=15 " * 20
"""More tokens than the model reads at once."""


@pytest.fixture
def python() -> Path:
    found = interpreter_of("lm-eval")
    if found is None:
        pytest.skip("needs the job environment lm-eval: make env-lm-eval")
    return found


def model(directory: Path, seed: int) -> Path:
    tokenizer = train_tokenizer(
        TokenizerConfig(), [CHARACTERS], directory.with_suffix(".tokenizer"), max_length=MAX_LENGTH
    )
    create_random_model(SHAPE, tokenizer, MAX_LENGTH, seed, directory)
    # As it is made it repeats its last token, and of all choices it prefers the same.
    weights = load_file(directory / "model.safetensors")
    scaled = {name: each * (SCALE if each.ndim == 2 else 1) for name, each in weights.items()}
    save_file(scaled, directory / "model.safetensors", {"format": "pt"})
    return directory


def write_tasks(directory: Path) -> Path:
    directory.mkdir()
    for name, text in TASKS.items():
        # A prompt that is cut has another room for its answer in the harness's own model.
        test = "short" if text.startswith(ANSWER) else "long"
        (directory / f"{name}.yaml").write_text(LOCAL.format(name=name, test=test) + text)
    splits = {"train": QUESTIONS[:3], "short": QUESTIONS, "long": [*QUESTIONS, LONG]}
    for split, questions in splits.items():
        rows = [{"question": each, "answer": int(each[0])} for each in questions]
        (directory / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return directory


def rows_of(home: Home, report: dict[str, Any], label: str) -> list[dict[str, Any]]:
    [stage] = [stage for stage in report["stages"] if stage["name"] == label]
    directory = home.path / "store" / "artifacts" / "evaluation" / stage["digest"]
    return pq.read_table(directory / "documents.parquet").to_pylist()


def asked_of(rows: list[dict[str, Any]], task: str) -> tuple[list[Any], list[Any]]:
    """Requests of the documents that are not too long, and what was answered."""
    chosen = [row for row in rows if row["task"] == task and row["filter"] in ("none", "whole")]
    chosen = [row for row in chosen if LONG not in row["document"]]
    requests = [json.loads(each) for row in chosen for each in row["requests"]]
    return requests, [json.loads(each)[0] for row in chosen for each in row["responses"]]


def test_the_harness_finds_what_it_finds_with_its_own_model(tmp_path: Path, python: Path) -> None:
    home = Home(tmp_path / "home")
    home.environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    ours, theirs = (model(tmp_path / f"model{seed}", seed) for seed in range(2))
    include = write_tasks(tmp_path / "tasks")
    home.recipe = ours
    arguments = ["--against", str(theirs)]
    for name, harness in SUITES.items():
        suite = tmp_path / f"{name}.yaml"
        suite.write_text(json.dumps({"harness": {**harness, "include": str(include)}}))
        arguments += ["--suite", str(suite)]
    printed = home.rlhf("evaluate", *arguments)
    report = home.report(printed)
    labels = [
        each for name in SUITES for each in (f"harness_{name}", f"harness_{name}_against",
                                             f"compare_{name}")
    ]  # fmt: skip
    assert ran(report) == labels
    metrics = {stage["name"]: stage["metrics"] for stage in report["stages"]}
    assert "| harness_plain | choice/acc | " in printed
    assert "gain/choice/acc" in metrics["compare_plain"]
    assert not any("perplexity" in name for name in metrics["compare_plain"])
    greedy: list[bool] = []
    for name, harness in SUITES.items():
        rows = rows_of(home, report, f"harness_{name}")
        pairs, told = asked_of(rows, "choice")
        prompts, answers = asked_of(rows, "until")
        question = {
            "model": str(ours), "include": str(include), "max_length": MAX_LENGTH,
            "harness": harness, "pairs": pairs, "prompts": prompts,
        }  # fmt: skip
        answer = subprocess.run(
            [str(python), str(Path(__file__).with_name("harness_reference.py"))],
            input=json.dumps(question), capture_output=True, text=True, timeout=300,
            env=home.environment,
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        found = json.loads(answer.stdout)
        assert [total for total, _ in told] == pytest.approx(
            [total for total, _ in found["sums"]], abs=1e-4
        )
        assert [each for _, each in told] == [each for _, each in found["sums"]]
        greedy += [each for _, each in told]
        assert answers == found["texts"]
        check_metrics(metrics[f"harness_{name}"], found["results"])
    assert 0 < sum(greedy) < len(greedy)
    assert 0 < metrics["harness_plain"]["choice/acc"] < 1
    [sampled] = {len(row["responses"]) for row in rows_of(home, report, "harness_plain")
                 if row["task"] == "sampled"}  # fmt: skip
    assert sampled == 1
    pairs = [
        json.loads(row["responses"][0])
        for row in rows_of(home, report, "harness_plain")
        if row["task"] == "sampled"
    ]
    assert any(first != second for first, second in pairs), "each repetition has a seed of its own"
    other = Home(tmp_path / "other")
    other.environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    other.recipe = ours
    again = other.report(other.rlhf("evaluate", "--suite", str(tmp_path / "plain.yaml")))
    assert ran(again) == ["harness_plain"]
    assert again["stages"][0]["digest"] == report["stages"][0]["digest"], "it repeats bitwise"


def check_metrics(ours: dict[str, float], results: dict[str, dict[str, Any]]) -> None:
    """Every metric of the harness that does not depend on sampled answers, with its error."""
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or task == "sampled" or "_stderr" in metric:
                continue
            name = f"{task}/{metric}" + ("" if filter_name == "none" else f"/{filter_name}")
            assert ours[name] == pytest.approx(value, rel=1e-5), name
            error = values[f"{metric}_stderr,{filter_name}"]
            if isinstance(error, float):
                width = (ours[f"{name}_high"] - ours[f"{name}_low"]) / 2
                assert width == pytest.approx(1.959964 * error, rel=1e-4), name


@pytest.mark.parametrize(
    ("harness", "said"),
    [
        ({"tasks": ["choic"]}, "suites.wrong.harness.tasks: no 'choic'; nearest: choice"),
        ({"tasks": ["arc_easy"]}, "suites.wrong.harness.tasks: got arc_easy, which cannot be load"),
    ],
)
def test_what_cannot_be_asked_ends_in_one_line(
    tmp_path: Path, python: Path, harness: dict[str, Any], said: str
) -> None:
    del python
    home = Home(tmp_path / "home")
    home.environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    home.recipe = model(tmp_path / "model", 0)
    include = write_tasks(tmp_path / "tasks")
    suite = tmp_path / "wrong.yaml"
    suite.write_text(json.dumps({"harness": {**harness, "include": str(include)}}))
    ended = home.start("evaluate", "--suite", str(suite))
    assert ended.returncode != 0
    assert said in ended.stdout + ended.stderr
