"""Settings of a link to a server of the tests, which rests for a moment alone where that is away."""

from __future__ import annotations

from server_process import ServerProcess

from kvobj.connectors.link_settings import LinkSettings


def settings_of(server: ServerProcess, **fields: object) -> LinkSettings:
    """For the root user's bucket `cache`; `fields` in their place or beside them."""
    keys = server.credentials()
    values: dict[str, object] = {
        "endpoint": server.endpoint,
        "bucket": "cache",
        "access_key": keys.access_key,
        "secret_key": keys.secret_key,
        "rest_seconds": 0.1,
        "rest_seconds_max": 0.2,
        **fields,
    }
    return LinkSettings.parse(values, {})
