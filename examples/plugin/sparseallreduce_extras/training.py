"""The reducer of this package as an aggregation strategy of the linear trainer: ``train --strategy largestofall``."""

from sparseallreduce.linear import LossyStrategy
from sparseallreduce_extras.largest import LargestOfAll


class LargestStrategy(LossyStrategy):
    """Each step changes the weights by the k largest values of the sum of the ranks' k largest."""

    name = LargestOfAll.name

    @staticmethod
    def new_reducer(size, k):
        return LargestOfAll(size, k)
