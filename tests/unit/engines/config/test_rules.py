"""A rule is written once: the recipe and the stage's configuration, which the job checks, agree."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from engines.config.backends import BACKENDS
from engines.config.data import OrderConfig
from engines.config.rollout import SamplingConfig, StructuredOutputConfig
from engines.config.rules.algorithm import check_sampling
from engines.config.rules.batches import check_order, check_rl_order, check_supervised_order
from engines.config.rules.models import check_structured_output
from engines.config.sections import EvaluationConfig, RLConfig
from engines.config.stages.final import EvaluateStageConfig
from engines.config.stages.rl import RLRoundStageConfig
from engines.config.stages.supervised import SFTStageConfig
from flows.recipe.recipe import load_recipe
from infra.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("rl.group_size", 1, "grpo needs >= 2"),
        ("rl.algorithm.overlong", {"enable": True, "buffer_length": 9}, "need at most"),
        ("rl.sampling.temperature", 0, "greedy"),
        ("rl.sampling.top_p", 0.9, "got 0.9; need 1.0"),
        ("rl.sampling.top_k", 5, "got 5; need 0"),
        ("rl.sampling.structured_output", {"regex": "a+"}, "does not support structured output"),
        ("rl.sampling.max_new_tokens", 64, "lower"),
        ("rl.batch_size_prompts", 63, "use 62 or 64"),
        ("rl.order", {"kind": "banded"}, "got 0 with kind banded; need at least 1"),
        ("training.tensor_parallel_size", 2, "no tensor parallelism"),
    ],
)
def test_recipe_and_job_refuse_with_one_rule(path: str, value: object, word: str) -> None:
    changes = [f"{path}={value}".replace("True", "true"), "training.num_workers=2"]
    with pytest.raises(ConfigError, match=word) as early:
        load_recipe("quickstart", changes)
    config = RLRoundStageConfig.from_recipe(load_recipe("quickstart"), 1).model_dump(mode="json")
    config["training"]["num_workers"] = 2
    level = config
    *above, last = path.split(".")
    for key in above:
        level = level[key]
    level[last] = value
    with pytest.raises(ConfigError, match=word) as late:
        RLRoundStageConfig.model_validate(config).check()
    assert early.value.path == late.value.path


@pytest.mark.parametrize(
    "path",
    [
        "sft.optimizer", "preference.optimizer", "reward_model.optimizer", "rl.optimizer",
        "rl.critic.optimizer",
    ],
)  # fmt: skip
def test_an_average_needs_a_backend_that_keeps_one(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ["rl.algorithm.adv_estimator=gae", "rl.critic={}"] if "critic" in path else []
    pairs = ["data.arithmetic.num_preference=64", "preference={}", "reward_model={}"]
    asked = [*pairs, *others, f"{path}.ema={{decay: 0.9}}"]
    load_recipe("quickstart", asked)
    features = {**BACKENDS["fsdp2"].features}
    del features["ema"]
    backend = replace(BACKENDS["fsdp2"], features=features)
    monkeypatch.setitem(BACKENDS, "fsdp2", backend)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError) as refused:
        load_recipe("quickstart", asked)
    assert str(refused.value) == (
        f"{path}.ema: got one; fsdp2 keeps no average of its weights; need null; remove it, or set "
        "training.backend to fsdp or megatron or veomni or automodel or torchtitan"
    )


def test_truncated_sampling_is_refused_only_with_mismatch_check() -> None:
    for sampling in (
        SamplingConfig(top_p=0.9),
        SamplingConfig(top_k=3),
        SamplingConfig(structured_output=StructuredOutputConfig(choice=("yes", "no"))),
    ):
        with pytest.raises(ConfigError, match=r"^rl.sampling.*or rl.mismatch.enable to false$"):
            check_sampling(RLConfig(sampling=sampling))
        check_sampling(RLConfig.model_validate({"sampling": sampling, "mismatch": {"enable": 0}}))
    ends = SamplingConfig(stop=("</answer>",), stop_token_ids=(5,))
    check_sampling(RLConfig(sampling=ends))  # they end samples and cut no distribution


def test_a_form_of_answers_needs_an_engine_that_can() -> None:
    recipe = load_recipe("quickstart")
    form = StructuredOutputConfig(json_schema={"type": "object"})
    vllm = recipe.rollout.model_copy(update={"engine": "vllm"})
    check_structured_output("a.path", form, vllm)
    check_structured_output("a.path", None, recipe.rollout)
    with pytest.raises(ConfigError, match=r"^a.path: rollout.engine transformers does not support"):
        check_structured_output("a.path", form, recipe.rollout)
    with pytest.raises(ConfigError, match=r"^evaluation.structured_output: "):
        load_recipe("quickstart", ["evaluation.structured_output={regex: a}"])


@pytest.mark.parametrize("section", [SamplingConfig, EvaluationConfig])
@pytest.mark.parametrize(
    "changes",
    [
        {"stop": [""]},
        {"stop": ["a", "a"]},
        {"stop": [1]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [3, 3]},
        {"stop_token_ids": ["a"]},
        {"structured_output": {}},
        {"structured_output": {"regex": "a", "choice": ["a"]}},
        {"structured_output": {"regex": ""}},
        {"structured_output": {"grammar": "a"}},
    ],
    ids=str,
)
def test_what_ends_an_answer_is_looked_at_closely(section, changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        section.model_validate(changes)


def test_evaluations_inherit_stop_settings_of_rl_by_default() -> None:
    rl = ["rl.sampling.stop=['</answer>']", "rl.sampling.stop_token_ids=[5]"]
    stage = EvaluateStageConfig.from_recipe(load_recipe("quickstart", rl)).evaluation
    assert (stage.stop, stage.stop_token_ids) == (("</answer>",), (5,))
    sampling = stage.sampling(greedy=True)
    assert (sampling.stop, sampling.stop_token_ids, sampling.temperature) == (
        ("</answer>",),
        (5,),
        0,
    )
    own = load_recipe("quickstart", [*rl, "evaluation.stop=[]", "evaluation.stop_token_ids=[7]"])
    stage = EvaluateStageConfig.from_recipe(own).evaluation
    assert (stage.stop, stage.stop_token_ids) == ((), (7,))


@pytest.mark.parametrize("change", ["stop=[a]", "stop_token_ids=[5]"])
def test_what_ends_an_answer_counts_for_the_identity(change: str) -> None:
    plain, changed = (load_recipe("quickstart", over) for over in ([], [f"rl.sampling.{change}"]))
    for one, other in (
        (RLRoundStageConfig.from_recipe(plain, 1), RLRoundStageConfig.from_recipe(changed, 1)),
        (EvaluateStageConfig.from_recipe(plain), EvaluateStageConfig.from_recipe(changed)),
    ):
        assert one.identity_values() != other.identity_values()
    assert (
        SFTStageConfig.from_recipe(plain).identity_values()
        == SFTStageConfig.from_recipe(changed).identity_values()
    )


def test_evaluations_compute_as_training_does() -> None:
    """So a reward model says the same of the same answer in a round and in its evaluation."""
    assert EvaluateStageConfig.from_recipe(load_recipe("quickstart", [])).dtype == "float32"
    stage = EvaluateStageConfig.from_recipe(
        load_recipe("quickstart", ["training.dtype=bfloat16"]), "rl_round_1"
    )
    assert stage.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (
            {"kind": "ascending", "weights": {"a": 1}},
            r"o\.weights: got weights with kind ascending",
        ),
        ({"difficulty": "level"}, r"o\.difficulty: got level with kind shuffled"),
        ({"bands": [{}]}, r"o\.bands: got 1 with kind shuffled; need none"),
        ({"kind": "banded", "bands": [{"first_step": 1}]}, "need both to rise, first_step from 0"),
        ({"kind": "banded", "bands": [{}, {"first_step": 2}]}, "null in the last band alone"),
        (
            {
                "kind": "banded",
                "bands": [{"max_difficulty": 2}, {"max_difficulty": 1, "first_step": 2}],
            },
            r"max_difficulty \[2\.0, 1\.0\]; need both to rise",
        ),
    ],
)
def test_an_order_that_its_kind_would_not_read(order: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_order("o", OrderConfig.model_validate(order))


def test_orders_that_are_whole() -> None:
    bands = [{"max_difficulty": 2}, {"first_step": 3}]
    for order in (
        {},
        {"weights": {"a": 0.5, "b": 2}},
        {"kind": "ascending"},
        {"kind": "banded", "bands": bands},
    ):
        check_supervised_order("sft.order", OrderConfig.model_validate(order))
    with pytest.raises(ConfigError, match=r"^sft\.order\.difficulty: got level; need null"):
        check_supervised_order("sft.order", OrderConfig(kind="ascending", difficulty="level"))


def test_ascending_prompts_are_not_refilled() -> None:
    order = {"kind": "ascending", "difficulty": "level"}
    for num, refused in ((1, False), (2, True)):
        groups = {"enable": True, "max_num_gen_batches": num}
        rl = RLConfig.model_validate({"order": order, "algorithm": {"filter_groups": groups}})
        if refused:
            with pytest.raises(ConfigError, match=r"^rl\.order\.kind: got ascending"):
                check_rl_order(rl)
        else:
            check_rl_order(rl)
