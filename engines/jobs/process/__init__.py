"""The process of a job: setup of torch, runtime, and causes of failures."""
