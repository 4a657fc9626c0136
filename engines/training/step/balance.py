"""Partition of items with known costs into parts of nearly equal cost, with a cap on part sizes.

Method: largest differencing (Karmarkar & Karp 1982), then the best moves and swaps between the
costliest part and another until none helps, up to a limit. The result depends on costs and sizes
alone; the order of items decides only between equal items. No part costs more than the costliest of
greedy LPT (Graham 1969). Neither the best partition nor the fewest parts are guaranteed (NP-hard).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Parts = list[list[int]]

_TOLERANCE = 1e-4
"""Refinement stops once the costliest part is this close to the mean: below timing noise."""

_MAX_ROUNDS_PER_PART = 8
_SEARCH_LIMIT = 512
"""Items of a part that one search for swaps considers; bounds a search to 10 ms."""


@dataclass(frozen=True)
class _Items:
    """Items in canonical order: costliest first, then largest; `max_size` caps part sizes."""

    costs: list[float]
    sizes: list[float]
    max_size: float

    def fits(self, parts: Parts) -> bool:
        return all(sum(self.sizes[i] for i in part) <= self.max_size for part in parts)


def balanced_partition(
    costs: Sequence[float],
    num_parts: int,
    *,
    sizes: Sequence[int] | None = None,
    max_size: int | None = None,
) -> list[list[int]]:
    """Split items into exactly `num_parts` parts of nearly equal cost.

    Args:
        costs: at least 0; any unit.
        num_parts: at least 1. No part is empty with as many items of positive cost.
        sizes: at least 0; needed with `max_size`.
        max_size: cap on the summed size of a part; an item above it gets a part of its own.
            Always attainable with `fewest_parts(sizes, max_size)` parts or more.

    Returns:
        Ascending item indices of each part; parts ordered by their first index, empty ones last.

    Raises:
        ValueError: an argument is out of its range, or no partition under the cap was found.
    """
    _check(costs, num_parts, sizes, max_size)
    own_size = [0] * len(costs) if sizes is None else sizes
    if num_parts == 1 and (max_size is None or sum(own_size) <= max_size):
        return [list(range(len(costs)))]
    cap = math.inf if max_size is None else max_size
    alone = [i for i in range(len(costs)) if own_size[i] > cap]
    rest = sorted(
        (i for i in range(len(costs)) if own_size[i] <= cap),
        key=lambda i: (-costs[i], -own_size[i], i),
    )
    parts = _partition(
        _Items([float(costs[i]) for i in rest], [float(own_size[i]) for i in rest], cap),
        num_parts - len(alone),
    )
    if parts is None:
        raise ValueError(
            f"num_parts: got {num_parts}; found no partition under max_size {max_size}; "
            f"{fewest_parts(own_size, int(cap))} parts are enough"
        )
    named = [sorted(rest[i] for i in part) for part in parts] + [[i] for i in alone]
    return sorted(named, key=lambda part: (not part, part))


def fewest_parts(sizes: Sequence[int], max_size: int) -> int:
    """Return a number of parts that can respect the cap, by first-fit decreasing.

    It is at most 11/9 of the smallest such number, plus 6/9 (Dosa 2007).
    """
    if sizes and sum(sizes) <= max_size:
        return 1
    capped = sorted((float(size) for size in sizes if size <= max_size), reverse=True)
    return len(sizes) - len(capped) + len(_first_fit(_Items(capped, capped, max_size)))


def _check(
    costs: Sequence[float], num_parts: int, sizes: Sequence[int] | None, max_size: int | None
) -> None:
    if num_parts < 1:
        raise ValueError(f"num_parts: got {num_parts}; need at least 1")
    if (max_size is not None) and (sizes is None):
        raise ValueError("max_size: got a cap without sizes; pass both")
    if sizes is not None and len(sizes) != len(costs):
        raise ValueError(f"sizes: got {len(sizes)}; need one for each of {len(costs)} costs")
    for name, values in (("costs", costs), ("sizes", sizes or ())):
        for i, value in enumerate(values):
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"{name}: item {i} has {value}; need a finite number of at least 0"
                )


def _partition(items: _Items, num_parts: int) -> Parts | None:
    """Return the best initial partition under the cap, refined; None if no such one was found."""
    if not items.costs:
        return [[] for _ in range(num_parts)] if num_parts >= 0 else None
    if num_parts < 1:
        return None
    starts = [_differencing(items.costs, num_parts), _greedy(items, num_parts)]
    feasible = [parts for parts in starts if parts is not None and items.fits(parts)]
    if len(feasible) < len(starts):
        # Balancing sizes can respect a tight cap that balancing costs exceeds.
        by_size = _differencing(items.sizes, num_parts)
        feasible += [by_size] if items.fits(by_size) else []
    if not feasible:
        packed = _first_fit(items)
        if len(packed) > num_parts:
            return None
        while len(packed) < num_parts:
            # An empty part is made if no part has two items.
            fullest = max(range(len(packed)), key=lambda p: len(packed[p]))
            num_given = 1 if len(packed[fullest]) > 1 else 0
            packed.append(packed[fullest][:num_given])
            packed[fullest] = packed[fullest][num_given:]
        feasible = [packed]
    return _refine(
        items,
        min(feasible, key=lambda parts: max(math.fsum(items.costs[i] for i in p) for p in parts)),
    )


def _differencing(costs: Sequence[float], num_parts: int) -> Parts:
    """Join the two partial partitions with the largest spread until one is left.

    A partial partition is an ascending list of (cost, node) of its nonempty parts; two are joined
    costliest with cheapest. A node is the index of its items in `members`.
    """
    members = [[i] for i in range(len(costs))]
    heap = [(-cost, i, [(cost, i)]) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    order = len(costs)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        if len(left) < len(right):
            left, right = right, left
        # Above `num_parts` parts, the costliest of one are merged with the cheapest of the other.
        overlap = max(0, len(left) + len(right) - num_parts)
        joined = left[overlap:] + right[overlap:]
        for (left_cost, left_node), (right_cost, right_node) in zip(
            left[:overlap], reversed(right[:overlap]), strict=True
        ):
            joined.append((left_cost + right_cost, len(members)))
            members.append(members[left_node] + members[right_node])
        joined.sort()
        floor = joined[0][0] if len(joined) == num_parts else 0.0
        order += 1
        heapq.heappush(heap, (floor - joined[-1][0], order, joined))
    parts = [sorted(members[node]) for _, node in heap[0][2]]
    return parts + [[] for _ in range(num_parts - len(parts))]


def _greedy(items: _Items, num_parts: int) -> Parts | None:
    parts: Parts = [[] for _ in range(num_parts)]
    cheapest = [(0.0, i) for i in range(num_parts)]
    room = [items.max_size] * num_parts
    for item, (cost, size) in enumerate(zip(items.costs, items.sizes, strict=True)):
        full: list[tuple[float, int]] = []
        while cheapest and room[cheapest[0][1]] < size:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        load, part = cheapest[0]
        parts[part].append(item)
        room[part] -= size
        heapq.heapreplace(cheapest, (load + cost, part))
        for entry in full:
            heapq.heappush(cheapest, entry)
    return parts


def _first_fit(items: _Items) -> Parts:
    parts: Parts = []
    room: list[float] = []
    for item in sorted(range(len(items.sizes)), key=lambda i: (-items.sizes[i], i)):
        size = items.sizes[item]
        part = next((p for p, free in enumerate(room) if free >= size), len(parts))
        if part == len(parts):
            parts.append([])
            room.append(items.max_size)
        parts[part].append(item)
        room[part] -= size
    return [sorted(part) for part in parts]


def _refine(items: _Items, parts: Parts) -> Parts:
    """Relieve the costliest part until no move or swap lowers its cost, or up to a limit."""
    parts = [list(part) for part in parts]
    costs, sizes = np.array(items.costs), np.array(items.sizes)
    loads = [float(costs[part].sum()) for part in parts]
    enough = math.fsum(items.costs) / len(parts) * (1 + _TOLERANCE)
    for _ in range(_MAX_ROUNDS_PER_PART * len(parts)):
        *others, heavy = sorted(range(len(parts)), key=lambda p: (loads[p], p))
        if loads[heavy] <= enough or len(parts[heavy]) < 2:
            break
        for light in others:
            gap = loads[heavy] - loads[light]
            relieved = _relieved(costs, sizes, items.max_size, parts[heavy], parts[light], gap)
            if relieved is not None:
                break
        else:
            break
        for part, members in zip((heavy, light), relieved, strict=True):
            parts[part] = sorted(members)
            loads[part] = float(costs[members].sum())
    return parts


def _relieved(
    costs: NDArray[np.float64],
    sizes: NDArray[np.float64],
    max_size: float,
    heavy: list[int],
    light: list[int],
    gap: float,
) -> tuple[list[int], list[int]] | None:
    """Move or swap items so that both parts cost less than `heavy` does; None if impossible.

    `gap` is the difference of their costs. Takes the exchange that leaves the two costs closest.
    """
    # At most `_SEARCH_LIMIT` items of each, spread over all costs.
    given, taken = (part[:: 1 + max(0, len(part) - 1) // _SEARCH_LIMIT] for part in (heavy, light))
    # The last column is a move: nothing is taken in return.
    moved_cost, moved_size = (
        values[given][:, None] - np.append(values[taken], 0.0)[None, :] for values in (costs, sizes)
    )
    allowed = (moved_cost > 0) & (moved_cost < gap)
    allowed &= moved_size <= max_size - sizes[light].sum()
    allowed &= -moved_size <= max_size - sizes[heavy].sum()
    if not allowed.any():
        return None
    distance = np.where(allowed, np.abs(moved_cost - gap / 2), np.inf)
    row, column = divmod(int(distance.argmin()), distance.shape[1])
    back = [taken[column]] if column < len(taken) else []
    return (
        [i for i in heavy if i != given[row]] + back,
        [i for i in light if i not in back] + [given[row]],
    )
