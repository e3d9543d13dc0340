"""Bundles: a run's script and description as one archive, identified by its digest.

    run.toml [run] + train.py + files --Bundle.from_run_file--> tar --sha256--> digest
    tar, digest --Bundle.from_archive--> run, files      (otherwise rejected; nothing is written)

This package executes nothing.
"""

from gridtrain.tools.bundle.bundle import Bundle, digest_of
from gridtrain.tools.bundle.bundle_archive import MAX_BUNDLE_BYTES

__all__ = ["MAX_BUNDLE_BYTES", "Bundle", "digest_of"]
