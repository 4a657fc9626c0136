"""Shared parts of the jobs: the runtime, the setup of torch, and policies."""
