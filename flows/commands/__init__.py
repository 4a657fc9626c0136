"""The commands of `rlhf`; a module is imported only when one of its commands runs."""
