"""The commands of `rlhf`: one module each, imported only when its command is given."""
