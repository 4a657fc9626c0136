"""A model of ours as lm-evaluation-harness asks one (`lm_eval.api.model.TemplateLM`).

Promises: texts become tokens as the harness's own `hf` model makes them; log-likelihoods are sums
over the continuation's tokens of a packed forward pass, without padding; answers are sampled by
the rollout engine, greedily or with seeds that derive from the run's, so they repeat; a parameter
of generation that the engine does not have is refused.
Does not promise the context of the `hf` model for a text that is longer than the model's: prompt
and answer together take `max_length` tokens here, and one more there.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from engines.trainers.samples.prompts import sample_seeds
from engines.types import Completion, ModelOutputs, RolloutRequest, SamplingParams, TokenBatch
from infra.errors import ConfigError

NUM_AT_ONCE = 256
"""Requests of one call of an engine, between which progress is told."""
SAMPLING_FIELDS = frozenset({"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"})
"""Parameters of generation that the rollout engines have, as the harness calls them."""

Infer = Callable[[TokenBatch], ModelOutputs]
"""Log-probabilities where the column `loss_mask` is not 0, and there the likeliest token."""
Generate = Callable[[Sequence[RolloutRequest]], list[list[Completion]]]
Report = Callable[[int, int, str], None]
"""Is told how many are done, of how many, and what is."""
Encoded = tuple[Any, list[int], list[int]]
"""A request, and the token ids of its context and of its continuation."""


class HarnessModel(TemplateLM):
    """The model of one measurement.

    Args:
        tokenizer: of the model.
        max_length: tokens that the model was built for.
        infer: of its weights, not tempered.
        generate: answers requests.
        report: progress of each kind of request.
        seed: of the run.
        max_new_tokens: of an answer, where the task does not say.
        section: where a recipe has the tasks, for error lines.
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
        """Id of the token in front of a text that has no context: its start, else the end."""
        has_start = self.tokenizer.bos_token_id is not None
        return self._token_id("bos_token_id" if has_start else "eos_token_id")

    @property
    def tokenizer_name(self) -> str:
        """For caches of requests, which are off."""
        return self.tokenizer.name_or_path

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text.

        Args:
            string: the text.
            add_special_tokens: None adds what the tokenizer does, unless the text starts with it.
            **kwargs: nothing that counts here.

        Returns:
            The ids.
        """
        del kwargs
        if add_special_tokens is None:
            start = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not has_bos_prefix(string, start)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Messages as the model's chat template writes them.

        Args:
            chat_history: messages of a role and a content.
            add_generation_prompt: end with the opening of the answer; else the last message stays
                open.

        Returns:
            The text.

        Raises:
            ConfigError: the template refuses them, a system message say.
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
        """Log-likelihoods of whole texts, in windows of the model's length.

        Args:
            requests: of one text each.
            disable_tqdm: nothing; progress is in the journal.

        Returns:
            One sum each; 0 of an empty text.
        """
        del disable_tqdm
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
        """Answers up to a stop.

        Args:
            requests: of a prompt and parameters each.
            disable_tqdm: nothing; progress is in the journal.

        Returns:
            Texts, without what stopped them.

        Raises:
            ConfigError: a task asks for what the rollout engines do not have, or for answers
                longer than the model.
        """
        del disable_tqdm
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
        """Sum and greediness of each continuation."""
        del disable_tqdm
        found: list[tuple[float, bool]] = []
        for chunk in _chunks(requests):
            ids = [self._cut(context, rest) for _, context, rest in chunk]
            # A value that stands on a token speaks of predicting it.
            masks = [
                [0.0] * (len(row) - len(rest)) + [1.0] * len(rest)
                for row, (_, _, rest) in zip(ids, chunk, strict=True)
            ]
            batch = TokenBatch.from_sequences(ids, loss_mask=masks)
            found += _sums(batch, self._infer(batch))
            self._report(len(found), len(requests), "log-likelihoods")
        return found

    def _cut(self, context: list[int], continuation: list[int]) -> list[int]:
        """Both, with as much of the context as the model has room for."""
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
        number = self._num_asked[name]
        self._num_asked[name] += 1
        request_id = f"{name}/{number}"
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
    """Of each sequence the sum over its marked tokens, and whether all are the likeliest ones."""
    if outputs.topk_ids_TK is None:
        raise ValueError("the likeliest tokens were not asked for")
    marked_T = batch.columns["loss_mask"] != 0
    sequence_N = batch.sequence_index_T[marked_T]
    differs_N = outputs.topk_ids_TK[marked_T, 0] != batch.input_ids_T[marked_T]
    zeros_B = torch.zeros(batch.num_sequences, dtype=torch.float64)
    sums_B = zeros_B.index_add(0, sequence_N, outputs.logprobs_T[marked_T].double())
    num_differing_B = zeros_B.index_add(0, sequence_N, differs_N.double())
    return list(zip(sums_B.tolist(), (num_differing_B == 0).tolist(), strict=True))
