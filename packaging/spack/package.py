# For Spack: copy to packages/py_sparseallreduce/package.py of a package repository, and fill in the checksum of the release.
# SPDX-License-Identifier: BSD-3-Clause

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PySparseallreduce(PythonPackage):
    """Sparse allreduce over MPI: exact and lossy sums of sparse vectors, at a fraction of the cost of a dense allreduce."""

    homepage = "https://sparseallreduce.github.io/sparseallreduce/"
    pypi = "sparseallreduce/sparseallreduce-1.0.0rc1.tar.gz"
    git = "https://github.com/sparseallreduce/sparseallreduce.git"

    license("BSD-3-Clause")

    version("main", branch="main")
    version("1.0.0rc1", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("mpi", default=True, description="Run on several processes with mpi4py")
    variant("plot", default=False, description="Draw pictures of results")
    variant("parquet", default=False, description="Read Parquet and Arrow files")
    variant("torch", default=False, description="Optimisers for PyTorch")
    variant("zstd", default=False, description="Read and write files compressed by Zstandard")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-numba@0.60:0.68", type=("build", "run"))
    depends_on("py-scipy@1.15:", type=("build", "run"))
    depends_on("py-scikit-learn@1.6:", type=("build", "run"))
    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-tqdm@4.66:", type=("build", "run"))
    depends_on("py-filelock@3.12:", type=("build", "run"))
    depends_on("py-platformdirs@3.0:", type=("build", "run"))
    depends_on("py-pooch@1.8:", type=("build", "run"))
    depends_on("py-requests@2.31:", type=("build", "run"))

    depends_on("py-mpi4py@4.1:", type=("build", "run"), when="+mpi")
    depends_on("py-matplotlib@3.8:", type=("build", "run"), when="+plot")
    depends_on("py-pyarrow@17:", type=("build", "run"), when="+parquet")
    depends_on("py-torch@2.6:", type=("build", "run"), when="+torch")
    depends_on("py-zstandard@0.21:", type=("build", "run"), when="+zstd")

    import_modules = ["sparseallreduce", "sparseallreduce.linear", "sparseallreduce.optim"]

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def simulate(self):
        """Sum sparse vectors of eight simulated ranks."""
        command = Executable(self.prefix.bin.sparseallreduce)
        command("simulate", "--ranks", "8", "--size", "1e5", "--density", "0.001")
