"""The order and deadlines of doctor's checks, and findings on the link, run, upload limit and predicted gain.

start another process, which imports torch
check Python, memory, disk and TCP
check host name -> port -> invitation -> status, packages, clock -> dial-back -> links
wait for the other process, until 18 s have passed since the start
predict the run's speed with this machine
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from typing import Any

from gridtrain.core.group.invitation import Invitation
from gridtrain.core.messages import PeerId
from gridtrain.errors import MTU_REMEDY, ConfigError, GridtrainError
from gridtrain.network.transport.identity import Identity, claim_identity
from gridtrain.quantities import format_count, format_number, format_seconds, make_printable
from gridtrain.runtime.client.enrollment import INVITATION, UNKNOWN_INVITATION, revoked_error
from gridtrain.runtime.client.invitation_store import InvitationStore
from gridtrain.runtime.client.worker_defaults import identity_folder
from gridtrain.status_fields import rows
from gridtrain.tools.doctor import connection_check, machine_check
from gridtrain.tools.doctor.doctor_probe import DoctorProbe, LinkMeasurement
from gridtrain.tools.doctor.findings import Finding, FindingLevel, failure, ok, warning
from gridtrain.tools.doctor.speedup_prediction import RunStatus, predict_speedup

TOTAL_TIMEOUT_S = 18.0
GREETING_TIMEOUT_S, ANSWER_TIMEOUT_S, CALLBACK_TIMEOUT_S = 4.0, 2.0, 3.5
COORDINATOR_TIMEOUT_S, MEMBERS_TIMEOUT_S = 3.0, 4.0
SLOW_UP_Bps = 0.25e6
NEGLIGIBLE_GAIN = 0.005


@dataclass(frozen=True, slots=True)
class UploadLimit:
    """The upload limit that this machine's user has set; `where` names the option, variable or rule that sets
    it."""

    rate_Bps: float
    where: str


RunStatusParser = Callable[[Mapping[str, Any]], RunStatus]


class Examination:
    """Examines this machine once; `findings` yields each result as it is found.

    Args:
        read_run: a function that reads from a status the figures that the prediction needs; raises
            `ConfigError` if they are missing.
        total_s: the time limit of the whole examination, in seconds.
        wall: a function that returns the wall-clock time in seconds.
        probe: a function that starts the process that imports torch; tests replace the function.
        upload_limit: the limit of a worker on this machine; doctor's own measurements ignore it.
    """

    def __init__(
        self,
        invitation: Invitation,
        read_run: RunStatusParser,
        *,
        total_s: float = TOTAL_TIMEOUT_S,
        wall: Callable[[], float] = time.time,
        probe: Callable[[], machine_check.TorchProbe] = machine_check.TorchProbe,
        upload_limit: UploadLimit | None = None,
    ) -> None:
        self._upload_limit = upload_limit
        self._invitation, self._read_run, self._wall, self._probe = invitation, read_run, wall, probe
        self._began_s = time.monotonic()
        self._until_s = self._began_s + total_s
        self._status: dict[str, Any] = {}
        self._asked_wall_s = 0.0
        self._coordinator = LinkMeasurement()
        self._measured_up_Bps: float | None = None  # of the link to the coordinator, whatever the limit
        self._members: dict[int, LinkMeasurement] = {}

    def _deadline_s(self, limit_s: float) -> float:
        return min(self._until_s, time.monotonic() + limit_s)

    def _left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def findings(self) -> Iterator[Finding]:
        """Yield all findings.  The process of `TorchProbe` is terminated even after `KeyboardInterrupt`."""
        torch = self._probe()
        try:
            yield machine_check.check_python()
            yield machine_check.check_memory()
            yield machine_check.check_disk(self._invitation.run)
            yield machine_check.check_tcp_restart()
            yield from self._connection_findings()
            of_torch, flops = torch.findings(self._until_s)
            yield from of_torch
            yield from self._prediction_finding(flops)
        finally:
            torch.end()

    # -- connections -------------------------------------------------------------------------------

    def _connection_findings(self) -> Iterator[Finding]:
        """Yield the findings about connections; the checks that follow a failed one are left out."""
        addresses: list[connection_check.SocketAddress] = []
        for check in (connection_check.check_name, connection_check.check_tcp):
            finding = check(self._invitation, addresses, self._left_s())
            yield finding
            if finding.level is FindingLevel.FAILURE:
                return
        try:
            identity = Identity.from_secret(self._invitation.token)
            with closing(DoctorProbe(self._invitation, identity)) as probe:
                finding = self._greeting_finding(probe)
                if finding.level is not FindingLevel.FAILURE:
                    self._request_status(probe)
                    if (ended := probe.responses.refused) is None or ended.code != INVITATION:
                        yield finding
                        yield from self._run_findings(probe)
                        return
                    finding = failure("invitation", ended.reason, ended.remedy)
            is_ended = probe.responses.is_denied or probe.responses.refused is not None
            yield from self._retry_as_known(finding) if is_ended else [finding]
        except GridtrainError as error:
            yield failure(
                "invitation", error.reason, error.remedy or "ask the run's owner for a new invitation"
            )

    def _greeting_finding(self, probe: DoctorProbe) -> Finding:
        run = f'run "{self._invitation.run}"'
        if probe.connect(self._deadline_s(GREETING_TIMEOUT_S)):
            text = f"valid for {run}; this check does not count as a use"
            return ok("invitation", text, run=self._invitation.run)
        if probe.responses.is_denied:
            fix = "ask the run's owner for a new one (gridtrain invite)"
            return failure("invitation", UNKNOWN_INVITATION, fix)
        if probe.responses.violation:
            fix = "run the same version of gridtrain on both sides"
            return failure(
                "invitation", f"the coordinator broke the protocol: {probe.responses.violation}", fix
            )
        text = "another program or a coordinator with a different key answered, or the link is too slow"
        fix = "ask the run's owner for a new invitation, if the coordinator was set up again"
        return failure("invitation", text, fix)

    def _retry_as_known(self, refused: Finding) -> Iterator[Finding]:
        """Yield the findings if the coordinator has refused the invitation.

        The invitation is not needed if an earlier worker on this machine was admitted, so connect with the
        worker keys of this machine.  If none is admitted, yield `refused` or a more specific finding.
        """
        folder = identity_folder(self._invitation.run, self._invitation.coordinator)
        if not any(folder.glob("worker-*.key")):
            yield refused
            return
        store, removed, is_own_removed = InvitationStore(folder), None, False
        own = store.keys_of(self._invitation)
        with ExitStack() as locks:  # the same order as in `enroll`: the first free key that is admitted
            while (
                claimed := locks.enter_context(claim_identity(folder, fresh=False, first=own))
            ) is not None:
                identity, path = claimed
                if is_own_removed and path.stem not in own:
                    break
                with closing(DoctorProbe(self._invitation, identity)) as probe:
                    if probe.connect(self._deadline_s(GREETING_TIMEOUT_S)):
                        self._request_status(probe)
                        yield ok(
                            "invitation", "no longer valid, but this machine is already admitted", known=True
                        )
                        yield from self._run_findings(probe)
                        return
                if not probe.responses.is_denied:
                    yield refused
                    return
                if removed is None:
                    if not store.was_admitted(path):
                        break
                    removed, is_own_removed = identity, path.stem in own
        if removed is not None:
            error = revoked_error(self._invitation, removed)
            yield failure("invitation", error.reason, error.remedy)
        elif findings := [*self._retry_unused(store)]:
            yield from findings
        elif claimed is not None:
            yield refused
        else:
            fix = "nothing to do: this machine is already training"
            yield warning("invitation", "in use by a worker on this machine", fix)

    def _retry_unused(self, store: InvitationStore) -> Iterator[Finding]:
        """Yield the findings if this machine has another invitation to the run that is unused and valid.

        A worker would join with it under a new key.  Yields nothing if there is no such invitation.
        """
        for other in store.unused(self._invitation):
            invited = replace(other, address=self._invitation.address)
            with closing(DoctorProbe(invited, Identity.from_secret(other.token))) as probe:
                if other.encrypted == self._invitation.encrypted and probe.connect(
                    self._deadline_s(GREETING_TIMEOUT_S)
                ):
                    self._request_status(probe)
                    if self._status:
                        yield ok("invitation", "no longer valid, but another one on this machine is unused")
                        yield from self._run_findings(probe)
                        return

    def _request_status(self, probe: DoctorProbe) -> None:
        self._asked_wall_s = self._wall()
        self._status = probe.request_checkup(self._deadline_s(ANSWER_TIMEOUT_S)) or {}

    def _run_findings(self, probe: DoctorProbe) -> Iterator[Finding]:
        """Yield the findings from the answer to `_request_status`, and from the measurements that follow."""
        if not self._status:
            refused = probe.responses.refused
            why = refused.reason if refused is not None else f"no answer within {ANSWER_TIMEOUT_S:g} s"
            fix = refused.remedy if refused is not None else "try again, or join anyway"
            yield warning("run", f"the status of the run is unknown: {why}", fix)
            return
        yield self._state_finding()
        yield from machine_check.check_packages(self._status.get("bundle"))
        yield connection_check.check_clock(_wall_of(self._status), self._asked_wall_s)
        yield _reachable(probe, probe.wait_for_callback(self._deadline_s(CALLBACK_TIMEOUT_S)))
        measured = probe.measure_coordinator(
            self._deadline_s(COORDINATOR_TIMEOUT_S),
            self._deadline_s(COORDINATOR_TIMEOUT_S + MEMBERS_TIMEOUT_S),
        )
        self._measured_up_Bps, self._coordinator = measured.up_Bps, self._limited(measured)
        yield _line("coordinator", self._coordinator, self._effective_limit(self._coordinator))
        yield from self._member_findings(probe)

    def _state_finding(self) -> Finding:
        status = self._status
        size, phase = status.get("world_size"), status.get("phase")
        workers = format_count(size, "worker") if isinstance(size, int) else f"{size} workers"
        text = f"{phase}, {workers}, step {status.get('step')}: "
        text += _plain(status.get("reason"))
        if status.get("finished"):
            return failure(
                "run", text, "ask the run's owner for the result, or join another run: this run has finished"
            )
        return ok("run", text, phase=phase, world_size=size, step=status.get("step"))

    def _member_findings(self, probe: DoctorProbe) -> Iterator[Finding]:
        if self._coordinator.is_up_bound:
            text = "not measured, because this machine was still sending 256 KiB to the coordinator"
            yield ok("members", text)
            return
        ranks = {str(each.get("peer")): each.get("rank") for each in rows(self._status, "members")}
        deadline_s, up_Bps = self._deadline_s(MEMBERS_TIMEOUT_S), self._measured_up_Bps
        found = probe.measure_members(deadline_s, up_Bps, self._own_workers())
        if not found:
            yield ok("members", "no member can be reached for a measurement")
        for number, (peer, measured) in enumerate(found):
            limited, rank = self._limited(measured), ranks.get(peer.hex())
            if isinstance(rank, int):
                self._members[rank] = limited
            others = (self._coordinator, *(other for _, other in found if other is not measured))
            yield _line(f"member {number + 1}", limited, self._effective_limit(limited), others)

    def _own_workers(self) -> set[PeerId]:
        """Return the keys of this machine's workers: the links to them are not network links."""
        folder, own = identity_folder(self._invitation.run, self._invitation.coordinator), set()
        for path in folder.glob("worker-*.key"):
            with suppress(ConfigError):  # a worker whose key cannot be read does not train
                own.add(Identity.read(path).public)
        return own

    def _limited(self, measured: LinkMeasurement) -> LinkMeasurement:
        """Return the measurement, with the upload rate reduced to the user's limit if it is higher."""
        limit, up_Bps = self._upload_limit, measured.up_Bps
        if limit is None or up_Bps is None:
            return measured
        return replace(measured, up_Bps=min(up_Bps, limit.rate_Bps))

    def _effective_limit(self, limited: LinkMeasurement) -> UploadLimit | None:
        """Return the user's limit if it determines the upload rate of a link, otherwise None."""
        limit = self._upload_limit
        return limit if limit is not None and limited.up_Bps == limit.rate_Bps else None

    # -- prediction --------------------------------------------------------------------------------

    def _prediction_finding(self, flops: float | None) -> Iterator[Finding]:
        if not self._status or self._status.get("finished"):
            return
        try:
            run = self._read_run(self._status)
            said = predict_speedup(run, self._members, self._coordinator, flops)
        except ConfigError as error:
            if self._status.get("phase") == "waiting":
                yield ok("prediction", f"no prediction yet: {error.reason}")
            else:
                yield warning(
                    "prediction", f"no prediction: {error.reason}", "try again when the run is training"
                )
            return
        before_per_s = sum(run.shares) / said.step_s
        joined, alone = (format_number(rate) for rate in (before_per_s * (1 + said.gain), before_per_s))
        least, most = ("at least ", "at most ") if said.is_bound else ("", "")
        text = (
            f"with this machine a step would take {least}{format_seconds(said.joined_step_s)} instead of "
            f"{format_seconds(said.step_s)}, and the run would train on {most}{joined} instead of {alone} "
            "samples a second"
        )
        text += f" (assumed: {'; '.join(said.assumptions)})" if said.assumptions else ""
        figures = {
            "step_s": said.step_s,
            "with_s": said.joined_step_s,
            "gain": said.gain,
            "exchange_s": said.exchange_s,
            "compute_s": said.compute_s,
        }
        if said.gain < -NEGLIGIBLE_GAIN:
            if run.global_batch_size is None and said.exchange_s <= said.compute_s:
                fix = (
                    "ask the run's owner to set global_batch_size: this machine would slow the others down, "
                    "but global_batch_size gives slow machines less work"
                )
            else:
                measured = (self._coordinator, *self._members.values())
                limit = self._effective_limit(max(measured, key=lambda link: link.up_Bps or 0.0))
                faster = f"raise the upload limit ({limit.where})" if limit else "use a faster upload"
                fix = f"{faster}, or ask the run's owner for a sparser exchange or larger batches"
                fix += ": the exchange would cost more time than this machine's computation saves"
            yield warning("prediction", text, fix, **figures)
        else:
            yield ok("prediction", text, **figures)


def _line(
    name: str,
    measured: LinkMeasurement,
    limit: UploadLimit | None,
    others: Sequence[LinkMeasurement] = (),
) -> Finding:
    """Return the finding about the link to the coordinator or to a member.

    Args:
        name: the name of the check: "coordinator" or "member 1", "member 2", ...
        limit: the user's upload limit if it determines the upload rate, otherwise None.
        others: the other links of this machine.
    """
    if measured.rtt_s is None and name == "coordinator":
        text = f"not measured, because it answered no ping in time (at most {COORDINATOR_TIMEOUT_S:g} s)"
        return warning(name, text, "close other programs that use the link, or use a faster link; try again")
    if measured.rtt_s is None:
        fix = "nothing to do: members that cannot reach each other use a relay"
        return warning(name, "not measured, because this machine could not connect to it", fix)
    up, down = _rate(measured.up_Bps, measured.is_up_bound), _rate(measured.down_Bps, measured.is_down_bound)
    up += f" (your limit, {limit.where})" if limit is not None else ""
    text = f"round trip {measured.rtt_s * 1e3:.1f} ms, {up} up, {down} down"
    up_Bps, down_Bps = _upload_Bps(measured), _download_Bps(measured)
    figures = {"rtt_s": measured.rtt_s, "up_Bps": up_Bps, "down_Bps": down_Bps}
    if measured.rtt_s > connection_check.SLOW_ROUND_TRIP_S:
        fix = "use a link with less latency, such as a cable, which makes every exchange faster"
        return warning(name, text, fix, **figures)
    if measured.is_silent and not any(_upload_Bps(other) or other.down_Bps for other in others):
        text = f"round trip {measured.rtt_s * 1e3:.1f} ms, but no message of 16 KiB arrived in time"
        finding = failure if name == "coordinator" else warning
        return finding(name, text, f"{MTU_REMEDY}; or the link is slower than 0.1 Mbit/s", **figures)
    if measured.is_up_bound or down_Bps is None:
        ups, downs = map(_upload_Bps, others), map(_download_Bps, others)
        is_up_fast = not measured.is_up_bound or _is_exceeded(measured.up_Bps, ups)
        if is_up_fast and (down_Bps is not None or _is_exceeded(measured.down_Bps, downs)):
            slow = "download" if measured.is_up_bound else "upload"
            text += f": this member's {slow} is slow, and nothing needs to be done on this machine"
            return ok(name, text, **figures)
        fix = "close other programs that use the link, or use a faster link: 256 KiB did not arrive in time"
        return warning(name, text, fix, **figures)
    if up_Bps is None:
        reason = "256 KiB would take too long at the rate of this machine's upload to the coordinator"
        return ok(name, f"{text}: {reason}", **figures)
    if up_Bps < SLOW_UP_Bps:
        fix = "stop other uploads" if limit is None else f"raise the upload limit ({limit.where})"
        fix += "; with links this slow a run needs LocalSteps"
        return warning(name, text, fix, **figures)
    return ok(name, text, **figures)


def _rate(rate_Bps: float | None, is_bound: bool) -> str:
    if rate_Bps is None:
        return "not measured"
    return f"{'less than ' if is_bound else ''}{rate_Bps * 8 / 1e6:,.1f} Mbit/s"


def _upload_Bps(link: LinkMeasurement) -> float | None:
    return None if link.is_up_bound else link.up_Bps


def _download_Bps(link: LinkMeasurement) -> float | None:
    return None if link.is_down_bound else link.down_Bps


def _is_exceeded(bound_Bps: float | None, others_Bps: Iterable[float | None]) -> bool:
    """Return whether another link of this machine is faster, so that this machine is not the cause."""
    return any(rate_Bps > (bound_Bps or 0.0) for rate_Bps in others_Bps if rate_Bps)


def _reachable(probe: DoctorProbe, address: str | None) -> Finding:
    if address:
        return ok("reachable", f"other workers can connect to this machine at {address}", address=address)
    if address is None:
        return warning(
            "reachable",
            "the coordinator did not report whether other workers can connect to this machine",
            "try again",
        )
    text = (
        "other workers cannot connect to this machine; it can still train, by connecting to them or "
        "through a relay"
    )
    fix = (
        "to change this, forward a port to this machine and join with --listen and --advertise, or open its "
        "firewall"
    )
    return warning("reachable", text, fix, listened=probe.address)


def _wall_of(status: Mapping[str, Any]) -> float | None:
    value = status.get("wall_s")
    return float(value) if isinstance(value, int | float) and 0 < value < 1e11 else None


def _plain(value: object) -> str:
    return make_printable(str(value)[:200])
