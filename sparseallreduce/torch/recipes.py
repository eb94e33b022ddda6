"""The recipes for summing gradients, by the names that optimisers and their groups accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sparseallreduce import optim
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.optim import Optimizer as Recipe
from sparseallreduce.reducers import Reducer

__all__ = ["RECIPES", "check_unchanged", "maker_of", "recipe_of"]

RECIPES: dict[str, type[Recipe]] = {
    recipe.name: recipe
    for recipe in (
        optim.OkTopkSGD,
        optim.GTopkSGD,
        optim.TopKSGD,
        optim.ApproximateTopKSGD,
        optim.MSTopKSGD,
        optim.HiTopKSGD,
        optim.DenseSGD,
        optim.AutoSGD,
    )
}


def recipe_of(name: str | None, default: type[Recipe] = optim.OkTopkSGD) -> type[Recipe]:
    """Return the recipe with this name, or ``default`` for None.

    Raises
    ------
    AlgorithmError
        If there is no recipe with this name.
    """
    if name is None:
        return default
    if name not in RECIPES:
        raise AlgorithmError(f"there is no reducer {name!r}: there are {', '.join(RECIPES)}")
    return RECIPES[name]


def maker_of(name: str, rank: int) -> Callable[[int, int], Reducer]:
    """Return a callable that makes the named reducer from a size and a k, with default options."""
    return partial(recipe_of(name).reducer_of, rank=rank)


def check_unchanged(groups: Sequence[dict[str, Any]], reducers: Sequence[str | None]) -> None:
    """Raise AlgorithmError if a group names another reducer than when it was added, because its residual depends on it."""
    if [group["reducer"] for group in groups] != list(reducers):
        raise AlgorithmError("the reducer of a group is chosen when the group is added: construct another optimiser")
