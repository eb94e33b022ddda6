"""The figures of the papers, each reproduced by one function that returns a picture."""

from sparseallreduce.cli.paper_figures.lossy import FIGURES as LOSSY
from sparseallreduce.cli.paper_figures.settings import Figure, Settings
from sparseallreduce.cli.paper_figures.thesis import FIGURES as THESIS

__all__ = ["FIGURES", "Figure", "Settings"]

#: By name, such as "thesis-5.1".
FIGURES: dict[str, Figure] = {figure.name: figure for figure in (*THESIS, *LOSSY)}
