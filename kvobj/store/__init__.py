"""The store: coordination of catalog, tiers and codecs behind one put, one get, one delete."""
