"""Everything of gridtrain that the tests of this folder use, under the names that they use.

When a module, a class or a function is renamed, this file is adapted; recorded data never are.  Only its own
tests import the dashboard, whose packages are optional.
"""

# ruff: noqa: F401

from __future__ import annotations

from gridtrain.cli.layers_file import read_layers
from gridtrain.cli.main import cli as command_line
from gridtrain.cli.network_file import read_network
from gridtrain.cli.worker_commands import worker_commands
from gridtrain.config import Auto, Deadlines, JoinConfig
from gridtrain.core.collectives.collective import Provenance, StoreSlice
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY, extend_history
from gridtrain.core.group.invitation import Invitation, invitation_digest
from gridtrain.core.group.invitation import parse as parse_invitation
from gridtrain.core.group.round_flags import SKIP, is_skipped
from gridtrain.core.messages import (
    CheckpointInfo,
    CollectivePhase,
    Join,
    LedgerSpec,
    PayloadSlot,
    Setup,
    Span,
)
from gridtrain.core.planning.exchange_facts import workload_of
from gridtrain.errors import ConfigError, JournalError, NotAccepted, RemoteProtocolError
from gridtrain.network.transport.access_control import pending_member_name
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.secure_channel import SecureChannel
from gridtrain.network.wire.sparse_payload import decode as decode_sparse
from gridtrain.network.wire.sparse_payload import encode_with_decoded as encode_sparse
from gridtrain.network.wire.value_encoding import ValueKind
from gridtrain.pipeline.blueprint import Blueprint
from gridtrain.pipeline.random_seeds import derive_layer_seed, derive_step_seed
from gridtrain.pipeline.tensor_tree import TensorTreeSpec
from gridtrain.pipeline.wire_precision import WirePrecision
from gridtrain.runtime.activation_buffers import ActivationReceiveBuffer as IncomingActivations
from gridtrain.runtime.activation_buffers import ActivationSendBuffer as OutgoingActivations
from gridtrain.runtime.buffers.collective_buffers import sparse_digest
from gridtrain.runtime.client.agent_link import AgentLink
from gridtrain.runtime.client.endpoint_file import EndpointFile
from gridtrain.runtime.client.enrollment import Enrollment
from gridtrain.runtime.client.invitation_store import InvitationStore as RememberedInvitations
from gridtrain.runtime.client.worker_defaults import run_folder_name
from gridtrain.runtime.client.worker_defaults import state_directory as folder_of_run
from gridtrain.runtime.contribution import Contribution
from gridtrain.runtime.state_transfer.blobs import split_blocks as split_state
from gridtrain.runtime.state_transfer.blobs import state_digest
from gridtrain.runtime.state_transfer.residual_pieces import select_entries as choose_residual
from gridtrain.runtime.state_transfer.state_snapshot import StateSnapshot
from gridtrain.runtime.state_transfer.update_log import StepUpdate
from gridtrain.runtime.state_transfer.update_log import decode_update as read_update
from gridtrain.runtime.state_transfer.update_log import encode_update as write_update
from gridtrain.sdk.local_group import LocalGroup
from gridtrain.sdk.run_facts import describe_optimizer
from gridtrain.testing import FakeSensors, Faults, FileSensors
from gridtrain.tools.bundle import Bundle
from gridtrain.tools.options import PROGRAMS, RunFile, resolve
from gridtrain.tools.options.option_table import OTHER_VARIABLES, known_variables
from gridtrain.training.buffer_averaging import BufferAveraging
from gridtrain.training.checkpoint.checkpoint_store import read as read_checkpoint
from gridtrain.training.checkpoint.checkpoint_store import read_header as read_checkpoint_head
from gridtrain.training.checkpoint.flat_gradient import canonical_parameters, describe_parameters
from gridtrain.training.checkpoint.hyperparameters import (
    hyperparameter_digest,
    hyperparameter_lines,
)
from gridtrain.training.checkpoint.hyperparameters import hyperparameters_json as optimizer_settings
from gridtrain.training.checkpoint.model_export import export_model
from gridtrain.training.checkpoint.serialization import (
    capture_state,
    content_digest,
    frame_state,
    initial_digest,
    model_tensors,
    pack_state,
    replica_digest,
    restore_state,
)
from gridtrain.training.checkpoint.stage_checkpoint_store import StageCheckpointStore
from gridtrain.training.data.sampler import describe_dataset, permutation, value_digest
from gridtrain.training.residual_departure import load_left_residual as pick_up_residual
from gridtrain_coordinator.dashboard.listen_address import load_token as dashboard_token
from gridtrain_coordinator.journal.backups import restore as restore_backup
from gridtrain_coordinator.journal.keys import operator_identity
from gridtrain_coordinator.journal.store import JournalStore
from gridtrain_coordinator.membership.membership import Membership
from gridtrain_coordinator.run.events import JournalEntry, MessageReceived
from gridtrain_coordinator.run.journal_recovery import (
    SupersededEntries,
    compacted_entry,
    is_same_run,
    recover_run,
)
from gridtrain_coordinator.serving import load_authorization as access_of_journal
from gridtrain_worker.budget import Budget as DayBudget
from gridtrain_worker.bundle_consent import ACCEPTED, ARCHIVE, BundleOffer, require_consent
from gridtrain_worker.control_socket import ask_agent
from gridtrain_worker.policy_enforcer import PolicyEnforcer
from gridtrain_worker.saved_settings import SavedSettings
