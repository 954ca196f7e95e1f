"""What a server and a client on one host say to each other: messages, their framing, descriptors, and memory mapped by both.

Rights come by HTTP, bytes by shared memory, and in between goes what stands here (docs/same-host.md). Imported by both sides, so it
knows neither store nor engine. Nothing that a peer sends is believed further than its type.
"""
