"""Children that compute, of a process that imports what they need and computes nothing itself.

Libraries' threads do not survive a fork, and a kill is to cost what it interrupts and no more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import faiss  # noqa: F401
import sentence_transformers  # noqa: F401
from llama_index.llms.ragblend import RagBlendLLM  # noqa: F401

from ragblend.kb import session as _session  # noqa: F401


def forked(work: Callable[[], None]) -> int:
    """The id of a process that does the work, and ends with 0 if it could."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)
