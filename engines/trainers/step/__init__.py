"""The parts of one RL step."""
