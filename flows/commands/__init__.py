"""The commands of `rlhf`, one module each; a module is imported only when its command runs."""
