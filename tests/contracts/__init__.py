"""The contract tests, installed as `rlhf.testing`: run them on your own plugin by its name.

pytest --pyargs rlhf.testing.test_backend --backend mine --claims tensor,pipeline
pytest --pyargs rlhf.testing.test_platform --platform mine
"""
