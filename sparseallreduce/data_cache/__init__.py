"""DataCache: samples of a slow store, cached by the processes of a host on its disk and in shared memory (CommLib section 4.1).

Data from the store is kept on the local disk for later runs; decoded samples (images, parsed text) are kept in shared memory for later
passes of the same run. It is used by :class:`sparseallreduce.torch.CachedDataset`, and by :func:`sparseallreduce.linear.load` with
``cache``.

Processes coordinate only through folders: with locks that the system releases when a process ends, and with files that get their names once
they are complete. They may be MPI ranks, workers of a DataLoader or other jobs, and may be killed at any time.
"""

from sparseallreduce.data_cache.cache import Counts, DataCache, Request
from sparseallreduce.data_cache.files import CachedFile, FileVersion, StoredFiles

__all__ = ["CachedFile", "Counts", "DataCache", "FileVersion", "Request", "StoredFiles"]
