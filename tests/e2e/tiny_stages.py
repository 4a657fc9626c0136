"""Configurations of stages that end in seconds: a model of two small layers, sums of one digit."""

MODEL = {
    "init": "random",
    "max_length": 32,
    "architecture": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    },
}
DATA = {
    "arithmetic": {"num_digits": 1, "num_sft": 40, "num_rl": 40, "num_eval": 4},
    "max_prompt_length": 16,
}
EVALUATION = {"max_new_tokens": 5, "num_samples": 4, "pass_at": [1, 4]}
REWARD = {"function": "exact"}
SFT = {
    "model": MODEL,
    "training": {"num_threads": 1},
    "sft": {
        "num_steps": 24,
        "batch_size_sequences": 16,
        "optimizer": {"lr": 5e-3, "schedule": "cosine", "num_warmup_steps": 4},
    },
    "checkpoint": {"every_num_steps": 4},
}
RL_ROUND = {
    "round": 1,
    "model": MODEL,
    "training": {"num_threads": 1},
    "rollout": {},
    "rl": {
        "num_steps_per_round": 8,
        "batch_size_prompts": 8,
        "group_size": 4,
        "mini_batch_size_prompts": 4,
        "num_epochs": 2,
        "sampling": {"max_new_tokens": 5},
        "optimizer": {"lr": 1e-3},
        "algorithm": {
            "use_kl_loss": True,
            "filter_groups": {"enable": True, "max_num_gen_batches": 3},
            "overlong": {"enable": True, "buffer_length": 2, "penalty_factor": 0.5},
        },
        "reward": REWARD,
        "mismatch": {"max": 1e-4},
    },
    "checkpoint": {"every_num_steps": 2},
}
EVALUATE = {"evaluation": EVALUATION, "rollout": {}, "reward": REWARD}
