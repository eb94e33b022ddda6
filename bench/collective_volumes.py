"""Compare the bytes of reduce, reduce_scatter, allgather and bcast in the simulator with the formulas of their cards.

    python bench/collective_volumes.py [--most 256]

The cards are those of docs/algorithms.md. Bytes are counted without headers: those that the root of a reduce receives and the root of a
broadcast sends, and otherwise those that the busiest rank receives. Of uniform sets, whose parts differ by chance, those of the mean rank
are counted instead. Counts may differ from the formulas by 2 %.
"""

from __future__ import annotations

import argparse
from math import log2

from volumes import ENTRY, SIZE, entries_of, f, make_streams

import sparseallreduce as sar
from sparseallreduce.streams.wire import HEADER_BYTES

SETS = ("full overlap", "disjoint", "uniform")


def bound(collective: str, algorithm: str, sets: str, ranks: int) -> float:
    """Bytes, by the card."""
    k, share, rounds = entries_of(sets, ranks), (ranks - 1) / ranks, int(log2(ranks))
    union = {"full overlap": k, "disjoint": ranks * k, "uniform": f(k, SIZE, ranks)}[sets]
    held = [{"full overlap": k, "disjoint": 2**t * k, "uniform": f(k, SIZE, 2**t)}[sets] for t in range(rounds)]
    entries = {
        ("reduce", "tree"): sum(held),
        ("reduce", "split"): share * (k + union),
        ("reduce_scatter", "split"): share * k,
        ("reduce_scatter", "halving"): sum(each / 2 ** (t + 1) for t, each in enumerate(held)),
        ("allgather", "doubling"): (ranks - 1) * k,
        ("allgather", "ring"): (ranks - 1) * k,
        ("bcast", "tree"): rounds * k,
        ("bcast", "scatter"): 2 * share * k,
    }[collective, algorithm]
    return entries * ENTRY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=256, help="ranks")
    most = parser.parse_args().most
    print(f"{'collective':<15} {'algorithm':<10} {'sets':<13} {'ranks':>6} {'counted':>12} {'card':>12} {'ratio':>7}")
    failed = 0
    for collective in ("reduce", "reduce_scatter", "allgather", "bcast"):
        for algorithm in sar.algorithms(collective)[:-1]:
            for sets in SETS:
                for ranks in [2**n for n in range(1, 11) if 2**n <= most]:
                    streams = make_streams(sets, ranks)
                    given = [streams[0], *[None] * (ranks - 1)] if collective == "bcast" else streams
                    out = sar.simulate(given, algorithm, collective=collective)
                    if collective == "bcast":
                        counted = int((out.bytes_sent - out.header_bytes)[0])
                    else:
                        received = out.bytes_received - HEADER_BYTES * _streams_received(collective, algorithm, ranks)
                        counted = int(received.mean() if sets == "uniform" and collective != "reduce" else received.max())
                    card = bound(collective, algorithm, sets, ranks)
                    right = abs(counted / card - 1) <= 0.02
                    failed += not right
                    line = f"{collective:<15} {algorithm:<10} {sets:<13} {ranks:6} {counted:12,} {card:12,.0f} {counted / card:7.3f}"
                    print(line + ("" if right else "  NOT AS ON THE CARD"), flush=True)
    print(f"{failed} not as on the card")
    raise SystemExit(failed > 0)


def _streams_received(collective: str, algorithm: str, ranks: int) -> int:
    """By the busiest rank, each with a header."""
    rounds = int(log2(ranks))
    return {"tree": rounds, "halving": rounds, "doubling": ranks - 1, "ring": ranks - 1}.get(
        algorithm, 2 * (ranks - 1) if collective == "reduce" else ranks - 1
    )


if __name__ == "__main__":
    main()
