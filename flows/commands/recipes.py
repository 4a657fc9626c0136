"""`rlhf recipes`: list the recipes that ship with this project."""

import argparse
import sys
from itertools import takewhile

from flows.recipe.source import RECIPES_DIR, shipped_names


def main(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command takes them)
    """Print each recipe's name and its leading comment."""
    for name in shipped_names(RECIPES_DIR):
        sys.stdout.write(f"{name}\n")
        lines = (RECIPES_DIR / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        for line in takewhile(lambda line: line.startswith("#"), lines):
            text = line.lstrip("# ")
            if text and not text.startswith("rlhf run"):
                sys.stdout.write(f"    {text}\n")
    return 0
