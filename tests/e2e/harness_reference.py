"""What lm-evaluation-harness finds with its own `hf` model, and transformers on the same texts.

Runs in the job environment of the harness: `python harness_reference.py < JSON > JSON`.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer


def loglikelihood(model: Any, context: list[int], rest: list[int]) -> tuple[float, bool]:
    """Of one continuation, by one forward pass of its own."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *rest]])).logits[0]
    rows = logits[len(context) - 1 : -1].double().log_softmax(-1)
    ids = torch.tensor(rest)
    return rows.gather(1, ids[:, None]).sum().item(), bool((rows.argmax(-1) == ids).all())


def greedy(model: Any, tokenizer: Any, prompt: str, num_tokens: int, stop: list[str]) -> str:
    """An answer, cut at the first stop."""
    ids = torch.tensor([tokenizer.encode(prompt)])
    asked = {"max_new_tokens": num_tokens, "do_sample": False}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)[0, ids.shape[1] :]
    text = tokenizer.decode(made, skip_special_tokens=True)
    for each in stop:
        text = text.split(each)[0]
    return text


def main() -> None:
    """Answer one question of the test."""
    asked = json.load(sys.stdin)
    include, directory = Path(asked["include"]), asked["model"]
    with contextlib.redirect_stdout(sys.stderr):
        with contextlib.chdir(include):
            found = simple_evaluate(
                model="hf",
                model_args={
                    "pretrained": directory,
                    "dtype": "float32",
                    # Of a packed sequence the last token is read too.
                    "max_length": asked["max_length"] - 1,
                },
                device="cpu",
                batch_size=1,
                task_manager=TaskManager(include_path=str(include)),
                **asked["harness"],
            )
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory)
        sums = [
            loglikelihood(model, tokenizer.encode(context), tokenizer.encode(rest))
            for context, rest in asked["pairs"]
        ]
        texts = [
            greedy(model, tokenizer, prompt, parameters["max_gen_toks"], parameters["until"])
            for prompt, parameters in asked["prompts"]
        ]
    json.dump({"results": found["results"], "sums": sums, "texts": texts}, sys.stdout)


if __name__ == "__main__":
    main()
