"""DataCache: samples of a slow store, kept by the processes of a host on its disk and in memory that they share (CommLib section 4.1).

What a store gives is kept on the local disk, for the next runs; what becomes of it before training (images decoded, text parsed) is kept
in shared memory, for the next passes of this one. Callers are :class:`sparseallreduce.torch.CachedDataset`, and
:func:`sparseallreduce.linear.load` with its ``cache``.

Processes meet in folders, and talk by nothing else: locks that the system drops when a process ends, and files that get their names when
they are whole. So it does not matter whether they are ranks of MPI, workers of a DataLoader or other jobs, nor when one of them is killed.
"""

from sparseallreduce.data_cache.cache import Counts, DataCache, Request
from sparseallreduce.data_cache.files import CachedFile, FileVersion, StoredFiles

__all__ = ["CachedFile", "Counts", "DataCache", "FileVersion", "Request", "StoredFiles"]
