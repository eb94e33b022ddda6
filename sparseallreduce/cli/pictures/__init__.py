"""Pictures: panels that describe what to show, and a function that draws them."""

from sparseallreduce.cli.pictures.panels import Bars, Dots, Grid, Line, Panel, Picture, Quantity, panel_of

__all__ = ["Bars", "Dots", "Grid", "Line", "Panel", "Picture", "Quantity", "panel_of"]
