"""The composition root: the one place that names concrete classes and wires them.

`kvobj.app.serve.run` is the server, `kvobj.app.holder.hold` its parent where it has one; the latter loads nothing of the former.
"""
