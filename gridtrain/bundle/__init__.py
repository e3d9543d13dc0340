"""What a volunteer runs: a run's script and its description, as one archive that is known by its digest.

Decides what is in it, and refuses everything else.  Executes nothing, and asks nobody.

    run.toml [run] + train.py + files --Bundle.made--> tar --sha256--> digest
    tar, digest --Bundle.opened--> run, files      (else: refused, and nothing was written)
"""

from gridtrain.bundle.archive import MAX_BUNDLE_BYTES
from gridtrain.bundle.bundle import Bundle, digest_of

__all__ = ["MAX_BUNDLE_BYTES", "Bundle", "digest_of"]
