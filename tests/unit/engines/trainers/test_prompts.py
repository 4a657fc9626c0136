"""The requests of a step are a pure function of (seed, round, step)."""

from collections import Counter

from engines.config.stages.rl import RLRoundStageConfig
from engines.data.read.examples import RLPrompt
from engines.data.read.rows import Message, RewardModel, RLRow
from engines.trainers.prompts import PromptSource, derive_seed, sample_seeds
from engines.types import StructuredOutput

NUM_ROWS = 10
SEED_OF_SAMPLE = 3_111_465_727_103_462_667
"""Of run seed 7: a run that is reproduced draws as it did."""


def source(seed: int = 0, round_: int = 1, **changes) -> PromptSource:
    config = RLRoundStageConfig.model_validate(
        {
            "round": round_,
            "model": {"init": "random"},
            "training": {},
            "rollout": {},
            "rl": {
                "num_steps_per_round": 5,
                "batch_size_prompts": 4,
                "group_size": 3,
                "sampling": {"max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 8},
                "algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 3}},
                **changes,
            },
            "checkpoint": {},
        }
    )
    prompts = [
        RLPrompt(
            i,
            RLRow(
                "s", (Message("user", f"q{i}"),), "", RewardModel("rule", str(i)), {"level": i // 5}
            ),
            (i, i),
        )
        for i in range(NUM_ROWS)
    ]
    return PromptSource(prompts, config, seed)


def test_two_sources_give_one_and_the_same_step() -> None:
    first, second = source(), source()
    list(first.generation_batches(1))
    assert list(first.generation_batches(3)) == list(second.generation_batches(3))
    assert list(first.generation_batches(3)) != list(source(seed=1).generation_batches(3))


def test_every_sample_of_a_run_has_a_seed_of_its_own() -> None:
    seeds = [
        seed
        for step in range(1, 6)
        for batch in source().generation_batches(step)
        for request in batch.requests
        for seed in request.seeds
    ]
    assert len(set(seeds)) == len(seeds) == 5 * 3 * 4 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    other_round = next(iter(source(round_=2).generation_batches(1))).requests[0].seeds
    assert other_round != next(iter(source().generation_batches(1))).requests[0].seeds


def test_requests_have_prompt_sampling_and_step_unique_name() -> None:
    batches = list(source().generation_batches(2))
    assert [batch.first_group for batch in batches] == [0, 4, 8]
    names = [request.request_id for batch in batches for request in batch.requests]
    assert names[0] == "round=1/step=2/prompt=0"
    assert names[-1] == "round=1/step=2/prompt=11"
    for batch in batches:
        for row, request in zip(batch.rows, batch.requests, strict=True):
            number = int(row.reward_model.ground_truth)
            assert request.prompt_ids == (number, number)
            assert request.num_samples == 3
            sampling = request.sampling
            assert (sampling.max_new_tokens, sampling.temperature) == (5, 0.7)
            assert (sampling.top_p, sampling.top_k) == (0.9, 8)


def test_epoch_of_first_batches_visits_rows_once_despite_refills() -> None:
    visited = Counter(
        row.reward_model.ground_truth
        for step in range(1, 6)
        for row in next(iter(source().generation_batches(step))).rows
    )
    assert set(visited.values()) == {2}
    assert len(visited) == NUM_ROWS
    assert source().epoch(5) == 2.0


def test_without_refills_a_step_has_one_batch() -> None:
    algorithm = {"filter_groups": {"enable": True, "max_num_gen_batches": 1}}
    assert len(list(source(algorithm=algorithm).generation_batches(1))) == 1


def test_seeds_do_not_depend_on_how_many_are_asked_for() -> None:
    assert sample_seeds(5, "a", 4)[:2] == sample_seeds(5, "a", 2)
    assert derive_seed(5, "a") != derive_seed(5, "b")
    assert derive_seed(51, "a") != derive_seed(5, "1/a")


def test_each_turn_has_own_seeds_and_first_turn_the_default_ones() -> None:
    turns = [sample_seeds(5, "a", 3, turn) for turn in range(4)]
    assert (
        turns[0]
        == sample_seeds(5, "a", 3)
        == tuple(derive_seed(5, f"a/sample={i}") for i in range(3))
    )
    assert len({seed for seeds in turns for seed in seeds}) == 12
    assert sample_seeds(7, "round=1/step=1/prompt=0", 1) == (SEED_OF_SAMPLE,)


def test_requests_say_what_ends_a_sample() -> None:
    sampling = {
        "max_new_tokens": 5,
        "stop": ["</a>", "!"],
        "stop_token_ids": [4],
        "structured_output": {"json_schema": {"type": "object", "b": 1, "a": 2}},
    }
    [first, *_] = source(sampling=sampling).generation_batches(1)
    for request in first.requests:
        found = request.sampling
        assert (found.stop, found.stop_token_ids) == (("</a>", "!"), (4,))
        assert found.structured_output == StructuredOutput('{"type": "object", "b": 1, "a": 2}')
        assert (request.turn, request.prefixes, request.session) == (0, (), None)


def test_band_opens_for_all_batches_of_its_step_and_not_before() -> None:
    bands = [{"max_difficulty": 0}, {"first_step": 2}]
    prompts = source(order={"kind": "banded", "difficulty": "level", "bands": bands})
    visited = {
        step: {
            row.prompt[0].content
            for batch in prompts.generation_batches(step)
            for row in batch.rows
        }
        for step in (1, 2, 3)
    }
    easy = {f"q{place}" for place in range(5)}
    assert visited[1] == visited[2] == easy
    assert visited[3] - easy
