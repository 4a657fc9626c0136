"""The servers that `rlhf up` starts."""
