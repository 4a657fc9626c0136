"""A recipe of every trainer: SFT, reward model, preferences, RL judged by it, and by a teacher."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_pipeline import Home, settings
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from engines.data.read.chat import render_whole
from engines.data.read.rows import Message
from engines.data.read.tokenizer import DirectoryTokenizer

PAIRS = (
    "data.arithmetic.num_preference=32",
    "data.arithmetic.num_preference_eval=16",
    "reward_model={num_steps: 4, batch_size_pairs: 8, optimizer: {lr: 1.0e-2}}",
    "preference={num_steps: 3, batch_size_pairs: 8, optimizer: {lr: 1.0e-3}}",
    "rl.reward={function: mixture, model: {max_length: 64}, accuracy: [exact], components: "
    "{rm: {function: model}, exact: {function: exact, weight: 0.0}}}",
)
ORDER = [
    "preprocess", "sft", "reward_model", "evaluate_sft", "preference", "evaluate_preference",
    "rl_round_1", "evaluate_rl_round_1", "merge", "evaluate", "promote",
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """In which the recipe has run."""
    home = Home(tmp_path_factory.mktemp("trainers") / "run")
    home.run(*PAIRS)
    return home


@pytest.mark.slow
def test_all_stages_run_and_reward_model_loads_in_transformers(home: Home) -> None:
    stages = {stage["name"]: stage for stage in home.run(*PAIRS)["stages"]}
    assert list(stages) == ORDER
    for name in ("reward_model", "preference"):
        assert stages[name]["metrics"]["num_pairs"] == 16
    scores = home.values("critic/score/mean")
    assert scores
    assert len({round(score, 6) for score in scores}) == len(scores), "a model says them"
    [directory] = (home.path / "store/artifacts/reward_model").iterdir()
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    turns = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "640"}]
    found = []
    for answer in ("640", "641"):
        turns[1]["content"] = answer
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        messages = [Message(turn["role"], turn["content"]) for turn in turns]
        [own] = render_whole(DirectoryTokenizer.load(directory), [messages])
        assert ids["input_ids"][0].tolist() == list(own)
        with torch.no_grad():
            found.append(model(ids["input_ids"]).logits.item())
    assert found[0] != found[1], "answers that differ in their last digit alone"
    again = home.rlhf("run", *settings(*PAIRS)).splitlines()
    assert not [line for line in again if "  submitted" in line]


@pytest.mark.stacks
def test_the_model_that_was_promoted_teaches(home: Home) -> None:
    """It is named by its alias, which costs nothing that is done already."""
    teacher = "rl.distillation={path: 'models:/tiny@champion', num_top: 4}"
    taught = (*PAIRS, teacher, "promote.model_name=taught", "soup={num_policies: 2}")
    printed = home.rlhf("run", *settings(*taught)).splitlines()
    ran = [line.split()[0] for line in printed if "  submitted" in line]
    last = ["merge_preference", "merge_rl_round_1", "soup"]
    assert ran == ["rl_round_1", *last, "evaluate", "promote"]
    first, *_ = home.values("distillation/loss")
    assert first > 0
    assert home.rlhf("run", *settings(*taught)).count("  submitted") == 0
    digests = [s["digest"] for s in home.report("\n".join(printed))["stages"] if s["name"] in last]
    *models, soup = (
        load_file(home.path / "store/artifacts/model" / digest / "model.safetensors")
        for digest in digests
    )
    for name, mean in soup.items():
        torch.testing.assert_close(mean, (models[0][name] + models[1][name]) / 2)
