"""Another kvobj that is asked for chunks of a KV bucket that are not here (docs/federation.md)."""
