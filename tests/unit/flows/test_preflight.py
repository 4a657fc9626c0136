"""What a plan finds before anything trains, each as one line with the field to change."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlhf.testing.fault_proxy import Action, FaultProxy, fault_proxy
from rlhf.testing.s3_server import environment, s3_server

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.config.plugins import register_plugin
from engines.data.prepare.tokenizer_training import train_tokenizer
from flows.preflight import preflight, request_of
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError, PipelineError, StoreUnreachableError

ROW = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "1 + 1"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}
RECIPE = """
name: mine
model: {init: random, max_length: 64}
data:
  sft: [{format: messages, path: %(dir)s/sft.jsonl}]
  rl: [{path: %(dir)s/rl.jsonl}]
  evaluation: [{path: %(dir)s/rl.jsonl}]
  max_prompt_length: 16
rl: {sampling: {max_new_tokens: 8}}
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    turn = {"role": "assistant", "content": "2"}
    (tmp_path / "sft.jsonl").write_text(json.dumps({"messages": [*ROW["prompt"], turn]}) + "\n")  # type: ignore[misc]
    (tmp_path / "rl.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE % {"dir": tmp_path})
    return tmp_path


def problem(directory: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(load_recipe(str(directory / "recipe.yaml"), overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_that_makes_everything_itself_costs_no_process() -> None:
    assert request_of(load_recipe("quickstart")) is None


@pytest.fixture(scope="module")
def bucket() -> Iterator[FaultProxy]:
    with s3_server() as address, fault_proxy(address) as running:
        yield running


@pytest.mark.parametrize(
    ("store", "action", "error", "said"),
    [
        ("s3://store/x", 403, ConfigError, "answers 403 AccessDenied; let these credentials"),
        ("s3://elsewhere/x", None, ConfigError, "answers 404 NoSuchBucket; create the bucket"),
        ("s3://store/x", 500, StoreUnreachableError, "500 InternalError .*; run again when it"),
        ("s3://store/x", "cut request", StoreUnreachableError, "does not answer .*; see that it"),
        ("s3://store/x", "ignore condition", ConfigError, "ignores If-None-Match, .*; need a"),
        ("s3://store/x", None, None, ""),
    ],
)
def test_a_bucket_is_asked_before_anything_starts(
    bucket: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    store: str,
    action: Action | None,
    error: type[PipelineError] | None,
    said: str,
) -> None:
    for name, value in environment(bucket.address).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    recipe = load_recipe("quickstart", [f"location.home={tmp_path}", f"location.store={store}"])
    bucket.heal()
    if action is not None:
        bucket.fail(action, "PUT", times=9)
    if error is None:
        assert preflight(recipe).store_uri == store
        return
    with pytest.raises(error, match=rf"^location\.store: .*{said}") as raised:
        preflight(recipe)
    assert type(raised.value) is error
    assert "\n" not in str(raised.value)


def test_address_with_credentials_is_refused_without_an_echo(tmp_path: Path) -> None:
    home = f"location.home={tmp_path}"
    with pytest.raises(ConfigError, match=r"^location\.store: secrets do not go into") as raised:
        load_recipe("quickstart", [home, "location.store=s3://me:hush@bucket/x"])
    assert "hush" not in str(raised.value)


def test_unwritable_locations_are_refused_by_their_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for setting in ("home", "store"):
        recipe = load_recipe("quickstart", [f"location.{setting}={tmp_path}/file/below"])
        with pytest.raises(ConfigError, match=rf"{setting}: got .*/file/below.*Not a directory"):
            preflight(recipe)
        relative = load_recipe("quickstart", [f"location.{setting}=here"])
        with pytest.raises(
            ConfigError, match=rf"^location.{setting}: got 'here', which depends on"
        ):
            preflight(relative)


@pytest.mark.parametrize(
    ("platform", "backend", "refused"),
    [
        ("intel", "fsdp2", "fsdp2 does not run on xpu (intel); it runs on: cpu, cuda"),
        ("huawei", "fsdp", "fsdp does not run on npu (huawei); it runs on: cpu, cuda"),
        ("huawei", "megatron", None),
        ("metax", "fsdp2", None),
        ("cpu", "fsdp2", None),
    ],
)
def test_a_device_that_the_backend_has_no_engine_for_is_refused(
    platform: str, backend: str, refused: str | None
) -> None:
    stated = f"hardware={{platform: {platform}, device_kind: a device}}"
    recipe = load_recipe("quickstart", [stated, f"training.backend={backend}"])
    if refused is None:
        training = recipe.training.on(accelerator=platform != "cpu")
        assert preflight(recipe) == recipe.model_copy(update={"training": training})
        return
    with pytest.raises(ConfigError) as caught:
        preflight(recipe)
    assert str(caught.value) == f"training.backend: {refused}"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("my_parts.gone:loss", "no module my_parts.gone"),
        ("my_parts.losses:lost", "losses.py does not define 'lost'"),
        ("my_parts.losses:loss", None),
        ("my_parts.starred:lost", None),  # only an import could tell
    ],
)
def test_a_part_that_is_not_where_its_row_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, said: str | None
) -> None:
    (tmp_path / "my_parts").mkdir()
    (tmp_path / "my_parts" / "__init__.py").write_text("raise ZeroDivisionError('imported')\n")
    (tmp_path / "my_parts" / "losses.py").write_text("def loss(inputs): ...\n")
    (tmp_path / "my_parts" / "starred.py").write_text("from .losses import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("infra.plugins._registered", [])
    register_plugin("loss_mode", "mine", target, columns=("advantages",))
    recipe = load_recipe("quickstart", ["rl.algorithm.loss_mode=mine"])
    if said is None:
        assert preflight(recipe).rl == recipe.rl
        return
    with pytest.raises(ConfigError) as caught:
        preflight(recipe)
    text = str(caught.value)
    assert text.startswith("rl.algorithm.loss_mode: mine cannot be found: ")
    assert said in text
    assert text.endswith(f"; repair or remove {target} (registered at run time)")


def test_good_files_pass(directory: Path) -> None:
    (directory / "good.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    preflight(
        load_recipe(
            str(directory / "recipe.yaml"),
            [f"rl.reward.function={directory}/good.py:compute_score"],
        )
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def compute_score(solution, answer):\n    return 1.0\n", "it is called with data_source"),
        ("import os\nos._exit(7)\ndef compute_score(**_): return 1.0\n", "ended with code 7"),
    ],
)
def test_a_reward_that_cannot_be_used(directory: Path, source: str, said: str) -> None:
    (directory / "bad.py").write_text(source)
    text = problem(directory, f"rl.reward.function={directory}/bad.py:compute_score")
    assert text.startswith("rl.reward.function: ")
    assert said in text


def test_a_reward_sees_no_secret_but_the_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_correcthorsebattery")
    monkeypatch.setenv("JUDGE_API_KEY", "correct-horse-battery")
    monkeypatch.setenv("PGPASSWORD", "correct-horse-battery")
    monkeypatch.setenv("DATABASE", "postgresql://me:correct-horse@host/rows")
    monkeypatch.setenv("OF_NO_KNOWN_NAME", "hf_correcthorsebattery")
    (directory / "spy.py").write_text(
        "import os\n"
        "def compute_score(**_):\n"
        "    names = [n for n, v in os.environ.items() if 'correct' in v]\n"
        "    return 1.0 if names == WANTED else str(names)\n"
        "WANTED = ['JUDGE_API_KEY']\n"
    )
    function = f"rl.reward.function={directory}/spy.py:compute_score"
    assert "returned a str" in problem(directory, function)
    recipe = load_recipe(
        str(directory / "recipe.yaml"), [function, "rl.reward.environment=[JUDGE_API_KEY]"]
    )
    preflight(recipe)


def test_columns_and_layouts_that_people_bring(directory: Path) -> None:
    (directory / "rl.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    assert problem(directory).startswith(
        "data.rl.0.format: got auto; columns of rl.jsonl: question, answer; gsm8k cannot read "
        "rl.jsonl:1 (answer does not end with '#### ' and a number); need those of one layout: rows"
    )
    (directory / "rl.jsonl").write_text(json.dumps(ROW) + "\n")
    (directory / "sft.jsonl").write_text('{"conversations": [{"from": "human", "value": "1"}]}\n')
    assert problem(directory).endswith("these columns fit: sharegpt")
    (directory / "sft.jsonl").write_text('{"instruction": "1", "input": "", "output": "1"}\n')
    assert problem(directory).endswith("these columns fit: alpaca")
    (directory / "sft.csv").write_text("a,b\n1,2\n")
    path = f"data.sft=[{{path: {directory}/sft.csv, format: messages}}]"
    assert "'messages' not in sft.csv; columns: a, b" in problem(directory, path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = train_tokenizer(
        TokenizerConfig(), ["1 + 1 = 2"], tmp_path / "tokenizer", max_length=64
    )
    create_random_model(
        ArchitectureConfig(hidden_size=16, head_dim=4), tokenizer, 64, 0, tmp_path / "m"
    )
    return tmp_path / "m"


def test_models_and_adapters(directory: Path, model: Path) -> None:
    use = ["model={init: pretrained}", f"model.path={model}"]
    preflight(load_recipe(str(directory / "recipe.yaml"), use))
    assert problem(directory, *use, "training.lora={target_modules: [c_attn]}").startswith(
        "training.lora.target_modules: got 'c_attn'; the model has no such module; need some of: "
    )
    assert problem(directory, *use, "model.chat_template='{# nothing #}'").startswith(
        "model.chat_template: "
    )
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 3}))
    assert "the model's vocabulary of 3;" in problem(directory, *use)
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    (model / "config.json").write_text(json.dumps({**config, **quantized}))
    assert problem(directory, *use).startswith(f"model.path: {model} holds quantized weights (fp8)")
    window = {"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 8}
    (model / "config.json").write_text(json.dumps({**config, "layer_types": None, **window}))
    assert problem(directory, *use, "training.backend=megatron").startswith(
        f"model.path: got {model}, a qwen3_moe model with sliding windows; need one without"
    )
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    (model / "config.json").write_text(json.dumps({**config, **windows}))
    preflight(load_recipe(str(directory / "recipe.yaml"), use))
    soft = {"model_type": "gemma2", "attn_logit_softcapping": 50.0}
    (model / "config.json").write_text(json.dumps({**config, **soft}))
    assert problem(directory, *use) == (
        f"model.path: got {model}, a gemma2 model with attention scores with a soft cap; need "
        "attention that packed sequences can train with; choose another architecture"
    )
    (model / "config.json").write_text(json.dumps({**config, "model_type": "diffllama"}))
    assert problem(directory, *use) == (
        f"rollout.engine: got transformers; {model} is a diffllama model with layers that attend "
        "twice, which this engine does not compute; choose another engine or model"
    )
    (model / "config.json").write_text(json.dumps(config))
    size = config["vocab_size"]
    for section in ("rl.sampling", "evaluation"):
        preflight(
            load_recipe(
                str(directory / "recipe.yaml"), [*use, f"{section}.stop_token_ids=[{size - 1}]"]
            )
        )
        assert problem(directory, *use, f"{section}.stop_token_ids=[0, {size}]").startswith(
            f"{section}.stop_token_ids: got {size}; need ids below {size}, the vocabulary of "
        )
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    assert "copy it again" in problem(directory, *use)


def test_bad_input_row_42_a_platform_that_is_not_here(directory: Path) -> None:
    assert problem(directory, "hardware.platform=huawei").startswith("hardware.platform: huawei ")


def test_suites_are_looked_at_as_the_recipe_is(directory: Path) -> None:
    (directory / "held_out.jsonl").write_text(json.dumps(ROW) + "\n")
    (directory / "good.py").write_text("def compute_score(**_): return 1.0\n")
    (directory / "bad.py").write_text("def compute_score(**_): return 'good'\n")
    suite = f"suites.mine={{data: {{evaluation: [{{path: {directory}/held_out.jsonl}}]}}}}"
    recipe = load_recipe(
        str(directory / "recipe.yaml"),
        [suite, f"suites.mine.reward.function={directory}/good.py:compute_score"],
    )
    assert preflight(recipe).suites == recipe.suites
    text = problem(
        directory, suite, f"suites.mine.reward.function={directory}/bad.py:compute_score"
    )
    assert text.startswith("suites.mine.reward.function: ")
    assert "returned a str; need a number" in text
    (directory / "held_out.jsonl").write_text('{"a": 1}\n')
    text = problem(directory, suite)
    assert text.startswith("suites.mine.data.evaluation.0.format: got auto; columns of held_out")


def test_evaluation_only_model_uses_its_native_context_length(directory: Path, model: Path) -> None:
    measured = [
        f"model={{init: pretrained, path: {model}, max_length: 4096}}",
        "sft=null",
        "rl.num_rounds=0",
    ]
    recipe = load_recipe(str(directory / "recipe.yaml"), measured)
    assert preflight(recipe).model == recipe.model
    text = problem(directory, *measured[:1])
    assert text.startswith("model.max_length: got 4096; need at most 64")
    suite = f"suites.mine={{data: {{evaluation: [{{path: {directory}/rl.jsonl}}]}}}}"
    long = "suites.mine.evaluation.max_new_tokens=64"
    text = problem(directory, *measured, "data=null", suite, long)
    assert text.startswith("suites.mine.evaluation.max_new_tokens: got 64; ")
    assert text.endswith("was built for 64 tokens, prompt and answer together; need less; lower it")
    stop = "suites.mine.evaluation.stop_token_ids=[999]"
    text = problem(directory, *measured, "data=null", suite, stop)
    assert text.startswith("suites.mine.evaluation.stop_token_ids: got 999; need ids below")
    text = problem(directory, f"against.path={directory}")
    assert text.startswith("against.path: ")
    assert "is not a model directory" in text
