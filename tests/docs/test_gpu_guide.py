"""The guide to GPUs, followed as far as a CPU goes: its recipes, keys and commands."""

import json
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
import yaml
from gpu_models import SHAPES, write_model
from pydantic import BaseModel
from tiny_pipeline import Home

from engines.config.recipe import Recipe
from engines.rollout.vllm.options import VllmOptions
from flows.commands.cli import build_parser
from flows.recipe.recipe import load_recipe
from infra import env
from infra.plugins import assumed_installed

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
SHELL = "\n".join(text for language, text in BLOCKS if not language)
FILES = {
    text.split("\n")[0].removeprefix("# "): text for language, text in BLOCKS if language == "yaml"
}
KEYS = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", GUIDE, re.MULTILINE)
COMMAND_DEADLINE_S = 600.0
WRITTEN = {
    "chats.jsonl": {
        "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    },
    "problems.jsonl": {"prompt": "1+2?", "answer": "3"},
    "held_out.jsonl": {"prompt": "2+2?", "answer": "4"},
}
"""A row of each file of data that the guide names."""
NEEDS_A_GPU = "engine: vllm\n  options: {gpu_memory_utilization: 0.6}"
ON_A_CPU = (
    "hardware.platform=cpu",
    "sft.num_steps=2", "sft.optimizer.num_warmup_steps=0", "sft.batch_size_sequences=4",
    "rl.num_rounds=1", "rl.num_steps_per_round=2",
    "rl.batch_size_prompts=4", "rl.group_size=2", "rl.mini_batch_size_prompts=4",
    "rl.sampling.max_new_tokens=4", "evaluation.num_samples=0", "evaluation.pass_at=[1]",
    "model.max_length=64", "data.max_prompt_length=32", "rl.reward.function=exact",
    "data.allow_overlap=true",
)  # fmt: skip
"""What a tiny model on a CPU needs of the guide's recipe; the rest is as it is written."""


def commands(program: str) -> list[str]:
    """Lines of the shell blocks that begin with it, without comments."""
    lines = [line.split("#")[0].strip() for line in SHELL.splitlines()]
    return [line for line in lines if line.startswith(f"{program} ")]


def written(directory: Path) -> Path:
    """The guide's recipes, a model of random weights and a row of each file of data."""
    for name, text in FILES.items():
        (directory / name).write_text(text)
    for name, row in WRITTEN.items():
        (directory / name).write_text(json.dumps(row) + "\n")
    write_model(directory / "my_model", SHAPES["tiny"], torch.device("cpu"))
    return directory


def field_of(model: type[BaseModel], key: str) -> bool:
    """Whether a dotted key names a field; options of the rollout engine are those of vLLM."""
    name, _, rest = key.partition(".")
    if name not in model.model_fields:
        return False
    if not rest:
        return True
    if key.startswith("options."):
        return field_of(VllmOptions, rest)
    inner = [each for each in parts(model.model_fields[name].annotation) if is_model(each)]
    return any(field_of(each, rest) for each in inner)


def parts(annotation: object) -> list[object]:
    """A type and all that it is made of."""
    return [annotation, *(p for a in typing.get_args(annotation) for p in parts(a))]


def is_model(annotation: object) -> bool:
    """Whether it is a section of a recipe."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


@pytest.mark.parametrize(("theirs", "ours"), KEYS)
def test_every_key_of_the_table_exists_here(theirs: str, ours: str) -> None:
    assert field_of(Recipe, ours), f"{theirs} -> {ours}"


def test_the_table_has_what_users_of_verl_set_first() -> None:
    theirs = [each for each, _ in KEYS]
    assert len(theirs) == len({*theirs})
    ends = {each.rpartition(".")[2] for each in theirs}
    assert ends >= {
        "gpu_memory_utilization", "ppo_micro_batch_size_per_gpu", "ppo_mini_batch_size",
        "tensor_model_parallel_size", "param_offload", "kl_loss_coef", "adv_estimator",
    }  # fmt: skip


def test_a_key_that_is_not_ours_is_seen() -> None:
    assert not field_of(Recipe, "rollout.gpu_memory_utilization")
    assert not field_of(Recipe, "rollout.options.gpu_memory_utilisation")
    assert not field_of(Recipe, "training.optimizer.lr")


@pytest.mark.parametrize(
    "name", [name for name in FILES if "extends" in yaml.safe_load(FILES[name])]
)
def test_its_recipes_load(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(written(tmp_path))
    with assumed_installed():
        recipe = load_recipe(name)
    assert recipe.rollout.engine == "vllm"
    num_ranks, num_replicas = recipe.training.num_workers, recipe.rollout.num_replicas
    if recipe.rollout.placement == "disaggregated":
        num_ranks += num_replicas
    assert num_ranks == (1 if name == "one_card.yaml" else 8)


@pytest.mark.parametrize("line", [line for line in commands("rlhf plan") if ".yaml" in line])
def test_its_plans_fit(line: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", *shlex.split(line)[1:]],
        cwd=written(tmp_path), capture_output=True, text=True, timeout=COMMAND_DEADLINE_S,
        env=env.child_environment(RLHF_HOME=str(tmp_path / "home"), PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.rstrip().endswith("fits")


@pytest.mark.parametrize("line", sorted({*commands("rlhf")}))
def test_its_commands_parse(line: str) -> None:
    assert build_parser().parse_args(shlex.split(line)[1:]).command == line.split()[1]


@pytest.mark.parametrize("line", sorted({*commands("make")}))
def test_its_make_targets_exist(line: str) -> None:
    done = subprocess.run(
        [*shlex.split(line), "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", commands("bash"))
def test_its_packed_scripts_exist(line: str) -> None:
    _, run, script = line.split()
    assert run.endswith("/run.sh")
    assert (ROOT / script).is_file()


def test_no_sentence_is_long() -> None:
    prose = re.sub(r"```.*?```", "", GUIDE, flags=re.DOTALL)
    prose = re.sub(r"^\|.*$", "", re.sub(r"\]\([^)]*\)", "]", prose), flags=re.MULTILINE)
    texts = [" ".join(text.split()) for text in re.split(r"\n\s*\n", prose)]
    sentences = [s for text in texts for s in re.split(r"(?<=[.:;?])\s", text)]
    assert [s for s in sentences if len(s.split()) > 40] == []


def overrides(*values: str) -> list[str]:
    """`--set` before each."""
    return [word for value in values for word in ("--set", value)]


@pytest.mark.stacks
def test_followed_from_one_card_to_a_model_that_loads(tmp_path: Path) -> None:
    """Every `rlhf` command from the plan to the merge, with a model that another run made."""
    first = Home(tmp_path / "first")
    first.rlhf("run")
    [made] = (first.path / "store" / "artifacts" / "model").iterdir()
    directory = tmp_path / "mine"
    directory.mkdir()
    written(directory)
    assert NEEDS_A_GPU in FILES["one_card.yaml"]
    on_a_cpu = FILES["one_card.yaml"].replace(NEEDS_A_GPU, "engine: transformers")
    (directory / "one_card.yaml").write_text(on_a_cpu)
    for name in WRITTEN:  # rows that differ in the prompt
        rows = [
            json.dumps(WRITTEN[name]).replace("1+", f"{number}+").replace("2+2", f"{number}+9")
            for number in range(10, 26)
        ]
        (directory / name).write_text("".join(f"{row}\n" for row in rows))
    home = Home(tmp_path / "home")

    def rlhf(line: str, *values: str, code: int = 0) -> str:
        line = line.replace("./my_model", str(made))
        ended = subprocess.run(
            [sys.executable, "-m", "flows.commands.cli", *shlex.split(line)[1:],
             *overrides(*values)],
            cwd=directory, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S,
            env={**home.environment, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout

    run, again = (line for line in commands("rlhf run"))
    values = (*ON_A_CPU, f"model.path={made}")
    report = home.report(rlhf(run, *values))
    assert report["promoted"]
    assert home.report(rlhf(again, *values)) == report, "finished stages are reused"
    for line, code in (("rlhf status", 1), ("rlhf show", 0), ("rlhf diagnose", 0)):
        assert line in SHELL
        rlhf(line, code=code)  # a run without `rlhf up` leaves no server
    [evaluate] = commands("rlhf evaluate")
    rlhf(
        evaluate, "rollout.engine=transformers", "hardware.platform=cpu",
        "suites.held_out.evaluation.max_new_tokens=4", "suites.held_out.reward.function=exact",
    )  # fmt: skip
    [merge] = commands("rlhf merge")
    policies = home.path / "store" / "artifacts" / "policy"
    trained = next(s["digest"] for s in report["stages"] if s["name"] == "rl_round_1")
    rlhf(merge.replace(".rlhf/store/artifacts/policy/DIGEST", str(policies / trained)))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory / "my_trained_model")
    assert model.num_parameters() > 0
    assert AutoTokenizer.from_pretrained(directory / "my_trained_model")("1+1?")["input_ids"]
