"""The record of which objects exist, which blobs they need and which blobs await deletion. `protocol.Catalog` is the line."""
