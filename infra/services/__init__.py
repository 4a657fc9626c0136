"""What `rlhf up` starts."""
