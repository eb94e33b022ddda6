"""The version, which the build reads from here."""

__all__ = ["__version__"]

__version__ = "1.0.0rc1"
