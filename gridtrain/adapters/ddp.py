"""A gTop-k communication hook for torch's DistributedDataParallel (DDP), without a coordinator.

    state = GTopKState(gridtrain.GTopK(density=0.01, momentum=0.9))
    ddp.register_comm_hook(state, gtopk_hook)

gridtrain selects, encodes and merges the values and updates the residuals; torch.distributed transports the
payloads.  No process can join, and a process that dies ends the job, as always with DDP.

    autograd's thread      bucket 0 --select--> payload    bucket 1 --select--> payload ...
    a background thread                           [ exchange over gloo ]         [ exchange over gloo ]
                                                  --> update of bucket 0         --> update of bucket 1

The residuals of all buckets are committed together, after the exchange of the step's last bucket.

DDP rebuilds its buckets after the first step, in the order in which gradients became ready.  Residuals
therefore belong to parameters: when a parameter moves to another bucket, its residual moves with it.

A gradient that is not finite on one process makes the whole bucket NaN on all processes, so GradScaler
skips the step everywhere; no residual changes in that step.  Residuals hold unscaled gradients, because the
scale changes from step to step; `GTopKState` therefore needs the scaler.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the types themselves.

import atexit
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from gridtrain.adapters.gloo_channel import GlooChannel
from gridtrain.config import GTopK
from gridtrain.core.collectives.collective import CollectiveComplete, SendTo
from gridtrain.core.group.round_flags import is_skipped
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from gridtrain.network.wire.sparse_payload import encoded_bytes
from gridtrain.network.wire.value_encoding import VALUE_KINDS, ValueKind
from gridtrain.runtime.buffers.collective_buffers import ButterflyBuffer
from gridtrain.runtime.buffers.star_buffers import SPARSE_BUFFERS
from gridtrain.sparsify.error_feedback import ErrorFeedback, PreparedState
from gridtrain.sparsify.merge import largest_summable
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters
from gridtrain.training.exchangers import topology_of


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The parameters whose gradients DDP exchanges together, and their residuals in the same order."""

    parameters: tuple[Tensor, ...]
    feedback: ErrorFeedback

    @property
    def sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.parameters]


class GTopKState:
    """The state of the hook.  Create it on every process before the first backward pass.

    Args:
        exchange: the exchange, which must be the same on all processes; its `topology` has the same meaning
            as in a run, except that "auto" stands for "butterfly".
        process_group: the group that was passed to DDP; None means all processes.
        scaler: the GradScaler that scales the loss; None if the loss is not scaled.

    Attributes:
        step: the number of backward passes whose gradients were exchanged; `GTopK.warmup` refers to it.

    Raises:
        ConfigError: the exchange is not a `GTopK`, or the processes were given different exchanges.
    """

    def __init__(
        self,
        exchange: GTopK | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.exchange = GTopK() if exchange is None else exchange
        if not isinstance(self.exchange, GTopK):
            raise ConfigError(
                f"{self.exchange!r} is not supported in DDP", remedy="pass gridtrain.GTopK(...) to GTopKState"
            )
        self.kind: ValueKind = VALUE_KINDS[self.exchange.values]
        self.step = 0
        self._scaler = scaler
        # A separate group: payloads are on the host, and DDP uses its own group at the same time.
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._channel = GlooChannel(group)
        # Not when this state is freed: torch would give the next group the name of the destroyed one.
        atexit.register(self._channel.close)
        self._buckets: dict[tuple[int, ...], _Bucket] = {}
        self._loaded: dict[int, dict[str, Tensor]] = {}  # by id of the parameter, until its bucket is made
        self._exchanged: list[tuple[ErrorFeedback, PreparedState, ButterflyBuffer]] = []
        self._skipped = False
        self._thread = ThreadPoolExecutor(1, "gridtrain-ddp")
        self._stream: torch.cuda.Stream | None = None  # of the thread, on a GPU
        weakref.finalize(self, self._thread.shutdown, wait=False)
        self._check_same_on_all()

    @property
    def world_size(self) -> int:
        return self._channel.world_size

    @property
    def decayed_magnitude(self) -> float:
        """The sum of the magnitudes that `residual_decay` has dropped on this process since the buckets were
        made."""
        return sum(bucket.feedback.decayed_magnitude for bucket in self._buckets.values())

    # -- one bucket ------------------------------------------------------------------------------

    def begin(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start the exchange of a bucket and return the future of its update.

        Entries are selected on the calling thread and stream; a background thread runs the exchange.
        """
        mean_B = bucket.buffer()
        held = self._bucket_for(tuple(bucket.parameters()), mean_B)
        k = self.exchange.k_at(self.step, mean_B.numel())
        limit, weight = largest_summable(self.world_size), 1.0 / self.world_size
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        gradient_B = mean_B.detach().to(torch.float32).contiguous()
        if scale != 1.0:
            gradient_B = gradient_B / scale
        prepared = held.feedback.prepare(gradient_B, k, self.kind, limit, weight=weight)
        on_cuda: list[int | str | torch.device] | None = None
        selected: torch.cuda.Event | None = None
        if mean_B.device.type == "cuda":
            on_cuda, selected = [mean_B.device], torch.cuda.current_stream(mean_B.device).record_event()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=on_cuda)
        place = bucket.index(), bucket.is_last()
        self._thread.submit(self._finish, selected, future, held, prepared, k, mean_B, scale, *place)
        return future

    def _finish(
        self,
        selected: torch.cuda.Event | None,
        future: torch.futures.Future[Tensor],
        held: _Bucket,
        prepared: PreparedState,
        k: int,
        mean_B: Tensor,
        scale: float,
        index: int,
        is_last: bool,
    ) -> None:
        try:
            if index == 0:  # also discards the buckets of a step that failed
                self._exchanged, self._skipped = [], False
            n = mean_B.numel()
            make_buffer = SPARSE_BUFFERS[topology_of(self.exchange)]
            buffer = make_buffer(prepared.payload, n=n, k=k, kind=self.kind, decoded=prepared.decoded)
            skip = self._run(buffer, prepared.skip, encoded_bytes(k, n, self.kind))
            values_K = (torch.from_numpy(buffer.update.values) * scale).to(mean_B.dtype)
            # If half precision overflows, the scaler skips the step on all processes.
            self._skipped |= skip or not bool(torch.isfinite(values_K).all())
            self._exchanged.append((held.feedback, prepared, buffer))
            with self._own_stream(selected, mean_B.device):
                update_B = _dense(buffer.update.indices, values_K, mean_B, skip)
                if is_last:
                    self._commit()
                future.set_result(update_B)
        except BaseException as error:  # DDP waits for the future and raises its exception
            future.set_exception(error)  # type: ignore[arg-type]

    def _own_stream(
        self, selected: torch.cuda.Event | None, device: torch.device
    ) -> AbstractContextManager[object]:
        """Return a context in which a GPU runs this thread's operations after the event `selected`, on the
        thread's own stream; without an event (on a CPU), the context does nothing.

        On the stream of the backward pass, each copy to the device would wait for the operations already
        queued there.
        """
        if selected is None:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(selected)
        return torch.cuda.stream(self._stream)

    def _run(self, buffer: ButterflyBuffer, skip: bool, most_bytes: int) -> bool:
        """Run the collective; return whether any process skips the step."""
        channel = self._channel
        core = buffer.make_collective(channel.rank, channel.world_size, skip)
        effects = core.start()
        received = Counter[int]()
        while True:
            for effect in effects:
                match effect:
                    case SendTo(to_rank, place, flag):
                        head = (place.phase, place.hop, place.segment, place.slice, flag)
                        channel.send(to_rank, head, buffer.payload(place))
                    case CollectiveComplete(flags):
                        channel.wait_sent()
                        return is_skipped(flags)
                    case _:
                        buffer.apply(effect)
            # Take one message from each rank before a second, which may depend on all first messages.
            from_rank = min(sorted(core.waiting_for()), key=received.__getitem__)
            received[from_rank] += 1
            head_H, payload = channel.receive(from_rank, most_bytes)
            effects = core.handle(from_rank, _place(head_H), int(head_H[4]), payload)

    def _commit(self) -> None:
        """Commit all buckets of a step or none, because GradScaler skips the whole step if one bucket is
        NaN."""
        exchanged, self._exchanged = self._exchanged, []
        if not self._skipped:
            for feedback, prepared, buffer in exchanged:
                feedback.commit(prepared, buffer.truncated)
        self.step += 1

    # -- residuals ---------------------------------------------------------------------------------

    def _bucket_for(self, parameters: tuple[Tensor, ...], mean_B: Tensor) -> _Bucket:
        key = tuple(id(parameter) for parameter in parameters)
        if key in self._buckets:
            return self._buckets[key]
        if sum(parameter.numel() for parameter in parameters) != mean_B.numel():
            raise LocalProtocolError(
                f"a bucket has {mean_B.numel()} elements, but its parameters have "
                f"{sum(parameter.numel() for parameter in parameters)}"
            )
        moved = [self._take_residual(parameter) for parameter in parameters]
        options = self.exchange.momentum, self.exchange.chunk, self.exchange.residual_decay
        fresh = _Bucket(parameters, ErrorFeedback(mean_B.numel(), mean_B.device, *options))
        fresh.feedback.load({name: torch.cat([each[name] for each in moved]) for name in moved[0]})
        self._buckets[key] = fresh
        return fresh

    def _take_residual(self, parameter: Tensor) -> dict[str, Tensor]:
        """Remove and return a parameter's residual as a flat vector.  Its old bucket is deleted; the
        residuals of the bucket's other parameters are moved to `_loaded`."""
        self._dissolve(parameter)
        names = ("residual", "u") if self.exchange.momentum else ("residual",)
        nothing = {name: torch.zeros(parameter.numel(), dtype=torch.float32, device="cpu") for name in names}
        return self._loaded.pop(id(parameter), nothing)

    def _dissolve(self, parameter: Tensor) -> None:
        for key, held in list(self._buckets.items()):
            if id(parameter) in key:
                self._loaded |= _residuals_by_parameter(held)
                del self._buckets[key]

    def _by_id(self) -> dict[int, dict[str, Tensor]]:
        found = dict(self._loaded)
        for held in self._buckets.values():
            found |= _residuals_by_parameter(held)
        return found

    def residual_of(self, parameter: Tensor) -> Tensor:
        """Return a copy of a parameter's residual, or zeros if it has none, as a flat float32 tensor on the
        host."""
        found = self._by_id().get(id(parameter))
        if found is None:
            return torch.zeros(parameter.numel(), dtype=torch.float32, device="cpu")
        return found["residual"].clone()

    def state_dict(self, model: nn.Module) -> dict[str, dict[str, Tensor]]:
        """Return this process's residuals by parameter name.  Each process must save and load its own
        state."""
        found = self._by_id()
        return {name: found[id(p)] for name, p in canonical_parameters(model) if id(p) in found}

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the result of `state_dict`, between two steps.  Raises `ConfigError` if it is not the state of
        this model and exchange."""
        parameters = dict(canonical_parameters(model))
        names = {"residual", "u"} if self.exchange.momentum else {"residual"}
        for name, kept in state.items():
            sizes = {part.numel() for part in kept.values()}
            if name not in parameters or set(kept) != names or sizes != {parameters[name].numel()}:
                raise ConfigError(
                    f"the residual of {name!r} ({', '.join(kept)}) does not match any parameter of the model",
                    remedy="load a state that was saved with this model and this exchange",
                )
        for parameter in parameters.values():
            self._dissolve(parameter)
        self._loaded = {
            id(parameters[name]): {part: kept[part].cpu().clone() for part in kept}
            for name, kept in state.items()
        }

    def _check_same_on_all(self) -> None:
        mine = blake2b(self.exchange.describe().encode(), digest_size=8).digest()
        number = torch.frombuffer(bytearray(mine), dtype=torch.int64)
        numbers = [torch.empty_like(number) for _ in range(self.world_size)]
        dist.all_gather(numbers, number, group=self._channel.group)
        unlike = [rank for rank, other in enumerate(numbers) if not torch.equal(other, number)]
        if unlike:
            raise ConfigError(
                f"this process uses the exchange {self.exchange.describe()}; "
                f"ranks {unlike} use a different exchange",
                remedy="pass the same exchange to GTopKState on all processes",
            )


def gtopk_hook(state: GTopKState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange one bucket.  Register this hook with `ddp.register_comm_hook(GTopKState(...), gtopk_hook)`.

    The mean gradient of each bucket is replaced by the group's update: about the k largest elements of the
    sum of (residual + gradient / P) over all P processes (after arXiv 1901.04359), where k follows from the
    density.  The update is bit-identical on all processes.  The remaining elements stay in the residuals.
    """
    return state.begin(bucket)


def _residuals_by_parameter(held: _Bucket) -> dict[int, dict[str, Tensor]]:
    parts = {name: torch.split(flat, held.sizes) for name, flat in held.feedback.state().items()}
    return {
        id(parameter): {name: pieces[index].clone() for name, pieces in parts.items()}
        for index, parameter in enumerate(held.parameters)
    }


def _dense(indices_K: npt.NDArray[np.int64], values_K: Tensor, like_B: Tensor, skip: bool) -> Tensor:
    if skip:
        return torch.full_like(like_B, torch.nan)
    update_B = torch.zeros_like(like_B)
    update_B[torch.from_numpy(indices_K).to(like_B.device)] = values_K.to(like_B.device)
    return update_B


def _place(head: Sequence[int]) -> PayloadSlot:
    phase, hop, segment, slice_ = head[:4]
    if phase not in set(CollectivePhase):
        raise RemoteProtocolError(
            f"a message has an unknown phase, {phase}", remedy="run the same version on all processes"
        )
    return PayloadSlot(CollectivePhase(phase), hop, segment, slice_)
