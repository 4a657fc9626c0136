"""`rlhf recipes`: list the recipes that ship with this project."""

import argparse
import sys

from flows.recipe.source import RECIPES_DIR, shipped_names


def main(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Print each recipe's name and its leading comment."""
    for name in shipped_names(RECIPES_DIR):
        sys.stdout.write(f"{name}\n")
        for line in _summary(name):
            sys.stdout.write(f"    {line}\n")
    return 0


def _summary(name: str) -> list[str]:
    lines = []
    for line in (RECIPES_DIR / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("# ")
        if text and not text.startswith("rlhf run"):
            lines.append(text)
    return lines
