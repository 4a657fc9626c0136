"""The vision cases are a module of their own: the ranks of a launched program use them too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
