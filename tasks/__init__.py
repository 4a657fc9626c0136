"""One stage each: what it needs, the job it submits, what it yields."""
