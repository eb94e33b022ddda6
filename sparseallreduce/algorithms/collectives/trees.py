"""Binomial trees for any number of ranks and any root."""

from __future__ import annotations

__all__ = ["Tree", "tree_of"]

from typing import NamedTuple

from sparseallreduce.algorithms.exchange import lower_power_of_two


class Tree(NamedTuple):
    """The position of a rank in a binomial tree of all ranks."""

    parent: int | None  # None for the root
    children: tuple[int, ...]  # from near to far: the i-th is the root of a subtree of at most 2**i ranks


def tree_of(rank: int, ranks: int, root: int) -> Tree:
    """Return the parent and the children of ``rank`` in the binomial tree with the given root.

    If the number of ranks is a power of two, ranks at distance 1 are connected at the lowest level, for any root, and ranks at half the
    number of ranks at the top. The ranks of one host, which have consecutive numbers, thus form a subtree.

    >>> tree_of(0, 8, 0), tree_of(6, 8, 0)
    (Tree(parent=None, children=(1, 2, 4)), Tree(parent=4, children=(7,)))
    >>> tree_of(5, 8, 4), tree_of(2, 3, 2)
    (Tree(parent=4, children=()), Tree(parent=None, children=(0, 1)))
    """

    def moved(place: int, back: bool) -> int:
        if ranks == lower_power_of_two(ranks):
            return place ^ root
        return (place + root) % ranks if back else (place - root) % ranks

    place = moved(rank, back=False)
    reach = place & -place if place else ranks
    distances = [1 << bit for bit in range((reach - 1).bit_length())]
    children = tuple(moved(place + distance, back=True) for distance in distances if place + distance < ranks)
    return Tree(moved(place - reach, back=True) if place else None, children)
