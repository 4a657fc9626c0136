"""Losses of distillation by hand, against the KL over the whole vocabulary, and where they end."""

import pickle

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from engines.algorithms.distillation import (
    SampledDistillation,
    Tail,
    TopKDistillation,
    forward_kl_topk,
)
from engines.training.model.linear_logprobs import linear_logprobs_of, linear_topk_logprobs
from engines.types import GlobalCounts, ModelOutputs, TokenBatch
from infra.errors import UnknownPluginError

T, V = 7, 13
TAILS: tuple[Tail, ...] = ("bucket", "renormalise", "ignore")
every_tail = pytest.mark.parametrize("tail", TAILS)


def draw_logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(T, V, generator=generator, dtype=torch.float64)


def of_the_likeliest(student_TV: Tensor, teacher_TV: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """(T, K) logprobs of student and teacher of the teacher's K most likely tokens."""
    teacher_TK, ids_TK = teacher_TV.log_softmax(dim=1).topk(num_top, dim=1)
    return student_TV.log_softmax(dim=1).gather(1, ids_TK), teacher_TK


def log(*probabilities: float) -> Tensor:
    """(1, K) of one token."""
    return torch.tensor([probabilities], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("tail", "loss", "slopes"),
    [
        # p = (1/2, 1/4), q = (1/4, 1/4), so the rests are 1/4 and 1/2.
        # log(2)/2 + log(1/2)/4; slopes -p + q (1/4) / (1/2).
        ("bucket", 0.1732868, [-0.375, -0.125]),
        # 2/3 log(4/3) + 1/3 log(2/3); slopes 1/2 - 2/3, 1/2 - 1/3.
        ("renormalise", 0.0566330, [-1 / 6, 1 / 6]),
        # log(2)/2; slopes -p.
        ("ignore", 0.3465736, [-0.5, -0.25]),
    ],
)
def test_by_hand(tail: Tail, loss: float, slopes: list[float]) -> None:
    student = log(0.25, 0.25).requires_grad_()
    found = forward_kl_topk(student, log(0.5, 0.25), tail=tail)
    assert found.tolist() == pytest.approx([loss], abs=1e-7)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert gradient.tolist() == [pytest.approx(slopes)]


@every_tail
def test_over_the_whole_vocabulary_it_is_the_kl(tail: Tail) -> None:
    student, teacher = draw_logits(0).requires_grad_(), draw_logits(1)
    found = forward_kl_topk(*of_the_likeliest(student, teacher, V), tail=tail)
    wanted = kl_divergence(Categorical(logits=teacher), Categorical(logits=student))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    weights = torch.arange(1.0, T + 1)
    (gradient,) = torch.autograd.grad((found * weights).sum(), student)
    (expected,) = torch.autograd.grad((wanted * weights).sum(), student)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@every_tail
def test_gradients_are_those_of_finite_differences(tail: Tail) -> None:
    teacher = draw_logits(1)

    def loss(student: Tensor) -> Tensor:
        return forward_kl_topk(*of_the_likeliest(student, teacher, 4), tail=tail)

    assert torch.autograd.gradcheck(loss, draw_logits(0).requires_grad_())


def test_topk_kl_with_tail_mass_grows_toward_full_kl() -> None:
    for seed in range(20):
        student, teacher = draw_logits(seed), draw_logits(seed + 100)
        whole = kl_divergence(Categorical(logits=teacher), Categorical(logits=student))
        previous = torch.zeros(T, dtype=torch.float64)
        for num_top in range(1, V):
            both = of_the_likeliest(student, teacher, num_top)
            found = forward_kl_topk(*both, tail_mass_eps=1e-15)
            assert (found >= previous - 1e-12).all()
            assert (found <= whole + 1e-12).all()
            previous = found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_elements", [1 << 20, 3 * V, 5])
def test_a_student_that_is_its_teacher_learns_nothing(
    dtype: torch.dtype, chunk_elements: int
) -> None:
    """Exactly 0: not a loss of 1e-9, whose gradient an optimizer would blow up."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 4, generator=generator).to(dtype).requires_grad_() for n in (T, V)
    )
    for num_top in (4, V):
        top = linear_topk_logprobs(
            hidden, weight, num_top, temperature=0.8, chunk_elements=chunk_elements
        )
        student = linear_logprobs_of(
            hidden, weight, top.ids_NK, temperature=0.8, chunk_elements=chunk_elements
        )
        loss = forward_kl_topk(student, top.logprobs_NK)
        assert loss.tolist() == [0.0] * T
        for gradient in torch.autograd.grad(loss.sum(), (hidden, weight)):
            assert not gradient.any()


def test_of_the_whole_vocabulary_the_other_tails_say_so_too() -> None:
    for tail in ("renormalise", "ignore"):
        student = draw_logits(1).requires_grad_()
        loss = forward_kl_topk(*of_the_likeliest(student, draw_logits(1), V), tail=tail)
        assert loss.tolist() == [0.0] * T
        (gradient,) = torch.autograd.grad(loss.sum(), student)
        assert gradient.abs().max() < 1e-15


def test_to_ignore_the_rest_teaches_a_sharper_distribution() -> None:
    teacher = log(0.5, 0.25)
    logits = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log().requires_grad_()
    slopes = {}
    for tail in TAILS:
        loss = forward_kl_topk(logits.log_softmax(dim=1)[:, :2], teacher, tail=tail)
        (slopes[tail],) = torch.autograd.grad(loss.sum(), logits)
    # q P - p: the rest is pushed down although it is what the teacher has.
    assert slopes["ignore"].tolist() == [pytest.approx([-0.125, -0.0625, 0.1875])]
    for tail in ("bucket", "renormalise"):
        assert slopes[tail].abs().max() < 1e-15
    sharper = forward_kl_topk(log(2 / 3, 1 / 3), teacher, tail="ignore")
    assert sharper.tolist() == pytest.approx([0.75 * -0.2876821])


def test_renormalised_it_does_not_see_where_the_rest_is() -> None:
    moved = forward_kl_topk(log(0.025, 0.025), log(0.5, 0.25), tail="renormalise")
    assert moved.tolist() == pytest.approx([0.0566330], abs=1e-7)
    assert forward_kl_topk(log(0.025, 0.025), log(0.5, 0.25)).item() > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_pull_fades_where_the_student_has_hardly_a_rest(dtype: torch.dtype) -> None:
    """The teacher's rest is 0.3; the student's is 1e-6, which counts as 1e-5."""
    logits = torch.tensor([[14.508658, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    loss = forward_kl_topk(logits.log_softmax(dim=1)[:, :1], log(0.7).to(dtype))
    # 0.7 log(0.7) + 0.3 log(0.3 / 1e-5).
    assert loss.item() == pytest.approx(0.7 * -0.3566749 + 0.3 * 10.3089527, rel=1e-5)
    (slope,) = torch.autograd.grad(loss.sum(), logits)
    # Of the whole KL it would be 1 - 0.7; a tenth of it is left, a clamp would leave nothing.
    assert slope[0, 0].item() == pytest.approx(0.03, abs=0.005)


@every_tail
def test_a_probability_of_zero_adds_nothing(tail: Tail) -> None:
    student = log(0.25, 0.25, 0.2).requires_grad_()
    teacher = log(0.5, 0.5, 0.0)
    found = forward_kl_topk(student, teacher, tail=tail, tail_mass_eps=1e-12)
    wanted = {"bucket": 0.6931472, "renormalise": 0.6931472 - 0.3566749, "ignore": 0.6931472}
    assert found.tolist() == pytest.approx([wanted[tail]], abs=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    assert torch.isfinite(gradient).all()


def batch_of(teacher_TK: Tensor, mask: list[list[float]]) -> TokenBatch:
    batch = TokenBatch.from_sequences([[5] * len(row) for row in mask], loss_mask=mask)
    return batch.with_columns(teacher_topk_logprobs=teacher_TK)


def of(logprobs_TK: Tensor) -> ModelOutputs:
    """What the student says of its teacher's tokens."""
    return ModelOutputs(logprobs_TK.new_zeros(logprobs_TK.shape[0]), topk_logprobs_TK=logprobs_TK)


def test_the_loss_of_a_step_by_hand() -> None:
    """Losses 0.1733, 0.1733, 0 on trained tokens; the first of each sequence has no prediction."""
    none, apart, equal = log(1.0, 1.0), log(0.25, 0.25), log(0.5, 0.25)
    student = torch.cat([none, apart, apart, none, equal]).requires_grad_()
    teacher = torch.cat([none, equal, equal, none, equal])
    batch = batch_of(teacher, [[0.0, 1.0, 1.0], [0.0, 1.0]])
    objective = pickle.loads(pickle.dumps(TopKDistillation()))
    found = objective(of(student), batch, GlobalCounts(4, 2))
    assert found.loss.item() == pytest.approx(2 * 0.1732868 / 4, abs=1e-7)
    assert {name: value.item() for name, value in found.metrics.items()} == {
        "distillation/loss": pytest.approx(2 * 0.1732868 / 4, abs=1e-7),
        "distillation/teacher_mass": pytest.approx(3 * 0.75 / 4),
        "distillation/student_mass": pytest.approx((0.5 + 0.5 + 0.75) / 4),
    }
    (gradient,) = torch.autograd.grad(found.loss, student)
    want = [[0.0, 0.0], [-0.375, -0.125], [-0.375, -0.125], [0.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(gradient, torch.tensor(want, dtype=torch.float64) / 4)
    cut = TopKDistillation(loss_max_clamp=0.1)(of(student), batch, GlobalCounts(4, 2))
    assert cut.loss.item() == pytest.approx(2 * 0.1 / 4)
    assert not torch.autograd.grad(cut.loss, student)[0].any()
    by_sequence = TopKDistillation(loss_agg_mode="seq-mean-token-mean")
    found = by_sequence(of(student), batch, GlobalCounts(3, 2))
    assert found.loss.item() == pytest.approx((0.1732868 + 0.0) / 2, abs=1e-7)


@every_tail
def test_shares_add_up_however_a_step_is_cut(tail: Tail) -> None:
    student, teacher = of_the_likeliest(draw_logits(0), draw_logits(1), 3)
    batch = batch_of(teacher, [[0.0, 1.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    objective, counts = TopKDistillation(tail=tail), GlobalCounts(4, 3)
    whole = objective(of(student), batch, counts)
    parts = [
        objective(of(student[batch.token_index_T(part)]), batch.select(part), counts)
        for part in ([2, 0], [1])
    ]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    for name, value in whole.metrics.items():
        torch.testing.assert_close(parts[0].metrics[name] + parts[1].metrics[name], value)


def test_other_shapes_than_the_teachers_are_refused() -> None:
    batch = batch_of(torch.zeros(2, 3), [[0.0, 1.0]])
    with pytest.raises(ValueError, match=r"got \(2, 1\); need \(2, 3\)"):
        TopKDistillation()(of(torch.zeros(2, 1)), batch, GlobalCounts(1, 1))
    with pytest.raises(ValueError, match="ask for them"):
        TopKDistillation()(ModelOutputs(torch.zeros(2)), batch, GlobalCounts(1, 1))


@pytest.mark.parametrize(
    ("name", "losses"),
    [
        # d = log q - log p = -1/2 and 1.
        ("k1", [-0.5, 1.0]),
        ("k1+", [-0.5, 1.0]),
        ("k2", [0.125, 0.5]),
        ("k3", [0.1487213, 0.3678794]),
        ("k3+", [0.1487213, 0.3678794]),
    ],
)
def test_of_sampled_tokens_by_hand(name: str, losses: list[float]) -> None:
    batch = TokenBatch.from_sequences(
        [[5, 5, 5]], loss_mask=[[0.0, 1.0, 1.0]], teacher_logprobs=[[0.0, -1.0, -2.0]]
    )
    outputs = ModelOutputs(torch.tensor([0.0, -1.5, -1.0]))
    objective = pickle.loads(pickle.dumps(SampledDistillation(name)))
    found = objective(outputs, batch, GlobalCounts(2, 1))
    assert found.loss.item() == pytest.approx(sum(losses) / 2, abs=1e-6)
    assert found.metrics["distillation/loss"].item() == found.loss.item()
    cut = SampledDistillation(name, loss_max_clamp=0.2)(outputs, batch, GlobalCounts(2, 1))
    clamped = [min(max(loss, -0.2), 0.2) for loss in losses]
    assert cut.loss.item() == pytest.approx(sum(clamped) / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "direction"),
    [("k1+", "student"), ("k2", "student"), ("k3+", "student"), ("k3", "teacher"), ("k1", None)],
)
def test_which_kl_the_sampled_tokens_teach_on_average(name: str, direction: str | None) -> None:
    """The expectation over the student's samples is taken exactly: every token, by its weight."""
    logits = torch.tensor([1.0, 0.2, -0.3, 0.7], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.1, 0.9, -0.8, 0.4], dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    total = torch.zeros((), dtype=torch.float64)
    for token, weight in enumerate(student.detach().exp()):
        batch = TokenBatch.from_sequences([[token]], loss_mask=[[1.0]])
        batch = batch.with_columns(teacher_logprobs=teacher[token, None])
        outputs = ModelOutputs(student[token, None])
        loss = SampledDistillation(name)(outputs, batch, GlobalCounts(1, 1)).loss
        total = total + weight * loss
    (got,) = torch.autograd.grad(total, logits, retain_graph=True)
    ends = Categorical(logits=logits), Categorical(logits=teacher)
    if direction is None:
        want = torch.zeros(4, dtype=torch.float64)
    else:
        kl = kl_divergence(*(ends if direction == "student" else ends[::-1]))
        (want,) = torch.autograd.grad(kl, logits)
    torch.testing.assert_close(got, want)


def test_an_unknown_estimator_is_refused() -> None:
    batch = TokenBatch.from_sequences([[5]], loss_mask=[[1.0]], teacher_logprobs=[[0.0]])
    with pytest.raises(UnknownPluginError, match="no 'k4'"):
        SampledDistillation("k4")(ModelOutputs(torch.zeros(1)), batch, GlobalCounts(1, 1))
