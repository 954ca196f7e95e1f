"""Worker processes: HTTP and the API in several processes over one store process (docs/adr/0010-worker-processes.md)."""
