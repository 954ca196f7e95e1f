"""The KV API: calls on KV buckets beside plain S3 (docs/kv-api.md). One module a resource."""
