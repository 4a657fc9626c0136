"""Differences by broadcast, between real processes and through gloo, also after faults."""

import copy
import multiprocessing
from collections import deque
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from engines.checksum import combine, tensor_checksum
from engines.collectives import open_store
from engines.errors import WeightSyncError
from engines.rollout.served.weight_receiver import source_from_json, source_to_json
from engines.weight_sync import communicator
from engines.weight_sync.base import ReceiverGoneError
from engines.weight_sync.collective import CollectiveTransport
from engines.weight_sync.communicator import BroadcastGroup, close_communicators
from engines.weight_sync.rendezvous import Rendezvous
from infra.errors import DeadlineError

HOST = "127.0.0.1"
HANG_S = 120.0
# Not forks of this process: threads of gloo may be left in it.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["engines.weight_sync.collective"])


def weights(version: int) -> dict[str, Tensor]:
    """Of uneven sizes and dtypes, in several buckets; a version changes every 199th value."""
    draw = torch.Generator().manual_seed(3)
    sizes = [(7, 3), (60, 211), (), (0, 4), (9000,), (5,), (31, 31)]
    tensors = {f"layer.{n}": torch.randn(s, generator=draw) for n, s in enumerate(sizes)}
    for tensor in tensors.values():
        tensor.view(-1)[version % 199 :: 199] += 0.01 * version
    return tensors | {"mask": torch.arange(71) % 3 == 0}


def digest(version: int) -> str:
    """What every end has to compute; `layer.4` is float32."""
    return combine(
        (name, tensor_checksum(tensor if name in {"layer.4", "mask"} else tensor.bfloat16()))
        for name, tensor in weights(version).items()
    )


def transport(server: TCPStore, *num_workers: int) -> CollectiveTransport:
    return CollectiveTransport.open(
        "bfloat16", {"layer.4"}, 600.0, HOST, num_workers,
        bucket_bytes=16384, server=server, delta_sync=True,
    )  # fmt: skip


def read_each(sources, results, fault: str) -> None:
    """Read transfer after transfer; a fault happens before, or at the end of, the second or third.

    `corrupt`: a byte of what is kept changes; `late`: the process has what it kept after the first;
    `unconfirmed`: all was read, and the process does not come to say so.
    """
    say = Rendezvous.say
    kept: list[dict] = []
    for number, source in enumerate(sources, 1):
        if fault == "corrupt" and number == 2:
            (bases,) = communicator._bases.values()
            bases._bases[0][-1][0] ^= 1
        if fault == "late" and number == 3:
            communicator._bases.update(kept[0])
        Rendezvous.say = refuse if fault == "unconfirmed" and number == 2 else say
        try:
            source = source_from_json(source_to_json(source))
            found = combine((name, tensor_checksum(t)) for name, t in source.tensors())
        except (WeightSyncError, DeadlineError) as error:
            found = f"{type(error).__name__}: {error}"
        kept.append(copy.deepcopy(communicator._bases))
        results.put((source.reader, found))


def refuse(self, key: str, text: str = "") -> None:
    if key.startswith("taken"):
        raise DeadlineError("the confirmation to be sent", 0.0)
    with self._reached():
        self.store.set(key, text)


class Run:
    """Transfers of one sender, this process, to two readers in processes of their own."""

    def __init__(self, num_transfers: int) -> None:
        self.num_bytes: list[int] = []
        server = open_store(3, 600.0, HOST)
        self.transports = [transport(server, 1, 1) for _ in range(num_transfers)]
        self.results = [PROCESSES.Queue() for _ in range(2)]
        self.started = []

    def read(self, reader: int, first: int, last: int, fault: str = "") -> None:
        """Start a process that reads transfers `first` to `last`, from 1, as one reader."""
        sources = [each.sources[reader] for each in self.transports[first - 1 : last]]
        process = PROCESSES.Process(
            target=read_each, args=(sources, self.results[reader], fault), daemon=True
        )
        process.start()
        self.started.append(process)

    def send(self, number: int) -> None:
        """Send version `number`, and check what both readers found."""
        self.num_bytes.append(0)
        sent = self.transports[number - 1].send(iter(weights(number).items()))
        assert sent.digest == digest(number)
        assert [self.found(reader) for reader in range(2)] == [sent.digest] * 2

    def found(self, reader: int) -> str:
        return self.results[reader].get(timeout=HANG_S)[1]

    @property
    def is_whole(self) -> list[bool]:
        """For each transfer: were all buckets sent whole; False if less than a tenth crossed."""
        whole = self.num_bytes[0]
        assert all(each == whole or each < whole / 10 for each in self.num_bytes)
        return [each == whole for each in self.num_bytes]


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(4)
    broadcast = BroadcastGroup.broadcast

    def counted(self, memory: Tensor, root: int = 0) -> None:
        run.num_bytes[-1] += memory.numel()
        broadcast(self, memory, root)

    monkeypatch.setattr(BroadcastGroup, "broadcast", counted)
    yield run
    for process in run.started:
        process.kill()
        process.join()
    close_communicators()


def test_only_first_sync_and_that_of_a_new_reader_are_whole(transfers: Run) -> None:
    transfers.read(0, 1, 4)
    transfers.read(1, 1, 2)
    transfers.send(1)
    transfers.send(2)
    transfers.started[1].join(timeout=HANG_S)
    transfers.read(1, 3, 4)
    transfers.send(3)
    transfers.send(4)
    assert transfers.is_whole == [True, False, True, False]
    num_bytes = sum(t.nbytes if n in {"layer.4", "mask"} else t.numel() * 2
                    for n, t in weights(1).items())  # fmt: skip
    assert num_bytes <= transfers.num_bytes[0] <= num_bytes + 64 * 8


def test_reader_that_kept_an_older_base_gets_all(transfers: Run) -> None:
    """Also if it was not told of a transfer that the others count as confirmed."""
    transfers.read(0, 1, 4)
    transfers.read(1, 1, 4, "late")
    for number in range(1, 5):
        transfers.send(number)
    assert transfers.is_whole == [True, False, True, False]


@pytest.mark.parametrize(
    ("fault", "faulty", "kind", "message"),
    [
        ("unconfirmed", 0, ReceiverGoneError, "the confirmation to be sent"),
        ("corrupt", 1, WeightSyncError, "a rollout engine rebuilt"),
    ],
)
def test_sync_after_an_unconfirmed_one_is_whole(
    transfers: Run, fault: str, faulty: int, kind: type[Exception], message: str
) -> None:
    transfers.read(faulty, 1, 4, fault)
    transfers.read(1 - faulty, 1, 4)
    transfers.send(1)
    with pytest.raises(kind, match=message):
        transfers.send(2)
    assert [transfers.found(reader).partition(":")[0] for reader in range(2)] == [
        "DeadlineError" if fault == "unconfirmed" else "WeightSyncError",
        "WeightSyncError",
    ]
    transfers.send(3)
    transfers.send(4)
    assert transfers.is_whole == [True, False, True, False]


def count_kept(sources, results) -> None:
    for source in sources:
        deque(source_from_json(source_to_json(source)).tensors(), maxlen=0)
        results.put((len(communicator._bases), len(communicator._kept)))


def test_reader_keeps_one_base_with_or_without_the_others() -> None:
    """Its number is another one where the first receiver takes no part."""
    server = open_store(3, 600.0, HOST)
    parts = [transport(server, *each) for each in ((1, 1), (0, 1), (1, 1))]
    results = [PROCESSES.Queue() for _ in range(2)]
    of_both = ([parts[0].sources[0], parts[2].sources[0]], [each.sources[1] for each in parts])
    started = [
        PROCESSES.Process(target=count_kept, args=each, daemon=True)
        for each in zip(of_both, results, strict=True)
    ]
    try:
        for process in started:
            process.start()
        for number, part in enumerate(parts, 1):
            assert part.send(iter(weights(number).items())).digest == digest(number)
        assert [results[1].get(timeout=HANG_S) for _ in parts] == [(1, 1)] * 3
    finally:
        for process in started:
            process.kill()
            process.join()
        close_communicators()
