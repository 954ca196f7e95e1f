"""The composition root: the one place that names concrete classes and wires them."""

from kvobj.app.serve import run

__all__ = ["run"]
