"""How the tensors of a batch reach the ranks of a group."""
