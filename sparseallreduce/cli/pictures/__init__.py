"""Pictures: panels that say what is to be seen, and one way to draw them."""

from sparseallreduce.cli.pictures.panels import Bars, Dots, Grid, Line, Panel, Picture, Quantity, panel_of

__all__ = ["Bars", "Dots", "Grid", "Line", "Panel", "Picture", "Quantity", "panel_of"]
