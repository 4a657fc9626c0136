"""Main functions of the stages: `python -m engines.jobs.<stage> STORE FINGERPRINT ATTEMPT`."""
