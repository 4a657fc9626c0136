"""The splits of a data set on disk, and checks of what training and held-out rows share.

Promises: memory grows with the held-out rows and with 16 bytes per training row; errors and
reports count rows of a split from 0.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from engines.config.data import DataConfig
from engines.data.prepare.arithmetic import generate
from engines.data.prepare.decontamination import LeakReport, find_leaks
from engines.data.prepare.sources import ROW_KINDS, SourceReport, load_rows
from engines.data.prepare.stored_rows import StoredRows, prompt_digest, stored
from engines.data.read.rows import Message, PreferenceRow, RLRow, SFTRow
from infra.errors import ConfigError

_HELD_OUT = ("evaluation", "preference_evaluation")
Suites = Mapping[str, Sequence[RLRow]]
"""Held-out rows of a recipe's suites, by the section that configures their data."""
NO_SUITES: Suites = MappingProxyType({})


@dataclass(frozen=True)
class Splits:
    """The rows of the splits, and by split the reports of its sources; none for generated data."""

    sft: StoredRows[SFTRow]
    rl: StoredRows[RLRow]
    evaluation: StoredRows[RLRow]
    preference: StoredRows[PreferenceRow]
    preference_evaluation: StoredRows[PreferenceRow]
    reports: Mapping[str, tuple[SourceReport, ...]]

    def texts(self) -> Iterator[str]:
        """Yield all texts that a model made from scratch will read or write."""
        for row in self.sft:
            yield from _texts(row.messages)
            # The template of such a model has special tokens for all other roles.
            yield from (f"<|{each.role}|>" for each in row.messages if each.role == "tool")
        for rows in (self.rl, self.evaluation):
            for row in rows:
                yield from _texts(row.prompt)
                if isinstance(row.reward_model.ground_truth, str):
                    yield row.reward_model.ground_truth
        for rows in (self.preference, self.preference_evaluation):
            for row in rows:
                yield from _texts((*row.prompt, *row.answers))


def read_splits(data: DataConfig, seed: int, scratch: Path) -> Splits:
    """Generate or read the rows into `scratch`, which must outlive them; missing splits are empty.

    Raises:
        ConfigError: the data cannot be used; names the place and the remedy.
    """
    rows: dict[str, Any] = {}
    if data.arithmetic:
        made = generate(data.arithmetic, seed)
        for name, kind in ROW_KINDS.items():
            rows[name] = stored(scratch / f"{name}.arrow", kind.format, made[name])
        return Splits(**rows, reports=dict.fromkeys(ROW_KINDS, ()))
    reports = {}
    for name, kind in ROW_KINDS.items():
        loaded = load_rows(getattr(data, name), name, data, seed, scratch, kind)
        rows[name], reports[name] = loaded.rows, loaded.reports
    return Splits(**rows, reports=reports)


def decontaminated(
    splits: Splits, data: DataConfig, suites: Suites = NO_SUITES
) -> tuple[Splits, LeakReport | None]:
    """Remove training rows that share words with held-out rows or `suites`, as `find_leaks` does.

    The report is None if `data.decontamination` is null.
    """
    if data.decontamination is None:
        return splits, None
    training: dict[str, StoredRows[Any]] = {
        name: getattr(splits, name) for name in ROW_KINDS if name not in _HELD_OUT
    }
    held_out = {name: getattr(splits, name) for name in _HELD_OUT} | {**suites}
    leaks = find_leaks(training, held_out, data.decontamination)
    kept = {
        name: rows.only(np.delete(np.arange(len(rows)), leaks.rows_of(name)))
        for name, rows in training.items()
    }
    return replace(splits, **kept), leaks


def check_overlap(splits: Splits, allow_overlap: bool, suites: Suites = NO_SUITES) -> int:
    """Count the held-out rows, `suites` included, whose prompt occurs in a training split.

    Raises:
        ConfigError: there are some and `allow_overlap` is false; names the first.
    """
    held_out = {
        f"data.{name}": list(getattr(splits, name).prompt_digests()) for name in _HELD_OUT
    } | {name: [prompt_digest(row.prompt) for row in rows] for name, rows in suites.items()}
    wanted = {digest for digests in held_out.values() for digest in digests}
    trained: dict[bytes, str] = {}
    for split in ("rl", "sft", "preference"):
        for row, digest in enumerate(getattr(splits, split).prompt_digests()):
            if digest in wanted:
                trained.setdefault(digest, f"{split} row {row}")
    num_found = 0
    for split, digests in held_out.items():
        found = [row for row, digest in enumerate(digests) if digest in trained]
        if found and not allow_overlap:
            prompts = "prompt occurs" if len(found) == 1 else "prompts occur"
            raise ConfigError(
                split,
                f"{len(found)} eval {prompts} in train (first: row {found[0]} = "
                f"{trained[digests[found[0]]]}); remove them, or set data.allow_overlap",
            )
        num_found += len(found)
    return num_found


def _texts(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        yield message.said
        yield from message.tools
