"""`rlhf status`: the services that `rlhf up` started."""
