"""What is installed: the client alone, or the server too (`pip install 'kvobj[server]'`; in a clone `pip install '.[server]'`)."""

from __future__ import annotations


def server_missing(error: ModuleNotFoundError) -> str:
    """The one line for who starts the server where only the client is installed. An error about a module of kvobj's own is no
    matter of installation: it is raised again."""
    if error.name is None or error.name.partition(".")[0] == "kvobj":
        raise error
    return (
        f"the server is not installed here ({error.name} is missing): in a clone pip install '.[server]', from a release "
        "pip install 'kvobj[server]'"
    )
