"""The ways to sum gradients, by the names that optimisers and their groups take."""

from __future__ import annotations

from sparseallreduce import optim
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.optim import Optimizer as Recipe

__all__ = ["RECIPES", "recipe_of"]

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


def recipe_of(name: str) -> type[Recipe]:
    """Return a way to sum.

    Raises
    ------
    AlgorithmError
        If there is none of this name.
    """
    if name not in RECIPES:
        raise AlgorithmError(f"there is no reducer {name!r}: there are {', '.join(RECIPES)}")
    return RECIPES[name]
