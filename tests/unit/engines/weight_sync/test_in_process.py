"""Syncs that succeed serve exactly what was sent; every other one leaves an engine that refuses."""

import asyncio
import hashlib
import threading
import time

import pytest
import torch
import xxhash
from rlhf.testing.rollout_calls import generate_all, send_weights, send_weights_async
from transformers import AutoModelForCausalLM, LlamaConfig

from engines.checksum import combine, tensor_checksum
from engines.config.rollout import RolloutConfig
from engines.errors import RolloutError, WeightSyncError
from engines.rollout.transformers.engine import TransformersEngine
from engines.types import RolloutRequest, SamplingParams
from engines.weight_sync.base import ReceiverGoneError
from engines.weight_sync.in_process import InProcessTransport
from hardware.cpu import CPUPlatform
from infra.errors import DeadlineError

REQUEST = RolloutRequest("r", (5, 6, 7), SamplingParams(4), (1, 2))


def config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )


def model_of(seed: int, tied: bool = True) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(tied)).eval()


@pytest.fixture
def make_engine(tmp_path):
    def make(dtype: str = "float32", tied: bool = True) -> TransformersEngine:
        config(tied).save_pretrained(tmp_path)
        return TransformersEngine(tmp_path, RolloutConfig(), dtype, CPUPlatform())

    return make


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def send(engine, tensors, version: int, dtype: str = "float32"):
    items = tensors.items() if isinstance(tensors, dict) else tensors
    return send_weights(engine, items, version, dtype)


def assert_refuses(engine) -> None:
    assert engine.version == -1
    with pytest.raises(RolloutError, match="no confirmed weights"):
        generate_all(engine, [REQUEST])


@pytest.mark.parametrize("tied", [True, False])
def test_a_sync_reports_what_was_sent_and_is_served(make_engine, tied):
    engine, sent = make_engine(tied=tied), weights(model_of(1, tied))
    report = send(engine, sent, version=3)
    assert engine.version == 3
    assert report.num_tensors == len(sent) == 2 + 2 * 9 + (not tied)
    assert report.num_bytes == 4 * sum(tensor.numel() for tensor in sent.values())
    assert report.digest == combine((n, tensor_checksum(t)) for n, t in sent.items())
    (completion, _) = generate_all(engine, [REQUEST])
    assert completion.policy_versions.tolist() == [3] * len(completion.token_ids)


def test_the_digest_is_that_of_the_bytes(make_engine):
    """Recomputed here without the module under test."""
    sent = weights(model_of(1))
    lines = []
    for name in sorted(sent):
        array = sent[name].numpy()
        head = f"torch.float32{tuple(array.shape)}".encode()
        checksum = xxhash.xxh3_128_hexdigest(head + array.tobytes())
        lines.append(f"{name}\0{checksum}\n")
    expected = hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()
    assert send(make_engine(), sent, 0).digest == expected


def test_the_engine_owns_its_copy(make_engine):
    engine, model = make_engine(), model_of(1)
    send(engine, model.named_parameters(), 0)
    expected = generate_all(engine, [REQUEST])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert generate_all(engine, [REQUEST]) == expected


def test_the_sender_casts_to_the_rollout_dtype(make_engine):
    engine, sent = make_engine("bfloat16"), weights(model_of(1))
    report = send(engine, sent, 0, "bfloat16")
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in sent.items()}
    assert report.digest == combine((n, tensor_checksum(t)) for n, t in cast.items())
    assert report.num_bytes == 2 * sum(tensor.numel() for tensor in sent.values())


def test_the_order_of_arrival_does_not_matter(make_engine):
    engine, sent = make_engine(), weights(model_of(1))
    forward = send(engine, sent, 0)
    backward = send(engine, dict(reversed(sent.items())), 1)
    assert forward == backward


class OneUlpOff:
    """Damages one element of one tensor on the way."""

    checksum_method = "xxh3"

    def __init__(self, source) -> None:
        self._source = source

    def tensors(self):
        return one_ulp_off(self._source.tensors())


def one_ulp_off(tensors):
    for name, tensor in tensors:
        if name == "model.layers.1.mlp.up_proj.weight":
            tensor = tensor.clone()
            tensor[3, 5] = torch.nextafter(tensor[3, 5], torch.tensor(9.0))
        yield name, tensor


def test_one_ulp_lost_on_the_way_is_caught(make_engine, monkeypatch):
    engine, sent = make_engine(), weights(model_of(1))
    send(engine, sent, 0)
    receive = engine.update_weights
    with monkeypatch.context() as patch:
        patch.setattr(engine, "update_weights", lambda stream, v: receive(OneUlpOff(stream), v))
        with pytest.raises(WeightSyncError, match="sent digest"):
            send(engine, sent, 1)
    assert_refuses(engine)
    send(engine, sent, 2)
    assert engine.version == 2


def test_a_parameter_that_keeps_its_old_value_is_caught(make_engine):
    """The copy lands in a buffer that the model does not compute with."""
    engine = make_engine()
    send(engine, weights(model_of(1)), 0)
    table = engine._model._parameters
    name = "model.layers.0.self_attn.q_proj.weight"
    table[name] = torch.nn.Parameter(table[name].clone(), requires_grad=False)
    with pytest.raises(WeightSyncError, match="sent digest"):
        send(engine, weights(model_of(2)), 1)
    assert_refuses(engine)


def without(tensors, name):
    return [(n, t) for n, t in tensors.items() if n != name]


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda t: without(t, "model.norm.weight"), "1 parameters were not sent, first model.norm"),
        (lambda t: [*t.items(), ("model.extra", torch.zeros(2))], "no parameter model.extra"),
        (lambda t: [*t.items(), *list(t.items())[:1]], "sent it twice"),
        (
            lambda t: [*without(t, "model.norm.weight"), ("model.norm.weight", torch.zeros(17))],
            r"model.norm.weight: sent shape \(17,\), the rollout model has \(16,\)",
        ),
        (
            lambda t: [
                *without(t, "model.norm.weight"),
                ("model.norm.weight", torch.zeros(16).int()),
            ],
            "model.norm.weight: sent torch.int32",
        ),
        (
            lambda t: [*t.items(), ("lm_head.weight", t["model.embed_tokens.weight"])],
            "lm_head.weight is tied",
        ),
        (lambda t: [], "parameters were not sent"),
    ],
    ids=["missing", "extra", "twice", "shape", "dtype", "tied", "nothing"],
)
def test_a_wrong_set_of_tensors_is_refused(make_engine, spoil, what):
    engine, sent = make_engine(), weights(model_of(1))
    send(engine, sent, 0)
    with pytest.raises(WeightSyncError, match=what):
        send(engine, spoil(sent), 1)
    assert_refuses(engine)


def test_an_error_of_the_training_engine_passes_through(make_engine):
    engine, sent = make_engine(), weights(model_of(1))
    send(engine, sent, 0)

    def broken():
        yield next(iter(sent.items()))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        send(engine, broken(), 1)
    assert_refuses(engine)


def test_a_dtype_that_the_engine_does_not_have_is_refused(make_engine):
    engine = make_engine("bfloat16")
    with pytest.raises(WeightSyncError, match="rollout dtype is torch.bfloat16"):
        send(engine, weights(model_of(1)), 0, "float32")
    assert_refuses(engine)


def test_sender_gathers_at_most_one_tensor_ahead_of_the_copy():
    given, taken = [], []

    def stream():
        for name, tensor in weights(model_of(1)).items():
            assert len(given) <= len(taken) + 1
            given.append(name)
            yield name, tensor

    transport = InProcessTransport("float32", 10.0)
    sender = threading.Thread(target=transport.send, args=(stream(),))
    sender.start()
    for name, _ in transport.tensors():
        taken.append(name)
        time.sleep(0.005)
    sender.join()
    assert taken == given
    assert len(taken) == 20


def test_whichever_side_fails_the_other_ends():
    def broken():
        yield "a", torch.zeros(2)
        raise RuntimeError("no more")

    transport = InProcessTransport("float32", 10.0)
    failures = []

    def send():
        try:
            transport.send(broken())
        except RuntimeError as error:
            failures.append(str(error))

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(WeightSyncError, match="trainer gave up"):
        list(transport.tensors())
    sender.join()
    assert failures == ["no more"]
    transport = InProcessTransport("float32", 10.0)
    transport.stop()
    with pytest.raises(ReceiverGoneError):
        transport.send(iter(weights(model_of(1)).items()))


def test_a_side_that_never_comes_is_named():
    with pytest.raises(DeadlineError, match="rollout engine to take a tensor"):
        InProcessTransport("float32", 0.05).send(iter(weights(model_of(1)).items()))
    with pytest.raises(DeadlineError, match="trainer to send"):
        list(InProcessTransport("float32", 0.05).tensors())


def test_inside_an_event_loop(make_engine):
    engine = make_engine()
    asyncio.run(send_weights_async(engine, weights(model_of(1)).items(), 5))
    assert engine.version == 5
