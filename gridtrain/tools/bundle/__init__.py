"""What a volunteer runs: a run's script and its description, as one archive that is known by its digest.

Decides what is in it, and refuses everything else.  Executes nothing, and asks nobody.

    run.toml [run] + train.py + files --Bundle.made--> tar --sha256--> digest
    tar, digest --Bundle.opened--> run, files      (else: refused, and nothing was written)
"""

from gridtrain.tools.bundle.bundle import Bundle, digest_of
from gridtrain.tools.bundle.bundle_archive import MAX_BUNDLE_BYTES

__all__ = ["MAX_BUNDLE_BYTES", "Bundle", "digest_of"]
