"""Ray as the place where jobs run: clusters, the job server, jobs."""
