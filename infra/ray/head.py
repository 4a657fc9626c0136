"""`python -m infra.ray.head HOME jobs|full start --head ...`: `ray start` with automatic shutdown.

A head that is not persistent ends after its last user and its last job (`infra.host.guard`). `jobs`
starts several seconds faster and uses 200 MB less: it omits the Ray client server and all dashboard
pages except jobs and nodes. Where Ray's internals differ from 2.60 it starts the full head.
"""

import sys
from pathlib import Path
from typing import Any

from infra.errors import JobSubmitError
from infra.host.guard import start_guard
from infra.host.servers import ServerRecord
from infra.ray.cluster import NAME, open_api, unfinished_jobs

DASHBOARD_MODULES = ("JobHead", "NodeHead")
"""The job server, and the node records in which it looks up its agent."""


def main() -> int:
    """Run Ray's command line under the guard; for `jobs`, with reduced services."""
    home, pages = sys.argv[1:3]
    del sys.argv[1:3]
    start_guard(Path(home), NAME, has_jobs)
    from ray.scripts import scripts

    if pages == "jobs":
        _narrow()
    return int(scripts.main() or 0)


def has_jobs(record: ServerRecord) -> bool:
    """True if jobs run on a head, or if it does not answer."""
    try:
        return bool(unfinished_jobs(open_api(record)))
    except JobSubmitError:
        return True


def _narrow() -> None:
    from ray._private import node, services

    start_process = getattr(services, "start_ray_process", None)
    if start_process is not None:

        def start_narrowed(command: list[str], *args: Any, **kwargs: Any) -> Any:
            if any(str(part).endswith("dashboard/dashboard.py") for part in command):
                command = [*command, f"--modules-to-load={','.join(DASHBOARD_MODULES)}"]
            return start_process(command, *args, **kwargs)

        services.start_ray_process = start_narrowed
    if hasattr(node.Node, "start_ray_client_server"):
        node.Node.start_ray_client_server = lambda self: None


if __name__ == "__main__":
    sys.exit(main())
