"""Deadlines of groups in one process, so that tests of whole groups take seconds."""

from __future__ import annotations

from dataclasses import replace

from gridtrain.config import Deadlines

BRISK = Deadlines(beat_s=0.1, settle_s=0.02, probe_s=0.2, generation_gap_s=0.02, report_s=2.0, connect_s=5.0)

LOSING = replace(BRISK, regreet_s=0.3, silence_s=1.0)
"""For tests that lose members: losses are detected sooner."""

WITHIN_S = 60.0
"""Limit of a test's wait for an event: what takes longer hangs, also on a busy machine."""
