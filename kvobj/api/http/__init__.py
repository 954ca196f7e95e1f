"""The HTTP layer: sockets, HTTP/1.1 framing, limits and deadlines. It knows nothing of S3 (see `kvobj.api.message`)."""

from kvobj.api.http.limits import HttpSettings
from kvobj.api.http.server import HttpServer

__all__ = ["HttpServer", "HttpSettings"]
