"""xLAM function calling: columns `query`, `tools`, `answers`, `id`; one question and its calls.

`tools` is JSON text of functions whose `parameters` are the properties of a JSON schema, or the
whole schema as in OpenAI's API. `answers` is JSON text of calls `{name, arguments}`. Sources: the
cards of Salesforce/xlam-function-calling-60k (columns) and Salesforce/xLAM-7b-fc-r, whose
`convert_to_xlam_tool` keeps only the `properties` of OpenAI's `parameters`.
"""

from engines.config.base import StrictModel
from engines.data.prepare.preprocessors.base import Preprocessor, RawColumns
from engines.data.read.raw_rows import (
    json_text,
    parse_json,
    parse_json_list,
    parse_json_object,
    parse_tool_calls,
    parse_tools,
)
from engines.data.read.rows import (
    Message,
    RewardModel,
    RLRow,
    SFTRow,
    ToolCall,
    check_json,
    check_text,
    said_beside,
    with_tools,
)


class XLAMOptions(StrictModel):
    """Options: the `data_source` of its rows."""

    data_source: str = "Salesforce/xlam-function-calling-60k"


class XLAM(Preprocessor[XLAMOptions]):
    """Reads a question, the available functions, and the calls that answer it."""

    rl_columns = ("query", "tools", "answers")
    sft_columns = ("query", "tools", "answers")

    def rl_row(self, columns: RawColumns) -> RLRow:
        """Use the list of `{name, arguments}` as ground truth."""
        calls = [
            {"name": call.name, "arguments": parse_json(call.arguments, "answers", "")}
            for call in _calls(columns)
        ]
        return RLRow(
            self.options.data_source, _prompt(columns), "tool_use", RewardModel("rule", calls)
        )

    def sft_row(self, columns: RawColumns) -> SFTRow:
        """Use the calls as the assistant's message, without text."""
        messages = (*_prompt(columns), said_beside(None, _calls(columns)))
        return SFTRow(messages, self.options.data_source)


def _calls(columns: RawColumns) -> tuple[ToolCall, ...]:
    return parse_tool_calls(parse_json_list(columns.get("answers"), "answers"), "answers")


def _prompt(columns: RawColumns) -> tuple[Message, ...]:
    question = Message("user", check_text(columns.get("query"), "query"))
    tools = []
    for place, item in enumerate(parse_json_list(columns.get("tools"), "tools")):
        function = parse_json_object(item, f"tools[{place}]")
        schema = parse_json_object(function.get("parameters"), f"tools[{place}].parameters")
        if schema.get("type") != "object":  # a property named `type` is an object, not a text
            schema = {"type": "object", "properties": schema}
        function["parameters"] = schema
        check_json(function, f"tools[{place}]")
        tools.append(json_text(function))
    return with_tools((question,), parse_tools(tools, "tools"))
