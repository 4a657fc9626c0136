"""Ray as a place where jobs run: clusters, the job server, jobs as attempts."""
