import sys

sys.path.insert(0, ".")
import importlib

import engines.config.base as B
from engines.config.base import *

importlib.import_module("engines.config.recipe")


def subs(c):
    for s in c.__subclasses__():
        yield s
        yield from subs(s)


if hasattr(B, "PathConfig"):
    for c in set(subs(B.PathConfig)):
        print(c.__name__, c.__module__, [m for m in c.model_fields["path"].metadata])
# identity defaults compare
import json

from engines.config.recipe import Recipe

r = Recipe.model_validate(
    {
        "name": "x",
        "model": {"path": "/tmp"},
        "data": {
            "sft": [{"path": "/tmp", "format": "sft"}] if 0 else [{"path": "/tmp"}],
            "rl": [{"path": "/tmp"}],
            "evaluation": [{"path": "/tmp"}],
        },
    }
)
print(r.run_name)
print(
    json.dumps(r.identity_values(), sort_keys=True, default=str)[:200],
    hash(json.dumps(r.identity_values(), sort_keys=True, default=str)) if 0 else "",
)
import hashlib

print(
    hashlib.sha256(
        json.dumps(r.identity_values(), sort_keys=True, default=str).encode()
    ).hexdigest()
)
print(
    hashlib.sha256(
        json.dumps(Recipe.model_json_schema(), sort_keys=True, default=str).encode()
    ).hexdigest(),
    list(Recipe.model_fields) == 0,
)
print(
    hashlib.sha256(
        json.dumps(
            [
                (
                    k,
                    str(v.default),
                    str(v.annotation).split(".")[-1],
                    [str(type(m).__name__) for m in v.metadata],
                )
                for k, v in Recipe.model_fields.items()
            ]
        ).encode()
    ).hexdigest()
)
