"""`python -m infra.ray.head start --head ...`: `ray start` without the parts we never use.

Promises: the arguments and the behaviour of `ray start`; the head serves jobs and node state.
Leaves out, for a start that is several seconds faster and 200 MB lighter: the other dashboard
pages (metrics, serve, data, train, state, reporter) and the Ray client server, a second way in
that we do not need.
Does not promise to leave them out: where Ray's internals differ from those of 2.60 it starts
the full head.
"""

import sys
from typing import Any

DASHBOARD_MODULES = ("JobHead", "NodeHead")
"""Jobs, and the node records that the job server looks its agent up in."""


def main() -> int:
    """Run Ray's command line, narrowed."""
    from ray._private import node, services
    from ray.scripts import scripts

    start_process = getattr(services, "start_ray_process", None)
    if start_process is not None:

        def start_narrowed(command: list[str], *args: Any, **kwargs: Any) -> Any:
            if any(str(part).endswith("dashboard/dashboard.py") for part in command):
                command = [*command, f"--modules-to-load={','.join(DASHBOARD_MODULES)}"]
            return start_process(command, *args, **kwargs)

        services.start_ray_process = start_narrowed
    if hasattr(node.Node, "start_ray_client_server"):
        node.Node.start_ray_client_server = lambda self: None
    return int(scripts.main() or 0)


if __name__ == "__main__":
    sys.exit(main())
