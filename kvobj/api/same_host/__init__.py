"""The server's side of the same-host path: grants by HTTP, connections on a Unix socket (docs/same-host.md)."""
