"""The store: artifacts, the logs of stages, and the working files of attempts."""
