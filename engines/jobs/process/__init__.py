"""The process of a job: how torch is set up in it, and why it failed."""
