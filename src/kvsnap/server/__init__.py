"""HTTP over conversations: one model for many clients, with sessions that last. docs/server.md.

Needs the extra `kvsnap[server]`. `serve` answers until it is told to stop.
"""

from __future__ import annotations

from kvsnap.server.running import bound, serve
from kvsnap.server.settings import Limits, Settings
from kvsnap.server.tenants import ENVIRONMENT, Tokens, read_token, read_tokens

__all__ = ["ENVIRONMENT", "Limits", "Settings", "Tokens", "bound", "read_token", "read_tokens", "serve"]
