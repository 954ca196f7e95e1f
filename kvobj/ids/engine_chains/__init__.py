"""How inference engines name KV blocks, computed exactly from token ids: one module an engine.

All are pure. Which release each was read at, and against what it was checked, stands in `docs/formats.md`; vectors in
`tests/golden/engine_chains.json`. `server` holds the chains that a namespace may ask the server to compute.
"""
