"""What `kvobj serve` prints once it accepts requests. Deployments wait for its first line, so its wording is fixed (design §12)."""

from __future__ import annotations

import shlex
from pathlib import Path

from kvobj.config import Settings


def announcement(settings: Settings, url: str, credentials_path: Path, *, command: str = "kvobj-admin") -> str:
    """Compose the ready line, then how to reach the server with the aws CLI and boto3.

    The keys themselves are not in it: standard output ends up in logs. `command` is how `kvobj-admin` is found.
    """
    region = settings.server.region
    if settings.root_credentials is None:
        directory = shlex.quote(str(credentials_path.parent))
        keys = f'eval "$({shlex.quote(command)} --data {directory} credentials)"'
    else:
        keys = 'export AWS_ACCESS_KEY_ID="$KVOBJ_ACCESS_KEY" AWS_SECRET_ACCESS_KEY="$KVOBJ_SECRET_KEY"'
    return "\n".join(
        [
            f"kvobj ready {url}",
            "",
            f"  keys     {keys}",
            f"  aws CLI  AWS_DEFAULT_REGION={region} aws --endpoint-url {url} s3 mb s3://example",
            f'  boto3    boto3.client("s3", endpoint_url="{url}", region_name="{region}")',
            "",
        ]
    )
