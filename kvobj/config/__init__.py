"""Configuration: TOML becomes frozen settings once, at the edge; every problem is reported together with its path.

Settings are values. Components are built from them in `app.py`, get the few numbers they need and never the tree. Nothing in
here reads a file or the environment but `load.py`, which the command lines call.
"""

from __future__ import annotations

from kvobj.config.bucket_name import bucket_name_problem
from kvobj.config.load import example_text, load_settings
from kvobj.config.parse import parse_settings
from kvobj.config.settings import (
    AdminSettings,
    BucketSettings,
    CatalogSettings,
    DebugSettings,
    DramSettings,
    EventSettings,
    GcSettings,
    HbmSettings,
    LimitSettings,
    ListenAddress,
    LmSettings,
    LogSettings,
    NvmeSettings,
    PolicySettings,
    RemoteSettings,
    RootCredentials,
    SecuritySettings,
    ServerSettings,
    Settings,
    TlsSettings,
    UpstreamSettings,
    UserSettings,
)

__all__ = [
    "AdminSettings",
    "BucketSettings",
    "CatalogSettings",
    "DebugSettings",
    "DramSettings",
    "EventSettings",
    "GcSettings",
    "HbmSettings",
    "LimitSettings",
    "ListenAddress",
    "LmSettings",
    "LogSettings",
    "NvmeSettings",
    "PolicySettings",
    "RemoteSettings",
    "RootCredentials",
    "SecuritySettings",
    "ServerSettings",
    "Settings",
    "TlsSettings",
    "UpstreamSettings",
    "UserSettings",
    "bucket_name_problem",
    "example_text",
    "load_settings",
    "parse_settings",
]
