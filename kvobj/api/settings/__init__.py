"""Settings of buckets and objects: documents put, got and deleted under a name in the query."""
