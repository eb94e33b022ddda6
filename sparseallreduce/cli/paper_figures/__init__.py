"""The figures of the papers, each reproduced by one function that returns a picture."""

from sparseallreduce.cli.paper_figures import classifiers, convergence, hosts, lossy, reading, selections, thesis
from sparseallreduce.cli.paper_figures.settings import Figure, Settings

__all__ = ["FIGURES", "Figure", "Settings"]

_PAPERS = ("thesis", "oktopk", "gtopk", "commlib")


def _place(name: str) -> tuple[int, list[int]]:
    """Return the place of a figure: papers in the order of ``_PAPERS``, each by the numbers of its figures."""
    paper, _, number = name.partition("-")
    return _PAPERS.index(paper), [int(part) for part in number.split(".")]


#: By name, such as "thesis-5.1".
FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in sorted(
        (each for part in (thesis, classifiers, convergence, lossy, selections, hosts, reading) for each in part.FIGURES),
        key=lambda figure: _place(figure.name),
    )
}
