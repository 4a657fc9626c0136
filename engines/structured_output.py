"""Forms that a sample has to have: JSON, a pattern, one of some texts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StructuredOutput:
    """A form that a sample has to have; exactly one of the three.

    Attributes:
        json_schema: JSON Schema, as JSON text.
        regex: that the whole text matches.
        choice: texts, of which it is one.
    """

    json_schema: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given = [name for name in ("json_schema", "regex", "choice") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"structured output: got {' and '.join(given) or 'nothing'}; need one of "
                "json_schema, regex and choice"
            )
