"""Collection: reap what the delete queue names, expire from a full home tier, and sweep up leftovers."""
