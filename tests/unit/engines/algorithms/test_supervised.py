"""The supervised loss against torch's cross entropy."""

import pickle

import torch

from engines.algorithms.supervised import SupervisedLoss
from engines.types import GlobalCounts, ModelOutputs, TokenBatch


def test_is_the_mean_cross_entropy_of_the_trained_tokens():
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(6, 11, generator=generator)
    targets_T = torch.randint(0, 11, (6,), generator=generator)
    mask = [[0, 0, 1], [0, 1, 1]]
    batch = TokenBatch.from_sequences([[1, 1, 1], [1, 1, 1]], loss_mask=mask)
    logprobs_T = logits_TV.log_softmax(-1)[torch.arange(6), targets_T]
    loss_fn = pickle.loads(pickle.dumps(SupervisedLoss()))
    got = loss_fn(ModelOutputs(logprobs_T), batch, GlobalCounts(3, 2)).loss
    kept = torch.tensor(mask).flatten() > 0
    want = torch.nn.functional.cross_entropy(logits_TV[kept], targets_T[kept])
    torch.testing.assert_close(got, want)
