"""Check the promises of this package's extensions, and print what was tried."""

from sparseallreduce.testing import check_algorithm, check_codec, check_reducer
from sparseallreduce_extras.bruck import bruck
from sparseallreduce_extras.int8 import INT8
from sparseallreduce_extras.largest import LargestOfAll

print(check_algorithm(bruck, examples=60))
print(check_reducer(LargestOfAll, examples=10))
print(check_codec(INT8, examples=40))
