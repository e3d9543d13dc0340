"""A perfect network in one process: the real buffers and cores, without faults.

The training loops of P workers run in P threads.  The last one to arrive at a step runs the collectives of
all to the end, compares their votes and returns the same outcome to all.
"""

import threading
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
from thread_groups import one_thread_for_torch  # noqa: F401

from gridtrain.core.collectives.collective import CollectiveComplete, SendTo
from gridtrain.core.group.round_flags import is_skipped
from gridtrain.runtime.mailbox.step_plan import RoundOutcome, StepPlan

PATIENCE_S = 60.0
MAX_ABORTS = 3


class PerfectNetwork:
    """`samples[rank]`: the samples of each worker's gradient; `aborts`: (step, attempt) that fail."""

    def __init__(self, world_size=1, samples=None, aborts=()):
        self.samples = list(samples or [1] * world_size)
        self.world_size = len(self.samples)
        self.aborts = set(aborts)
        self.step, self.attempt = 0, 0
        self.last_step = None
        self.updates = []  # digest of each committed update
        self._submitted = [None] * self.world_size
        self._barrier = threading.Barrier(self.world_size, action=self._round)
        self._outcome = None

    def session(self, rank=0):
        return _Session(self, rank)

    def train(self, worker):
        """Run `worker(session)` once for each rank, each in a thread; the results in rank order."""
        results, errors = [None] * self.world_size, []

        def body(rank):
            try:
                results[rank] = worker(self.session(rank))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [
            threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))  # the cause first
        if errors:
            raise errors[0]
        return results

    def exchange(self, rank, buffers, skip, salt):
        self._submitted[rank] = (buffers, skip, salt)
        self._barrier.wait(PATIENCE_S)
        return self._outcome

    def _round(self):
        (counts,) = {len(buffers) for buffers, _, _ in self._submitted}
        skips = [
            self._run([(w[channel], skip) for w, skip, _ in self._submitted]) for channel in range(counts)
        ]
        votes = {
            (salt, *(buffer.compute_digest() for buffer in buffers)) for buffers, _, salt in self._submitted
        }
        committed = len(votes) == 1 and (self.step, self.attempt) not in self.aborts
        self._outcome = RoundOutcome(committed, any(skips))
        if committed:
            self.updates.append(votes.pop()[1:])
            self.step, self.attempt = self.step + 1, 0
        else:
            self.attempt += 1
            assert self.attempt <= MAX_ABORTS, f"step {self.step} never commits: {len(votes)} different votes"

    def _run(self, sides):
        cores = [w.make_collective(rank, self.world_size, int(skip)) for rank, (w, skip) in enumerate(sides)]
        skips = [None] * self.world_size
        mail = deque()

        def execute(rank, effects):
            for effect in effects:
                match effect:
                    case SendTo(to_rank, place, flags):
                        payload = bytes(sides[rank][0].payload(place))
                        mail.append((to_rank, (rank, place, flags, payload)))
                    case CollectiveComplete(flags):
                        skips[rank] = is_skipped(flags)
                    case _:
                        sides[rank][0].apply(effect)

        for rank, core in enumerate(cores):
            execute(rank, core.start())
        while mail:
            rank, arrived = mail.popleft()
            execute(rank, cores[rank].handle(*arrived))
        (skip,) = set(skips)
        return skip


class _Session:
    """A `GroupSession` of the perfect network."""

    is_in_turn = False
    is_computing_unreported = True

    def __init__(self, network, rank):
        self.network, self.rank = network, rank
        self.notes, self.totals = [], {}
        self.computed_shares = []
        self.plans = []
        self.tasks = SimpleNamespace(disable_replay=lambda reason: None)

    def begin(self):
        network = self.network
        samples = network.samples
        plan = StepPlan(
            network.step,
            network.attempt,
            self.rank,
            network.world_size,
            samples[self.rank],
            sum(samples),
            is_last=network.step == network.last_step,
        )
        self.plans.append(plan)
        return replace(plan)

    def serve_state(self, may_copy):
        pass

    def predict_plan(self):
        return None

    def finish_computing(self, share=1.0):
        self.computed_shares.append(share)

    def total_weight(self, plan, weight):
        return None

    def announce_weight(self, weight):
        pass

    def report_digest(self, step, digest):
        pass

    def run(self, plan, buffers, skip, salt):
        return self.network.exchange(plan.rank, buffers, skip, salt)

    def close(self, reason):
        pass

    def report_figures(self, figures):
        self.notes.append(dict(figures))

    def increase_figure(self, name, amount):
        self.totals[name] = self.totals.get(name, 0.0) + amount


@pytest.fixture
def network():
    return PerfectNetwork
