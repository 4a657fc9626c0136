"""What jobs share: the runtime, the setup of torch, and policies."""
