"""The flow can be handed to a process, which `flow.serve` does for each run."""

import cloudpickle

from flows.rlhf_pipeline import rlhf_pipeline


def test_the_flow_can_be_pickled() -> None:
    assert cloudpickle.loads(cloudpickle.dumps(rlhf_pipeline)).name == rlhf_pipeline.name
