"""What a bad recipe costs: one line, exit code 2, no torch, seconds at most."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.config.plugins import ROLLOUT_ENGINES
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError
from infra.plugins import Row

# The quickstart is tuned from time to time; what the lines below speak of is fixed here.
BASE = [
    "model.max_length=64",
    "data.max_prompt_length=48",
    "data.arithmetic.num_eval=512",
    "sft.batch_size_sequences=128",
    "rl.batch_size_prompts=32",
    "rl.mini_batch_size_prompts=null",
    "rl.sampling.max_new_tokens=8",
]

# The path of every bad input, and the exact line the user gets.
OVERRIDES = [
    # Row 1: unknown and misspelt keys.
    (
        ["sft.optimizer.learnig_rate=1"],
        "sft.optimizer.learnig_rate: unknown field; known: lr, schedule, num_warmup_steps, "
        "min_lr_ratio, betas, eps, weight_decay, max_grad_norm, ema",
    ),
    (["rl.grop_size=4"], "rl.grop_size: unknown field; did you mean group_size?"),
    (
        ["progress_deadlines_s.train_s=9"],
        "progress_deadlines_s.train_s: unknown field; did you mean train?",
    ),
    (["group_size=4"], "group_size: unknown field; did you mean rl.group_size?"),
    (["training.backnd=fsdp2"], "training.backnd: unknown field; did you mean backend?"),
    # Row 2: required field missing.
    (
        ["model.init=pretrained"],
        "model.path: missing; give a directory or a hub id, or set init: random",
    ),
    (["model=null"], "model: got None; need a mapping"),
    # Row 3: wrong types.
    (
        ["training.num_workers=8 GPUs"],
        "training.num_workers: got '8 GPUs'; need an integer >= 1",
    ),
    (["rl.num_rounds=2.5"], "rl.num_rounds: got 2.5; need an integer >= 0"),
    (
        ["training.dtype=float16"],
        "training.dtype: got 'float16'; need one of auto, float32, bfloat16",
    ),
    (
        ["data.arithmetic.operations=[divide]"],
        "data.arithmetic.operations.0: got 'divide'; need one of add, subtract, multiply, modulo, "
        "compare, chain",
    ),
    # Row 4: learning rates that are no learning rates.
    (["rl.optimizer.lr=-1e-5"], "rl.optimizer.lr: got -1e-05; need a finite number > 0"),
    (["rl.optimizer.lr=0"], "rl.optimizer.lr: got 0; need a finite number > 0"),
    (["rl.optimizer.lr=.nan"], "rl.optimizer.lr: got nan; need a finite number > 0"),
    (["sft.optimizer.lr=.inf"], "sft.optimizer.lr: got inf; need a finite number > 0"),
    # Row 5: batch sizes that do not divide.
    (
        ["training.num_workers=3"],
        "sft.batch_size_sequences: 128 is not a multiple of the 3 data-parallel ranks; use 126 or "
        "129",
    ),
    (
        ["rl.mini_batch_size_prompts=5"],
        "rl.batch_size_prompts: 32 is not a multiple of mini_batch_size_prompts 5; set it to a "
        "multiple",
    ),
    (
        ["rl.mini_batch_size_prompts=1", "training.num_workers=2"],
        "rl.mini_batch_size_prompts: 1 is not a multiple of the 2 data-parallel ranks; use 2",
    ),
    # Row 6: a group of one.
    (
        ["rl.group_size=1"],
        "rl.group_size: got 1; grpo needs >= 2 (the advantage would be 0 for every sample)",
    ),
    # Row 7: prompt and response do not fit.
    (
        ["rl.sampling.max_new_tokens=8192", "data.max_prompt_length=4096", "model.max_length=8192"],
        "rl.sampling.max_new_tokens: 4096 (data.max_prompt_length) + 8192 = 12288 tokens exceeds "
        "model.max_length 8192; lower it to 4096",
    ),
    # Row 8: unknown plugins.
    (
        ["training.backend=megatrn"],
        "training.backend: no 'megatrn'; known: automodel, fsdp, fsdp2, megatron, torchtitan, "
        "veomni; did you mean megatron?",
    ),
    # A layout that the backend does not have, and ranks that it does not divide.
    (
        ["training.tensor_parallel_size=2"],
        "training.tensor_parallel_size: got 2; fsdp2 has no tensor parallelism; set it to 1, or "
        "training.backend to megatron or automodel or torchtitan",
    ),
    (
        ["rollout.engine=transformer"],
        "rollout.engine: no 'transformer'; known: sglang, transformers, vllm; did you mean "
        "transformers?",
    ),
    (
        ["rl.algorithm.adv_estimator=grpoo"],
        "rl.algorithm.adv_estimator: no 'grpoo'; known: gae, gdpo, gpg, grpo, grpo_passk, opo, "
        "optimal_token_baseline, raft, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, "
        "rloo, tir_optimal_token_baseline; did you mean grpo?",
    ),
    (
        ["rl.algorithm.kl_loss_type=k4"],
        "rl.algorithm.kl_loss_type: no 'k4'; known: abs, k1, k2, k3, kl, low_var_kl, mse; did you "
        "mean kl?",
    ),
    (
        ["rl.reward.function=exakt"],
        "rl.reward.function: no 'exakt'; known: exact, format, gsm8k, http, judge, length, "
        "math, math_boxed, math_dapo, mixture, model, path/to/file.py:name; did you mean exact?",
    ),
    (
        ["rl.distillation={path: owner/teacher, served: {options: {max_prefill: 64}}}"],
        "rl.distillation.served.options.max_prefill: not an option of transformers: no "
        "'max_prefill'; known: enforce_eager, kv_cache_bytes, max_prefill_tokens; "
        "did you mean max_prefill_tokens?",
    ),
    (
        ["rl.reward.function=nowhere.py:score"],
        f"rl.reward.function: nowhere.py is no file (cwd is {Path.cwd()}); need a Python file with "
        "the function",
    ),
    (
        ["rl.reward.function=mixture"],
        "rl.reward.components: got 0 with function mixture; need function mixture with one "
        "component or more, or neither",
    ),
    # RL settings that would only fail, or quietly mislead, in the job.
    (
        ["rl.sampling.temperature=0"],
        "rl.sampling.temperature: got 0; need > 0: greedy samples of a prompt are all equal",
    ),
    (
        ["rl.optimizer.schedule=cosine"],
        "rl.optimizer.schedule: got 'cosine'; need 'constant', because rounds may be added later",
    ),
    (
        ["rl.sampling.top_p=0.9"],
        "rl.sampling.top_p: got 0.9; need 1.0: rl.mismatch compares logprobs over the whole "
        "vocabulary, but the sampler normalizes over the tokens that top_p keeps; set it to 1.0, "
        "or rl.mismatch.enable to false",
    ),
    (
        ["rl.sampling.top_k=5"],
        "rl.sampling.top_k: got 5; need 0: rl.mismatch compares logprobs over the whole "
        "vocabulary, but the sampler normalizes over the tokens that top_k keeps; set it to 0, or "
        "rl.mismatch.enable to false",
    ),
    (
        ["evaluation.structured_output={choice: [a, b]}"],
        "evaluation.structured_output: rollout.engine transformers does not support structured "
        "output; set this to null, or rollout.engine to sglang or vllm",
    ),
    # Row 14: YAML that is no plain data.
    (
        ["sft={num_steps: 1, num_steps: 2}"],
        "--set sft:1: duplicate key 'num_steps' (first on line 1); remove one",
    ),
    (
        ["sft=!!python/object:os.system {}"],
        "--set sft:1: tag not allowed: tag:yaml.org,2002:python/object:os.system; write a plain "
        "value",
    ),
    # Row 15: secrets, never echoed.
    (
        ["location.token=abc"],
        "location.token: secrets do not go into config files; set MLFLOW_TRACKING_TOKEN",
    ),
    (
        ["model.revision=hf_AbCdEfGhIjKlMnOpQrStUv"],
        "model.revision: secrets do not go into config files; set HF_TOKEN",
    ),
    (
        ["location.tracking_uri=http://me:hunter22@host:5000"],
        "location.tracking_uri: secrets do not go into config files; set MLFLOW_TRACKING_TOKEN",
    ),
    # Rules of single fields and of the whole.
    (["checkpoint.num_keep=1"], "checkpoint.num_keep: got 1; need an integer >= 2"),
    (
        ["evaluation.num_samples=2", "evaluation.pass_at=[4]"],
        "evaluation.pass_at: got 4; need at most num_samples 2",
    ),
    *(
        (
            [f"evaluation.pass_at={each}"],
            f"evaluation.pass_at: got {each}; need one or more integers >= 1",
        )
        for each in ("[0]", "[1, -1]", "[]")
    ),
    (
        ["sft=null", "rl.num_rounds=0"],
        "rl.num_rounds: got 0 with sft: null; nothing would be trained; raise it, add sft, or name "
        "a model to measure (model.path)",
    ),
    (["rl.num_rounds=yes"], "rl.num_rounds: got True; need a number"),
    (["sft.optimizer.lr=on"], "sft.optimizer.lr: got True; need a number"),
    (
        ["sft.num_steps=100", "sft.optimizer.num_warmup_steps=500"],
        "sft.optimizer.num_warmup_steps: got 500; need less than the 100 optimizer steps of the "
        "training, or the rate never reaches lr; lower it",
    ),
    (
        ["rl.num_rounds=1", "rl.num_steps_per_round=4", "rl.optimizer.num_warmup_steps=4"],
        "rl.optimizer.num_warmup_steps: got 4; need less than the 4 optimizer steps of the "
        "training, or the rate never reaches lr; lower it",
    ),
    (
        [
            "rl.num_rounds=1",
            "rl.num_steps_per_round=4",
            "rl.algorithm.adv_estimator=gae",
            "rl.optimizer.num_warmup_steps=0",
            "rl.critic={optimizer: {num_warmup_steps: 4}}",
        ],
        "rl.critic.optimizer.num_warmup_steps: got 4; need less than the 4 optimizer steps of the "
        "training, or the rate never reaches lr; lower it",
    ),
    (
        ["promote.min_value=90"],
        "promote.min_value: got 90; accuracy is at most 1; use 0.9 for 90 %",
    ),
    (
        ["promote.metric=acc"],
        "promote.metric: got 'acc'; need accuracy, reward/mean, pass@k, maj@k or avg@k (pass@4)",
    ),
    (
        ["promote.alias=challenger"],
        "promote.alias: got 'challenger', which models that lose get; set another",
    ),
    (["rl.num_rounds"], "--set: got 'rl.num_rounds'; need path.to.key=value"),
    (
        ["evaluation.num_problems=100000"],
        "evaluation.num_problems: got 100000; data.arithmetic.num_eval makes 512; raise that or "
        "lower this",
    ),
]


@pytest.mark.parametrize(("overrides", "line"), OVERRIDES)
def test_a_bad_value_is_one_line(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", [*BASE, *overrides])
    assert str(caught.value) == line
    assert "\n" not in str(caught.value)


# Row 9: a known plugin whose extra is missing.
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(name="faraway", target="faraway.engine:Engine", requires="faraway", extra="far")
    monkeypatch.setattr(ROLLOUT_ENGINES, "rows", (*ROLLOUT_ENGINES.rows, row))
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", [*BASE, "rollout.engine=faraway"])
    assert str(caught.value) == (
        "rollout.engine: faraway needs the extra: pip install 'rlhf-pipeline[far]' (no module "
        "named faraway)"
    )


def test_rl_settings_do_not_matter_without_rl() -> None:
    load_recipe("quickstart", [*BASE, "rl.num_rounds=0", "rl.optimizer.schedule=cosine"])


def test_bad_recipe_exits_2_with_one_line_before_large_imports(
    tmp_path: Path,
) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-X", "importtime", "-m", "flows.commands.cli"),
            *("run", "quickstart", "--set", "rl.group_size=1"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    told = [line for line in ended.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip() for line in told}
    assert "flows.recipe.recipe" in imported
    assert not imported & {"torch", "transformers", "ray", "prefect", "mlflow"}
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert [line for line in ended.stderr.splitlines() if line not in told] == [
        "rl.group_size: got 1; grpo needs >= 2 (the advantage would be 0 for every sample)"
    ]
    assert list(tmp_path.iterdir()) == [], "a refused recipe leaves nothing behind"


def test_a_secret_on_the_command_line_is_never_echoed(tmp_path: Path) -> None:
    canary = "hf_CANARYcanaryCANARYcanary42"
    for override in (
        f"model.revision={canary}",
        f"tracking.token={canary}",
        f"name={canary}",
        f"{canary}=1",
        f"seed={canary}",
    ):
        with pytest.raises(ConfigError) as caught:
            load_recipe("quickstart", [override])
        assert canary not in str(caught.value)
        assert canary not in json.dumps(repr(caught.value))
