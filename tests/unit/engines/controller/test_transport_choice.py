"""Which way weights take to replicas, by where those are."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engines.config.rollout import RolloutConfig, TransportName
from engines.config.training import LoraConfig
from engines.controller import rollout
from engines.controller.placement import Place
from engines.controller.replica import ReplicaSpec
from engines.controller.rollout import Sender, choose_transport
from engines.weight_sync.collective import CollectiveTransport
from engines.weight_sync.device_ipc import DeviceIpcTransport
from engines.weight_sync.sharded import ShardedTransport
from engines.weight_sync.shared_memory import SharedMemoryTransport
from infra import env
from infra.errors import ConfigError

HERE, ELSEWHERE = (Place(n, f"node {n}", f"10.0.0.{n}", 1, {}) for n in (1, 2))
SENDER = Sender((HERE.node,), has_device=True)
NODES = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--mount", "--fork"]
NODES += ["--kill-child", "--mount-proc"]
TRANSFERS = Path(__file__).with_name("transfers_between_nodes.py")
HANG_S = 300.0


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "this_address", lambda: "127.0.0.1")


def spec(model_dir: Path, transport: TransportName) -> ReplicaSpec:
    config = RolloutConfig(placement="disaggregated", transport=transport, timeout_s=5.0)
    return ReplicaSpec(model_dir, config, "float32", "cpu", None, 1, model_dir)


@pytest.mark.parametrize(
    ("transport", "places", "kind"),
    [
        ("auto", (HERE, HERE), SharedMemoryTransport),
        ("auto", (HERE, ELSEWHERE), CollectiveTransport),
        ("shared_memory", (HERE,), SharedMemoryTransport),
        ("collective", (HERE,), CollectiveTransport),
        ("device_ipc", (HERE, HERE), DeviceIpcTransport),
    ],
)
def test_shared_memory_needs_all_replicas_on_the_senders_node(
    model_dir: Path, transport: TransportName, places, kind
) -> None:
    made = choose_transport(spec(model_dir, transport), places, SENDER)([1] * len(places))
    assert type(made) is kind
    assert len(made.sources) == len(places)
    made.stop()


def test_ranks_that_share_the_weights_each_send_their_part(model_dir: Path) -> None:
    of_two = replace(SENDER, nodes=(HERE.node, HERE.node))
    whole = spec(model_dir, "collective")
    made = choose_transport(whole, (HERE, ELSEWHERE), of_two)([1, 2])
    assert isinstance(made, ShardedTransport)
    assert [source.reader for source in made.sources] == [0, 1]
    made.stop()
    # An adapter travels whole, and so does once what it stands on.
    adapted = replace(whole, adapter=LoraConfig(rank=2))
    assert isinstance(choose_transport(adapted, (HERE,), of_two)([1]), CollectiveTransport)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_differences_are_sent_where_weights_are_broadcast(model_dir: Path, num_ranks: int) -> None:
    plain = spec(model_dir, "auto")
    wanted = replace(plain, rollout=plain.rollout.model_copy(update={"delta_sync": True}))
    sender = Sender((HERE.node,) * num_ranks, has_device=True)

    def is_delta(of: ReplicaSpec, place: Place) -> bool:
        made = choose_transport(of, (place,), sender)([1])
        made.stop()
        return getattr(made.sources[0], "delta_sync", False)

    assert is_delta(wanted, ELSEWHERE)
    assert not is_delta(plain, ELSEWHERE)
    assert not is_delta(wanted, HERE)
    # Base weights have no next transfer, and a judge's weights neither.
    assert not is_delta(replace(wanted, adapter=LoraConfig(rank=2)), ELSEWHERE)
    beside = rollout.replica_beside(wanted, model_dir, 1, {}, embedded=False)
    assert not is_delta(beside, ELSEWHERE)


@pytest.mark.parametrize("transport", ["shared_memory", "device_ipc"])
def test_delta_sync_is_refused_without_broadcast(transport: TransportName) -> None:
    with pytest.raises(ValueError, match=f"delta_sync: got true with transport {transport}"):
        RolloutConfig(transport=transport, delta_sync=True)
    assert RolloutConfig(transport="collective", delta_sync=True).delta_sync


@pytest.mark.parametrize("transport", ["shared_memory", "device_ipc"])
def test_memory_of_a_node_is_refused_where_it_does_not_reach(model_dir, transport) -> None:
    message = rf"rollout\.transport: got {transport}, and replicas on 10\.0\.0\.2"
    with pytest.raises(ConfigError, match=message):
        choose_transport(spec(model_dir, transport), (HERE, ELSEWHERE), SENDER)


@pytest.mark.parametrize(
    ("transport", "platform", "has_device", "adapter", "kind"),
    [
        ("auto", "nvidia", True, False, DeviceIpcTransport),
        ("auto", "amd", True, False, DeviceIpcTransport),
        ("auto", "nvidia", False, False, SharedMemoryTransport),
        ("device_ipc", "nvidia", False, False, SharedMemoryTransport),
        ("auto", "nvidia", True, True, SharedMemoryTransport),
        ("auto", "huawei", True, False, SharedMemoryTransport),
        ("auto", "cpu", True, False, SharedMemoryTransport),
    ],
)
@pytest.mark.parametrize("shares_devices", [False, True])
def test_device_memory_is_used_where_devices_share_it(
    model_dir, monkeypatch, transport, platform, has_device, adapter, kind, shares_devices
) -> None:
    """Raw handles do not depend on torch, so that versions may differ."""
    monkeypatch.setattr(rollout, "this_address", lambda: "127.0.0.1")
    own = spec(model_dir, transport)
    on_devices = replace(
        own, platform=platform, libraries={"torch": "99.1"}, shares_devices=shares_devices
    )
    sender = Sender((HERE.node,), has_device)
    made = choose_transport(on_devices, (HERE,), sender, adapter=adapter)([2])
    assert type(made) is kind
    made.stop()


@pytest.mark.parametrize(
    ("places", "senders"),
    [
        ((HERE, HERE, ELSEWHERE, ELSEWHERE), (0, 0, 2, 2)),  # beside the ranks
        ((ELSEWHERE, HERE, ELSEWHERE), (2, 0, 2)),
        ((ELSEWHERE,), (2,)),
    ],
)
@pytest.mark.parametrize(
    ("transport", "kind"),
    [
        ("auto", SharedMemoryTransport),
        ("shared_memory", SharedMemoryTransport),
        ("device_ipc", DeviceIpcTransport),
    ],
)
def test_the_lowest_rank_of_each_node_sends_there(
    model_dir: Path, transport: TransportName, kind, places, senders
) -> None:
    of_two_nodes = Sender((HERE.node, HERE.node, ELSEWHERE.node, ELSEWHERE.node), False)
    for adapter in (False, True):
        new = choose_transport(spec(model_dir, transport), places, of_two_nodes, adapter=adapter)
        made = new([1] * len(places))
        assert type(made) is (SharedMemoryTransport if adapter else kind)
        assert made.senders == senders
        made.stop()


def test_a_replica_without_a_rank_on_its_node_is_told(model_dir: Path, caplog) -> None:
    of_two_nodes = Sender((HERE.node, ELSEWHERE.node), has_device=False)
    third = Place(3, "node 3", "10.0.0.3", 1, {})
    with caplog.at_level(logging.INFO):
        made = choose_transport(spec(model_dir, "auto"), (HERE, third), of_two_nodes)([1, 1])
    assert isinstance(made, ShardedTransport)
    assert "weights go by broadcast: no rank has them on 10.0.0.3" in caplog.text
    made.stop()


@pytest.mark.slow
def test_no_weights_go_from_node_to_node(model_dir: Path) -> None:
    """Two nodes with two ranks and two replicas each; a broadcast shows what is counted."""
    probe = ["sh", "-c", "mount -t tmpfs tmpfs /dev/shm && ip link set lo up"]
    try:
        subprocess.run([*NODES, *probe], check=True, capture_output=True, timeout=HANG_S)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs namespaces of users, mounts and networks, and ip: {error}")
    ended = subprocess.run(
        [*NODES, sys.executable, str(TRANSFERS), str(model_dir)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=env.child_environment(PYTHONPATH=str(Path(__file__).parents[4])),
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    weight_bytes, ways = 8 * 2**20, told["ways"]
    kinds = [ways[name]["kind"] for name in ("auto", "device_ipc")]
    assert kinds == ["SharedMemoryTransport", "DeviceIpcTransport"]
    for name, way in ways.items():
        assert way["held"] == way["sent"] == [way["sent"][0]] * 4
        if name == "collective":
            assert way["network_bytes"] > 4 * weight_bytes
            continue
        assert way["network_bytes"] < weight_bytes / 20
        # Each node's replicas read that node's memory; the driver has another.
        one, two = (set(devices) for devices in way["devices"])
        assert len(one) == len(two) == 1
        assert len({*one, *two, told["own device"]}) == 3


def test_device_memory_is_refused_where_it_cannot_be_shared(model_dir: Path) -> None:
    on_devices = replace(spec(model_dir, "device_ipc"), platform="huawei")
    with pytest.raises(ConfigError, match="got device_ipc, and huawei devices"):
        choose_transport(on_devices, (HERE,), SENDER)


def test_no_communicator_joins_two_versions_of_torch(model_dir: Path) -> None:
    """A replica has the torch and the NCCL that its engine pins."""
    newer = replace(spec(model_dir, "auto"), libraries={"torch": "99.1"})
    with pytest.raises(ConfigError, match=r"rollout\.transport: got auto, torch .* and 99\.1"):
        choose_transport(newer, (ELSEWHERE,), SENDER)
    made = choose_transport(newer, (HERE,), SENDER)([1])
    assert isinstance(made, SharedMemoryTransport)
    made.stop()


def test_devices_broadcast_among_themselves(model_dir: Path) -> None:
    on_devices = replace(spec(model_dir, "collective"), platform="nvidia")
    for has_device, shares_devices, expected in (
        (True, False, ("nccl", "cuda")),
        (False, False, ("gloo", "cpu")),
        (True, True, ("gloo", "cpu")),  # NCCL joins no two processes on one device
    ):
        asked = replace(on_devices, shares_devices=shares_devices)
        made = choose_transport(asked, (HERE,), Sender((HERE.node,), has_device))([2])
        (source,) = made.sources
        assert (source.backend, source.device_name) == expected
