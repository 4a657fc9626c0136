"""A sender and its receivers in processes of a node whose `/dev/shm` the opener does not see.

python transfer_on_node.py FILE_WITH_PICKLED_TRANSPORT

Prints one line of JSON.
"""

import json
import pickle  # our own test's file
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engines.checksum import combine, tensor_checksum
from engines.weight_sync.shared_memory import PREFIX, SHARED_MEMORY, SharedMemorySource


def held(source: SharedMemorySource) -> tuple[str, str]:
    checksums = []
    for name, tensor in source.tensors():
        checksums.append((name, tensor_checksum(tensor, source.checksum_method)))
        directory = next(SHARED_MEMORY.glob(f"{PREFIX}*"))
    return combine(checksums), str(directory)


def main() -> None:
    transport = pickle.loads(Path(sys.argv[1]).read_bytes())
    with ThreadPoolExecutor() as threads:
        reading = [threads.submit(held, source) for source in transport.sources]
        sent = transport.send((f"w{n}", torch.full((900,), n)) for n in range(40))
        found = [each.result() for each in reading]
    print(
        json.dumps(
            {
                "sent": sent.digest,
                "held": [digest for digest, _ in found],
                "directory": found[0][1],
                "left": [str(each) for each in SHARED_MEMORY.iterdir()],
            }
        )
    )


if __name__ == "__main__":
    main()
