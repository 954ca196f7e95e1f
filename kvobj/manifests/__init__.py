"""Manifests: what a store's catalog says of what lies on the remote, written there beside the blobs, and read back after a loss.

`format` and `names` say what a manifest is, `journal` writes the outbox into them, `snapshot` what is true at one position,
`compaction` keeps them few, `reading` merges them. A record says what its subject is from its position on: the highest wins.
"""
