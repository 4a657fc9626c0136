"""What rollout engines share whose library samples in processes of its own."""
