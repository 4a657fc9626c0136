"""What jobs share: the runtime, the setup of torch, causes of failures, and policies."""
