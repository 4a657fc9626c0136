"""Convert the sampling section of a configuration to sampling parameters."""

import json

from engines.config.rollout import SamplingConfig, StructuredOutputConfig
from engines.types import SamplingParams, StructuredOutput


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """Return the sampling parameters of a configuration."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        structured_output=_structured(config.structured_output),
    )


def _structured(config: StructuredOutputConfig | None) -> StructuredOutput | None:
    if config is None:
        return None
    schema = config.json_schema
    return StructuredOutput(
        # Keys are not sorted: their order is the order of the fields in the answer.
        json_schema=None if schema is None else json.dumps(schema),
        regex=config.regex,
        choice=config.choice,
    )
