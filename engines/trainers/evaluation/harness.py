"""Run tasks of lm-evaluation-harness by its API (`lm_eval.simple_evaluate`).

Our models are behind the harness's interface, `lm_eval.api.model.TemplateLM`.
Promises: texts are tokenized like in the harness's `hf` model; log-likelihoods are sums over the
continuation's tokens; answers are sampled by the rollout engine, greedily or with derived seeds;
unsupported generation parameters are refused. Nothing is cached as a pickle, no code of a data set
is run, and a task that the harness marks as unsafe is refused. Python functions of the user's own
tasks are run, like a reward file.
Does not promise: reproducible data, since the harness fetches a hub's data sets without a commit;
or the `hf` model's context for texts that are too long: it fits one token more.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from numbers import Real
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jinja2
import torch
from datasets.exceptions import DatasetsError
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from engines.config.suite import HarnessConfig
from engines.trainers.evaluation.documents import Document, metric_name
from engines.trainers.prompts import sample_seeds
from engines.types import (
    Generate,
    ModelOutputs,
    RolloutRequest,
    SamplingParams,
    TokenBatch,
)
from infra import env
from infra.errors import ConfigError

NUM_AT_ONCE = 256
"""Requests per call of an engine; progress is reported between calls."""
SAMPLING_FIELDS = frozenset({"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"})
"""Generation parameters that the rollout engines support, by the harness's names."""

Infer = Callable[[TokenBatch], ModelOutputs]
"""Returns logprobs and the most likely token where the column `loss_mask` is not 0."""
Report = Callable[[int, int, str], None]
"""Called with the number done, the total, and the kind of request."""
Encoded = tuple[Any, list[int], list[int]]
"""A request, and the token ids of its context and of its continuation."""


class HarnessModel(TemplateLM):
    """Answers the harness's requests with our model: log-likelihoods and generated texts.

    `infer` uses no temperature. `max_length` is the context in tokens, `max_new_tokens` the limit
    of an answer if the task sets none, `section` the recipe's section for errors.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        infer: Infer,
        generate: Generate,
        report: Report,
        seed: int,
        max_new_tokens: int,
        section: str,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._infer, self._generate, self._report = infer, generate, report
        self._seed, self._max_new_tokens, self._section = seed, max_new_tokens, section
        self._num_asked: Counter[str] = Counter()

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-sequence token."""
        return self._token_id("eos_token_id")

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without context: BOS, else EOS."""
        return self._token_id(
            "eos_token_id" if self.tokenizer.bos_token_id is None else "bos_token_id"
        )

    @property
    def tokenizer_name(self) -> str:
        """Key of request caches, which are disabled."""
        return self.tokenizer.name_or_path

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return token ids; None adds special tokens unless the text starts with the prefix."""
        if add_special_tokens is None:
            start = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not has_bos_prefix(string, start)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render messages, the last left open without `add_generation_prompt`.

        Raises:
            ConfigError: the template refuses the messages, e.g. a system message.
        """
        try:
            return self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )  # pyright: ignore[reportReturnType] - a text, since it tokenizes none
        except (jinja2.TemplateError, ValueError) as error:
            roles = ", ".join(message["role"] for message in chat_history)
            raise ConfigError(
                "model.chat_template",
                f"{error}; {self._section} writes messages of {roles}; need a template for them; "
                "set one, or apply_chat_template: false",
            ) from None

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-likelihoods of whole texts in windows of the model's length; 0 if empty."""
        windows = [
            (place, *make_disjoint_window(window))
            for place, request in enumerate(requests)
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
        ]
        sums = [0.0] * len(requests)
        for (place, _, _), (total, _) in zip(
            windows, self._loglikelihood_tokens(windows), strict=True
        ):
            sums[place] += total
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return answers without stop texts; `ConfigError` if a task's parameters do not fit."""
        asked = [self._rollout_request(request) for request in requests]
        texts = []
        for chunk in _chunks(asked):
            for request, [answer] in zip(chunk, self._generate(chunk), strict=True):
                text = self.tokenizer.decode(answer.token_ids.tolist(), skip_special_tokens=True)
                stop = list(request.sampling.stop)
                texts.append(postprocess_generated_text(str(text), stop, think_end_token=None))
            self._report(len(texts), len(asked), "answers")
        return texts

    def _loglikelihood_tokens(
        self, requests: list[Encoded], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return each continuation's summed logprob, and True if greedy decoding would give it."""
        found: list[tuple[float, bool]] = []
        for chunk in _chunks(requests):
            ids = [self._cut(context, rest) for _, context, rest in chunk]
            # The logprob at a token is that of predicting it.
            masks = [
                [0.0] * (len(row) - len(rest)) + [1.0] * len(rest)
                for row, (_, _, rest) in zip(ids, chunk, strict=True)
            ]
            batch = TokenBatch.from_sequences(ids, loss_mask=masks)
            found += _sums(batch, self._infer(batch))
            self._report(len(found), len(requests), "log-likelihoods")
        return found

    def _cut(self, context: list[int], continuation: list[int]) -> list[int]:
        """Concatenate both; cut the context from the left to the model's length."""
        if len(continuation) >= self.max_length:
            raise ConfigError(
                f"{self._section}.tasks",
                f"got a continuation of {len(continuation)} tokens; need fewer than the model's "
                f"{self.max_length}; leave the task out",
            )
        return [*context, *continuation][-self.max_length :]

    def _rollout_request(self, request: Instance) -> RolloutRequest:
        prompt, parameters = request.args
        sampling = self._sampling(parameters, str(request.task_name))
        room = self.max_length - sampling.max_new_tokens
        name = f"harness/{request.task_name}/{request.doc_id}/{request.idx}"
        request_id = f"{name}/{self._num_asked[name]}"
        self._num_asked[name] += 1
        return RolloutRequest(
            request_id=request_id,
            prompt_ids=tuple(self.tok_encode(prompt)[-room:] or [self.prefix_token_id]),
            sampling=sampling,
            seeds=sample_seeds(self._seed, request_id, 1),
        )

    def _sampling(self, parameters: Mapping[str, Any], task: str) -> SamplingParams:
        given: Mapping[str, Any] = normalize_gen_kwargs(dict(parameters), self._max_new_tokens)
        unknown = sorted(given.keys() - SAMPLING_FIELDS)
        if unknown:
            raise ConfigError(
                f"{self._section}.tasks",
                f"{task} asks for {', '.join(unknown)} in generation_kwargs; need only "
                f"{', '.join(sorted(SAMPLING_FIELDS))}; leave the task out",
            )
        if given["max_gen_toks"] >= self.max_length:
            raise ConfigError(
                f"{self._section}.tasks",
                f"{task} asks for answers of {given['max_gen_toks']} tokens; need fewer than the "
                f"model's {self.max_length}; leave the task out",
            )
        stop = handle_stop_sequences(given["until"], eos=None)
        is_sampled = given["do_sample"]
        return SamplingParams(
            max_new_tokens=given["max_gen_toks"],
            temperature=given.get("temperature", 1.0) if is_sampled else 0.0,
            top_p=given.get("top_p", 1.0) if is_sampled else 1.0,
            top_k=given.get("top_k", 0) if is_sampled else 0,
            stop=tuple(dict.fromkeys(text for text in stop if text)),
        )

    def _token_id(self, name: str) -> int:
        found = getattr(self.tokenizer, name)
        if found is None:
            raise ConfigError(
                "model.path", f"its tokenizer has no {name}; the harness needs one; set it"
            )
        return found


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), NUM_AT_ONCE):
        yield items[start : start + NUM_AT_ONCE]


def _sums(batch: TokenBatch, outputs: ModelOutputs) -> list[tuple[float, bool]]:
    """Return the sum over each sequence's marked tokens, and True if all are the argmax."""
    if outputs.topk_ids_TK is None:
        raise ValueError("the likeliest tokens were not asked for")
    marked_T = batch.columns["loss_mask"] != 0
    sequence_N = batch.sequence_index_T[marked_T]
    differs_N = outputs.topk_ids_TK[marked_T, 0] != batch.input_ids_T[marked_T]
    zeros_B = torch.zeros(batch.num_sequences, dtype=torch.float64)
    sums_B = zeros_B.index_add(0, sequence_N, outputs.logprobs_T[marked_T].double())
    num_differing_B = zeros_B.index_add(0, sequence_N, differs_N.double())
    return list(zip(sums_B.tolist(), (num_differing_B == 0).tolist(), strict=True))


class _Tasks(TaskManager):
    """The harness's and the user's tasks; paths in the user's are relative to `include`."""

    def __init__(self, include: Path | None, section: str) -> None:
        super().__init__(include_path=None if include is None else str(include))
        self._include, self._setting = include, f"{section}.tasks"

    def load(self, task_list: Any) -> Any:
        """Build tasks and read their data; `ConfigError` if a task, library or data is missing."""
        known = set(self.all_tasks)
        for name in task_list:
            if name not in known:
                near = ", ".join(get_close_matches(name, sorted(known))) or "none"
                raise ConfigError(
                    self._setting,
                    f"no {name!r}; nearest: {near}; need a task, group or tag of the harness or of "
                    "include; `.envs/lm-eval/bin/lm_eval ls tasks` lists its own",
                )
        with contextlib.chdir(self._include or Path.cwd()):
            try:
                return super().load(task_list)
            except (OSError, DatasetsError, ImportError) as error:
                told = " ".join(str(error).split())
                raise ConfigError(
                    self._setting,
                    f"got {', '.join(task_list)}, which cannot be loaded ({type(error).__name__}: "
                    f"{told}); need its data, from the hub or a cache (HF_HOME); fetch it, or "
                    "leave the task out",
                ) from error


def run_tasks(
    config: HarnessConfig,
    model: HarnessModel,
    include: Path | None,
    seed: int,
    confidence: float,
    section: str,
) -> tuple[dict[str, float], dict[str, Any], list[Document]]:
    """Run the configured tasks on a model; return metrics, tasks and documents.

    Metrics are finite, by `metric_name`, with `_low` and `_high` of two-sided intervals if there is
    a standard error. Tasks have version, numbers of examples and documents, and metric directions.
    Few-shot examples use `config.fewshot_seed`. Raises `ConfigError` if a task cannot be run.
    """
    if config.apply_chat_template and not model.tokenizer.chat_template:
        raise ConfigError(
            "model.chat_template",
            f"missing, and {section}.apply_chat_template is on; set one, or switch it off",
        )
    # Otherwise bootstraps fork a process pool from a process with torch threads.
    env.set_for_process(env.DISABLE_MULTIPROC.name, "1")
    found = simple_evaluate(
        model=model,
        tasks=[*config.tasks],
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        bootstrap_iters=config.bootstrap_iters,
        system_instruction=config.system_instruction,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=config.fewshot_as_multiturn,
        task_manager=_Tasks(include, section),
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=config.fewshot_seed,
    )
    return (
        _metrics(found, confidence),
        {
            name: {
                "version": str(found["versions"].get(name)),
                "num_fewshot": found["n-shot"].get(name),
                "num_documents": counts["effective"],
                "higher_is_better": found["higher_is_better"].get(name),
            }
            for name, counts in found["n-samples"].items()
        },
        [_document(task, row) for task, rows in sorted(found["samples"].items()) for row in rows],
    )


def _metrics(found: Mapping[str, Any], confidence: float) -> dict[str, float]:
    """Return metrics by name, with normal intervals if the harness gives a standard error."""
    width = NormalDist().inv_cdf((1 + confidence) / 2)
    num_documents = sum(counts["effective"] for counts in found["n-samples"].values())
    metrics = {"num_problems": float(num_documents)}
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _is_number(value):
                continue
            name = metric_name(task, metric, filter_name)
            metrics[name] = float(value)
            error = values.get(f"{metric}_stderr,{filter_name}")
            if _is_number(error):
                metrics[f"{name}_low"] = float(value - width * error)
                metrics[f"{name}_high"] = float(value + width * error)
    return metrics


def _document(task: str, row: Mapping[str, Any]) -> Document:
    return {
        "task": task,
        "filter": row["filter"],
        "index": row["doc_id"],
        "digest": row["doc_hash"],
        "document": _json(row["doc"]),
        "target": row["target"] if isinstance(row["target"], str) else _json(row["target"]),
        "requests": [_json(each) for each in row["arguments"]],
        "responses": [_json(each) for each in row["resps"]],
        "metrics": {
            metric_name(task, name, row["filter"]): float(row[name])
            for name in row["metrics"]
            if _is_number(row[name])
        },
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and isfinite(value)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
