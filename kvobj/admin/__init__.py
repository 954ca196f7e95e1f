"""`kvobj-admin`: looks into a running server through its admin port, or into a stopped store's data directory."""
