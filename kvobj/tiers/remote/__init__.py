"""The remote tier: blobs in a bucket of any S3 server. Nothing here is imported where none is configured."""
