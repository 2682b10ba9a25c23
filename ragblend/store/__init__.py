"""The store room: bytes <-> LayerKV. One chunk is one diskcache entry is one safetensors file.

Nothing here imports torch until a payload is written or read, so that looking at a store stays instant.
"""

from __future__ import annotations

FORMAT_VERSION = 1
"""Version of both the folder layout and the payload header. Raised whenever older code could misread the newer."""
