"""One rank with a real tiny model: sampling, logprobs, updates, checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from engines.algorithms.policy_objective import ValueObjective, policy_loss_fn
from engines.config.algorithm import AlgorithmConfig
from engines.config.rollout import RolloutConfig
from engines.config.training import LoraConfig, TrainingConfig
from engines.controller.model_worker import ModelWorker, WorkerSpec, role_checkpoint
from engines.errors import RolloutError
from engines.training.spec import CRITIC, POLICY, REFERENCE, ModelSource, RoleSpec
from engines.types import (
    Completion,
    PoisonedUpdate,
    Readouts,
    RolloutRequest,
    SamplingParams,
    TokenBatch,
)
from infra.errors import ConfigError

LOSS = policy_loss_fn(AlgorithmConfig(), 6)


def requests(num_prompts: int = 3, num_samples: int = 2, temperature: float = 1.0):
    return [
        RolloutRequest(
            f"p{i}",
            tuple(range(4, 6 + i)),
            SamplingParams(6, temperature),
            tuple(100 * i + j for j in range(num_samples)),
        )
        for i in range(num_prompts)
    ]


def packed(asked: list[RolloutRequest], completions: list[list[Completion]]) -> TokenBatch:
    pairs = [
        (request.prompt_ids, completion)
        for request, row in zip(asked, completions, strict=True)
        for completion in row
    ]
    return TokenBatch.from_sequences(
        [(*prompt, *completion.token_ids.tolist()) for prompt, completion in pairs],
        loss_mask=[[0] * len(p) + [1] * len(c.token_ids) for p, c in pairs],
        rollout_logprobs=[[0] * len(p) + c.logprobs.tolist() for p, c in pairs],
        advantages=[
            [0] * len(p) + [(-1) ** i] * len(c.token_ids) for i, (p, c) in enumerate(pairs)
        ],
    )


def weights(worker: ModelWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker._policy.get_per_tensor_param()}


def test_nothing_is_sampled_before_the_first_sync(policy_spec: WorkerSpec, start_worker) -> None:
    worker = start_worker(policy_spec)
    with pytest.raises(RolloutError, match="no confirmed weights; send them first"):
        worker.generate(requests())


def test_what_the_rollout_engine_refuses_costs_no_training(
    policy_spec: WorkerSpec, start_worker
) -> None:
    rollout = RolloutConfig(options={"max_prefill": 1})
    with pytest.raises(ConfigError, match=r"rollout.options.max_prefill: .*max_prefill_tokens"):
        start_worker(replace(policy_spec, rollout=rollout))
    with pytest.raises(ValidationError, match="'float32' or 'bfloat16'"):
        RolloutConfig.model_validate({"dtype": "float16"})


def test_samples_come_by_request_and_seed_and_carry_the_version(
    policy_spec: WorkerSpec, start_worker
) -> None:
    worker = start_worker(policy_spec)
    assert worker.sync_weights(7).version == 7
    rows = worker.generate(requests())
    assert [[c.sample_index for c in row] for row in rows] == [[0, 1]] * 3
    assert [row[0].request_id for row in rows] == ["p0", "p1", "p2"]
    assert {version for row in rows for c in row for version in c.policy_versions} == {7}
    # Alone or in company, a sample is the same: what makes the number of ranks immaterial.
    alone = worker.generate(requests()[1:2])[0]
    assert [c.token_ids.tolist() for c in alone] == [c.token_ids.tolist() for c in rows[1]]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_trainer_and_sampler_agree_on_the_same_tokens(
    temperature: float, policy_spec: WorkerSpec, model_dir: Path, start_worker
) -> None:
    worker = start_worker(replace(policy_spec, temperature=temperature))
    worker.sync_weights(0)
    asked = requests(num_samples=4, temperature=temperature)
    batch = packed(asked, worker.generate(asked))
    sampled_T = batch.columns["loss_mask"] > 0
    difference_T = worker.infer_logprobs(batch) - batch.columns["rollout_logprobs"]
    assert difference_T[sampled_T].abs().max() <= 1e-4
    # And with a third party: transformers' own forward pass, one sequence at a time.
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    bounds = batch.cu_seqlens.tolist()
    for start, end in zip(bounds, bounds[1:], strict=False):
        ids = batch.input_ids_T[start:end]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1] / temperature
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mask = sampled_T[start + 1 : end]
        found = worker.infer_logprobs(batch)[start + 1 : end]
        assert torch.allclose(found[mask], expected[mask], atol=1e-5)


def test_one_update_per_batch_needs_no_recomputed_logprobs(
    policy_spec: WorkerSpec, start_worker
) -> None:
    """The shortcut of the RL loop is exact: same loss, same gradient, same weights."""
    shortcut, recomputed = start_worker(policy_spec), start_worker(policy_spec)
    shortcut.sync_weights(0)
    asked = requests()
    batch = packed(asked, shortcut.generate(asked))
    short = shortcut.train(batch, LOSS)
    old_T = recomputed.infer_logprobs(batch)
    long = recomputed.train(batch.with_columns(old_logprobs=old_T), LOSS)
    assert short.loss == pytest.approx(long.loss, abs=1e-7)
    assert short.grad_norm == pytest.approx(long.grad_norm, rel=1e-6)
    one, other = weights(shortcut), weights(recomputed)
    assert all(torch.allclose(one[name], other[name], atol=1e-7) for name in one)


def test_updates_reach_the_sampler_only_by_a_sync(policy_spec: WorkerSpec, start_worker) -> None:
    worker = start_worker(policy_spec)
    first = worker.sync_weights(0)
    asked = requests()
    before = worker.generate(asked)
    worker.train(packed(asked, before), LOSS)
    assert worker.generate(asked) == before
    second = worker.sync_weights(1)
    assert second.sent.digest != first.sent.digest
    assert worker.generate(asked) != before


def test_the_reference_stays_where_it_started(policy_spec: WorkerSpec, start_worker) -> None:
    worker = start_worker(
        replace(
            policy_spec,
            roles={**policy_spec.roles, REFERENCE: replace(policy_spec.policy, optimizer=None)},
        )
    )
    worker.sync_weights(0)
    asked = requests()
    batch = packed(asked, worker.generate(asked))
    before = worker.infer_logprobs(batch)
    assert torch.equal(worker.infer_logprobs(batch, REFERENCE), before)
    worker.train(batch, LOSS)
    assert torch.equal(worker.infer_logprobs(batch, REFERENCE), before)
    assert not torch.equal(worker.infer_logprobs(batch), before)
    with pytest.raises(ValueError, match="without a reference"):
        start_worker(policy_spec).infer_logprobs(batch, REFERENCE)


def test_a_saved_worker_continues_bitwise(
    policy_spec: WorkerSpec, start_worker, tmp_path: Path
) -> None:
    worker = start_worker(policy_spec)
    worker.sync_weights(0)
    asked = requests()
    batch = packed(asked, worker.generate(asked))
    worker.train(batch, LOSS)
    worker.save_checkpoint(tmp_path, 1)
    expected = worker.train(batch, LOSS)
    resumed = start_worker(policy_spec)
    assert resumed.load_checkpoint(tmp_path) == 1
    assert resumed.train(batch, LOSS) == expected
    source = ModelSource(policy_spec.policy.source.hf_dir, tmp_path)
    started = start_worker(
        replace(
            policy_spec,
            roles={POLICY: replace(policy_spec.policy, source=source, restore_optimizer=True)},
        )
    )
    assert started.train(batch, LOSS) == expected
    fresh = start_worker(
        replace(policy_spec, roles={POLICY: replace(policy_spec.policy, source=source)})
    )
    assert fresh.train(batch, LOSS).loss == expected.loss
    same, other = weights(started), weights(fresh)
    assert any(not torch.equal(same[name], other[name]) for name in same)


def test_closing_leaves_the_process_group_and_may_be_repeated(policy_spec: WorkerSpec) -> None:
    # A lower precision goes through FSDP2, which needs a group for one rank too.
    spec = replace(
        policy_spec,
        roles={
            POLICY: replace(
                policy_spec.policy, training=TrainingConfig(num_threads=1, dtype="bfloat16")
            )
        },
    )
    for version in (0, 1):
        worker = ModelWorker(spec)
        worker.initialize()
        assert dist.is_initialized()
        assert worker.sync_weights(version).version == version
        worker.close()
        assert not dist.is_initialized()
        worker.close()


def test_policy_and_critic_are_saved_together_and_go_on_bitwise(
    policy_spec: WorkerSpec, start_worker, tmp_path: Path
) -> None:
    """With an adapter; and what a critic took after the checkpoint is as if it never was."""
    spec = with_critic(policy_spec, lora=LoraConfig(rank=4))
    worker = start_worker(spec)
    worker.sync_weights(0)
    asked = requests()
    batch = packed(asked, worker.generate(asked))
    batch = batch.with_columns(
        returns=batch.columns["advantages"], values=torch.zeros(batch.num_tokens)
    )
    value_loss = ValueObjective(0.5)

    def step(one: ModelWorker):
        return one.train(batch, value_loss, CRITIC), one.train(batch, LOSS)

    step(worker)
    worker.save_checkpoint(tmp_path, 1)
    assert (tmp_path / "roles" / "critic").is_dir()
    expected = step(worker)
    resumed = start_worker(spec)
    assert resumed.load_checkpoint(tmp_path) == 1
    resumed.train(batch, value_loss, CRITIC)  # killed here: between critic and policy
    again = start_worker(spec)
    again.load_checkpoint(tmp_path)
    assert step(again) == expected
    values = [one.infer(batch, Readouts(last_values=True), CRITIC) for one in (worker, again)]
    assert torch.equal(values[0].values_T, values[1].values_T)
    assert torch.equal(values[0].last_values_B, values[1].last_values_B)
    assert not torch.equal(values[0].values_T, torch.zeros(batch.num_tokens))
    # A round continues both; another critic starts on its weights with a new optimizer.
    roles = {
        name: replace(
            role,
            source=ModelSource(role.source.hf_dir, role_checkpoint(tmp_path, name)),
            restore_optimizer=True,
        )
        for name, role in spec.roles.items()
    }
    assert step(start_worker(replace(spec, roles=roles))) == expected


def test_a_spoiled_update_changes_no_weight(policy_spec: WorkerSpec, start_worker) -> None:
    worker = start_worker(policy_spec)
    worker.sync_weights(0)
    asked = requests()
    batch = packed(asked, worker.generate(asked))
    before = weights(worker)
    spoiled = batch.with_columns(advantages=batch.columns["advantages"] * torch.nan)
    found = worker.train(spoiled, LOSS)
    assert found == PoisonedUpdate("loss is nan at optimizer step 0")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(worker).items())
    fresh = start_worker(policy_spec)
    assert worker.train(batch, LOSS) == fresh.train(batch, LOSS)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_refreshed_reference_is_the_policy_at_round_start(
    policy_spec: WorkerSpec, start_worker, tmp_path: Path, lora: LoraConfig | None
) -> None:
    """With an adapter too: then it is not what the policy is without one."""
    spec = policy_of(policy_spec, training=TrainingConfig(num_threads=1, lora=lora))
    worker = start_worker(spec)
    worker.sync_weights(0)
    asked = requests()
    batch = packed(asked, worker.generate(asked))
    at_first_T = worker.infer_logprobs(batch)
    worker.train(batch, LOSS)
    worker.train(batch, LOSS)
    at_last_T = worker.infer_logprobs(batch)
    assert not torch.allclose(at_last_T, at_first_T, atol=1e-4)
    worker.save_checkpoint(tmp_path, 2)
    source = ModelSource(spec.policy.source.hf_dir, tmp_path)
    policy = replace(spec.policy, source=source, restore_optimizer=True)
    for reference, expected_T in ((source, at_last_T), (spec.policy.source, at_first_T)):
        roles = {POLICY: policy, REFERENCE: RoleSpec(reference, policy.training)}
        later = start_worker(replace(spec, roles=roles))
        later.train(batch, LOSS)
        found_T = later.infer_logprobs(batch, REFERENCE)
        assert torch.allclose(found_T, expected_T, atol=1e-5)


def policy_of(spec: WorkerSpec, **changes: Any) -> WorkerSpec:
    return replace(spec, roles={**spec.roles, POLICY: replace(spec.policy, **changes)})


def with_critic(spec: WorkerSpec, lora: LoraConfig | None = None) -> WorkerSpec:
    critic = replace(spec.policy, model_type="value_model")
    spec = policy_of(spec, training=TrainingConfig(num_threads=1, lora=lora))
    return replace(spec, roles={**spec.roles, CRITIC: critic})


def test_the_audit_reports_each_phase_of_a_step(policy_spec: WorkerSpec, start_worker) -> None:
    role = policy_spec.policy
    for audit in (False, True):
        training = role.training.model_copy(update={"memory_audit": audit})
        roles = {POLICY: replace(role, training=training)}
        worker = start_worker(replace(policy_spec, roles=roles))
        worker.sync_weights(1)
        asked = requests()
        batch = packed(asked, worker.generate(asked))
        worker.sleep()
        worker.train(batch.with_columns(old_logprobs=worker.infer_logprobs(batch)), LOSS)
        found = {k: v for k, v in worker.performance_metrics().items() if k.startswith("memory/")}
        if not audit:
            assert found == {}
            continue
        num_bytes = sum(tensor.nbytes for tensor in weights(worker).values())
        for phase in ("train", "sync", "sample"):
            assert found[f"memory/{phase}_parameter_bytes"] == num_bytes
            assert found[f"memory/{phase}_moment_bytes"] == 2 * num_bytes
            assert found[f"memory/{phase}_system_bytes"] > found[f"memory/{phase}_counted_bytes"]
        assert found["memory/train_gradient_bytes"] == num_bytes
        assert found["memory/train_saved_bytes"] > 0
        assert "memory/train_engine_bytes" not in found
        assert found["memory/sample_engine_bytes"] == num_bytes
        # Rows have room for 32 positions of 2 layers, keys and values of one head of 16 numbers.
        assert found["memory/sample_cache_bytes"] == 6 * 32 * 2 * 2 * 16 * 4
        assert not any(k.startswith("memory/") for k in worker.performance_metrics())
