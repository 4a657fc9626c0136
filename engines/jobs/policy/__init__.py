"""Where the files of a policy and of a critic come from, and where they go."""
