"""The transformers model of a rollout engine: weights, forward passes, images, what is refused.

Promises: built from configuration files, without drawing random numbers. Takes weights and
persistent buffers under the names that `save_pretrained` writes, each exactly once and in the dtype
in which it is held, or raises. Models with unsupported attention (recurrent layers, soft caps,
custom attention) are refused at construction or at the first forward pass. The context ends where
rotary embeddings would depend on the longest sequence of the batch. Features and positions of
images are those of the trainer's forward pass (`engines.vision.processor`); after the prompt a
rotary position is the place plus a fixed offset, since an image takes fewer positions than places.
Does not promise support of every architecture: it must use transformers' `AttentionInterface`. An
image placeholder is never sampled; its small probability is missing from the distribution, while
the trainer's distribution includes it.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from engines.architecture import class_refusal, model_class, position_refusal, text_settings
from engines.checkpoint.hub_names import hub_slots, keep_float32, named_state
from engines.checkpoint.model_directory import (
    VISION_MODEL_TYPES,
    rotary_limit,
    vision_model_type,
)
from engines.checkpoint.stop_tokens import eos_token_ids
from engines.checksum import ChecksumMethod
from engines.errors import RolloutError
from engines.rollout.expected_tensors import ExpectedTensors, digest_of, tied_names
from engines.rollout.transformers.attention import ATTENTION_NAME, DecodeStep, PrefillStep
from engines.rollout.transformers.decoder import Decoder, is_covered
from engines.rollout.transformers.kv_cache import KVCache
from engines.rollout.transformers.options import refusal
from engines.training.backends.transformers.head import LogprobHead
from engines.training.model.linear_logprobs import Targets
from engines.types import TokenBatch
from engines.vision.processor import ImageProcessor, image_positions
from engines.weight_sync.base import WeightDigest
from infra.errors import ConfigError

ATTENTION = {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}
"""`attn_implementation` of a model with images: the vision tower uses transformers' own."""


class Vision:
    """Prepares images for a model; the image processor is loaded for the first image."""

    def __init__(self, model: Any, hf_dir: Path) -> None:
        self._inner: Any = model.model
        self._token_id: int = model.config.image_token_id
        both = self._token_id, getattr(model.config, "video_token_id", None)
        self.placeholders = [token for token in both if token is not None]
        self._hf_dir = hf_dir
        self._processor: ImageProcessor | None = None

    def see(
        self, sequences: Sequence[Sequence[int]], images: Sequence[Sequence[bytes]]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Prepare the prefill of P sequences with a run of placeholders per image.

        Returns, on the CPU: (3, 1, T) int64 rotary positions along time, height and width; (P,)
        int64 offsets from the place of the next token to its rotary position; further inputs.

        Raises:
            RolloutError: placeholders and images of a sequence do not match.
        """
        patches, inputs = None, dict[str, Tensor]()
        if any(images):
            self._processor = self._processor or ImageProcessor(self._hf_dir)
            patches = self._processor.of_sequences(images)
        if patches is not None:
            inputs = {
                "pixel_values": patches.pixel_values_PD,
                "image_grid_thw": patches.grid_thw_I3,
            }
        batch = TokenBatch.from_sequences(sequences, images=patches)
        self._check(batch)
        position_31T = image_positions(self._inner, batch, self._token_id)
        lengths = batch.lengths_B.tolist()
        ahead = [
            int(position.max()) + 1 - length
            for position, length in zip(position_31T.split(lengths, dim=2), lengths, strict=True)
        ]
        return position_31T, torch.tensor(ahead), inputs

    def check_text(self, input_ids_T: Tensor) -> None:
        """Raise a RolloutError if one of the (T,) int64 tokens stands for an image."""
        placeholders = torch.tensor(self.placeholders, device=input_ids_T.device)
        found_N = input_ids_T[torch.isin(input_ids_T, placeholders)]
        if len(found_N):
            raise RolloutError(
                f"{len(found_N)} tokens of a prompt stand for images, the first {int(found_N[0])}; "
                "need a prompt of text only to compute its logprobs"
            )

    def _check(self, batch: TokenBatch) -> None:
        """Compare placeholders and features per sequence; the model compares only the sums."""
        held_B = torch.zeros(batch.num_sequences, dtype=torch.int64).index_add_(
            0, batch.sequence_index_T, (batch.input_ids_T == self._token_id).long()
        )
        wanted_B = torch.zeros_like(held_B)
        if batch.images is not None:
            num_merged = self._inner.config.vision_config.spatial_merge_size**2
            sequence_I = torch.arange(batch.num_sequences).repeat_interleave(
                batch.images.num_images_B
            )
            wanted_B.index_add_(0, sequence_I, batch.images.num_patches_I // num_merged)
        if not torch.equal(held_B, wanted_B):
            place = int((held_B != wanted_B).nonzero()[0])
            raise RolloutError(
                f"a prompt has {int(held_B[place])} image placeholder tokens; its images need "
                f"{int(wanted_B[place])}"
            )


class InferenceModel:
    """A model whose weights come by `load`; raises ConfigError if it is not supported."""

    def __init__(self, hf_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        if not (hf_dir / "config.json").is_file():
            raise ConfigError("model.path", f"got {hf_dir}; need a directory with config.json")
        sees = vision_model_type(hf_dir)
        if sees is not None and sees not in VISION_MODEL_TYPES:
            raise ConfigError(
                "model.path",
                f"{hf_dir} is a {sees}, which sees images; of those the rollout engine "
                f"transformers samples from {', '.join(VISION_MODEL_TYPES)} only; choose one, or a "
                "text model",
            )
        whole = AutoConfig.from_pretrained(hf_dir, trust_remote_code=False, local_files_only=True)
        config = whole.get_text_config()
        _check_supported(whole, hf_dir, sees is not None)
        self.device = device
        self.context_length: int = min(
            config.max_position_embeddings, rotary_limit(config.to_dict()) or sys.maxsize
        )
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.eos_token_ids = eos_token_ids(hf_dir, config)
        auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        with no_init_weights():
            model = auto.from_config(
                whole if sees else config,
                dtype=dtype,
                attn_implementation=ATTENTION if sees else ATTENTION_NAME,
                trust_remote_code=False,
            )
        _refuse(position_refusal(model), hf_dir)
        model.tie_weights()
        keep_float32(model)
        self._model: PreTrainedModel = model.to(device).eval().requires_grad_(False)
        self._vision = Vision(self._model, hf_dir) if sees else None
        self.sees = self._vision is not None
        """True if the model takes images."""
        self._parameters = dict(named_state(model))  # persistent buffers among them
        self._slots = hub_slots(model)
        self._tied = tied_names(model)
        self._shapes = {name: p.shape for name, p in self._parameters.items()}
        self._decoder = self._written_out()
        self._logprob_head: LogprobHead | None = None

    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        step: PrefillStep,
        images: Sequence[Sequence[bytes]] = (),
    ) -> tuple[Tensor, Tensor]:
        """Compute P packed sequences; return (P, V) next-token logits, (P,) int64 rotary offsets.

        The offset of a sequence is the rotary position of its next token minus the token's place.
        """
        ids = torch.tensor([t for each in sequences for t in each], device=self.device)[None]
        if self._vision is None:
            logits = self._logits(ids, step.position_T[None], step, step.last_P)
            return logits[0], torch.zeros_like(step.last_P)
        position_31T, ahead_P, inputs = self._vision.see(sequences, images or [()] * len(sequences))
        inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        logits = self._logits(ids, position_31T.to(self.device), step, step.last_P, **inputs)
        return logits[0], ahead_P.to(self.device)

    def decode(
        self, input_ids_B: Tensor, step: DecodeStep, ahead_B: Tensor | None = None
    ) -> Tensor:
        """Return (B, V) logits after one more token per row; models with images need `ahead_B`."""
        if self._decoder is not None:
            return self._decoder.logits(input_ids_B, step)
        position_B1 = step.position_B[:, None]
        if ahead_B is not None:
            # With three rows and no fourth the model uses them as rotary positions only.
            position_B1 = (position_B1 + ahead_B[:, None]).expand(3, -1, -1)
        return self._logits(input_ids_B[:, None], position_B1, step, 0)[:, -1]

    @property
    def can_be_recorded(self) -> bool:
        """True if `decode` launches the same kernels for equal sizes, and never waits for them."""
        return self._decoder is not None

    def extend(self, num_tokens: int) -> bool:
        """Prepare for sequences of so many tokens; True: tensors that `decode` reads have moved."""
        return self._decoder is not None and self._decoder.extend(num_tokens)

    @torch.inference_mode()
    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """Return the logprobs of each sequence's tokens but the first; one sequence per pass."""
        found: list[tuple[float, ...]] = []
        for sequence in sequences:
            step = PrefillStep.build(
                KVCache(0, self.context_length), 0, [len(sequence)], [0], self.device
            )
            ids_T = torch.tensor(sequence, device=self.device)
            logits_1TV = self._logits(ids_T[None], self._positions_of_text(step), step, 0)
            logprobs_TV = (logits_1TV[0, :-1].float() / temperature).log_softmax(-1)
            found.append(tuple(logprobs_TV.gather(1, ids_T[1:, None]).squeeze(1).tolist()))
        return found

    def logprob_rows(
        self, input_ids_T: Tensor, step: PrefillStep, rows_N: Tensor, targets: Targets
    ) -> Tensor:
        """Compute logprobs of given tokens from hidden states, without materializing all logits.

        `rows_N` are the (N,) int64 indices in T of the hidden states that predict `targets`.
        Returns (rows, N) float32, see `engines.training.model.linear_logprobs`.

        Raises:
            RolloutError: unsupported head or attention, or a token stands for an image.
        """
        if self._logprob_head is None:
            # Created on first use: it replaces the head's forward, which sampling may use too.
            self._logprob_head = LogprobHead(self._model, chunked=True)
        if self._logprob_head.why_whole is not None:
            raise RolloutError(
                f"the rollout engine transformers cannot return logprobs of a prompt of a "
                f"{type(self._model).__name__}: {self._logprob_head.why_whole}; choose another "
                "engine"
            )
        if self._vision is not None:
            self._vision.check_text(input_ids_T)
        found = self._logprob_head(
            rows_N,
            targets,
            input_ids=input_ids_T[None],
            position_ids=self._positions_of_text(step),
            use_cache=False,
            rollout_step=step,
        )
        self._check_attended(step)
        return found

    def load(
        self, tensors: Iterator[tuple[str, Tensor]], method: ChecksumMethod = "xxh3"
    ) -> WeightDigest:
        """Overwrite every parameter and persistent buffer; return the digest of what memory holds.

        Raises:
            WeightSyncError: a name is unknown, missing or repeated; a shape or dtype differs.
        """
        expected = ExpectedTensors(
            {
                name: (slot.size, self._parameters[slot.parameter].dtype)
                for name, slot in self._slots.items()
            },
            self._tied,
        )
        with torch.no_grad():
            for name, tensor in tensors:
                expected.check(name, tensor)
                slot = self._slots[name]
                slot.view(self._parameters[slot.parameter]).copy_(tensor)
        expected.check_complete()
        # Read from the module and not from our table: the module computes.
        held = dict(named_state(self._model))
        return digest_of(
            {name: slot.view(held[slot.parameter]) for name, slot in self._slots.items()},
            method,
        )

    @property
    def size_bytes(self) -> int:
        """Size of the parameters and persistent buffers in memory."""
        return sum(parameter.nbytes for parameter in self._parameters.values())

    def release(self) -> None:
        """Free the memory of the parameters."""
        self._decoder = None
        for parameter in self._parameters.values():
            parameter.data = parameter.new_empty(0)

    def allocate(self) -> None:
        """Undo `release`; the values are undefined until `load`."""
        for name, parameter in self._parameters.items():
            parameter.data = parameter.new_empty(self._shapes[name])
        self._decoder = self._written_out()

    def _written_out(self) -> Decoder | None:
        return Decoder(self._model, self.context_length) if is_covered(self._model) else None

    def _logits(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        step: PrefillStep | DecodeStep,
        logits_to_keep: Tensor | int,
        **inputs: Tensor,
    ) -> Tensor:
        logits = self._model(
            **inputs,
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=logits_to_keep,
            rollout_step=step,
        ).logits
        self._check_attended(step)
        if self._vision is not None:
            logits[..., self._vision.placeholders] = -torch.inf
        return logits

    def _positions_of_text(self, step: PrefillStep) -> Tensor:
        """Return (1, T) positions; with images (3, 1, T) along time, height and width."""
        position_1T = step.position_T[None]
        return position_1T if self._vision is None else position_1T.expand(3, -1, -1)

    def _check_attended(self, step: PrefillStep | DecodeStep) -> None:
        if len(step.attended) != self.num_layers:
            raise RolloutError(
                f"only {len(step.attended)} of {self.num_layers} layers of a "
                f"{type(self._model).__name__} use attention; the rollout engine transformers "
                "cannot keep the state of the others; choose another engine"
            )


def _check_supported(whole: PretrainedConfig, hf_dir: Path, sees: bool) -> None:
    config = whole.get_text_config()
    auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    if lacking := refusal(text_settings(config)):
        raise ConfigError(
            "rollout.engine",
            f"got transformers; the {config.model_type} model has {lacking}, which this engine "
            "does not compute; choose another engine",
        )
    _refuse(class_refusal(auto, whole if sees else config), hf_dir)
    if not sees and model_class(auto, whole) is not model_class(auto, config):
        _refuse(f"is a {whole.model_type}, which is more than its language model", hf_dir)


def _refuse(reason: str | None, hf_dir: Path) -> None:
    if reason is not None:
        raise ConfigError(
            "model.path",
            f"{hf_dir} {reason}; the rollout engine transformers cannot sample from it; choose "
            "another model or engine",
        )
