"""The S3 API: a request becomes an operation value, a handler answers it, errors become replies in one place."""
