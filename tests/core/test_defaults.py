"""What a caller gets that does not say: nothing, no, or what is listed here."""

from __future__ import annotations

import math
from pathlib import Path

from declared_defaults import constants, unusual_defaults
from recorded_results import compare

UNUSUAL = {
    "group.invitation.Invitation.encrypted": True,
    "group.member_events.SubmitRound.is_complete": True,
    "group.member_events.AddCollectives.has_more": True,
    "group.member_events.SendState.is_whole": True,
    "group.rank_layout.RankAssignment.stages": 1,
    "member.residual_transfer.residual_recipients(stages)": 1,
    "messages.coordination.Join.can_relay": True,
    "messages.coordination.Setup.stages": 1,
    "messages.transfer.StateRequest.is_whole": True,
    "messages.types.Member.donor": -1,
    "messages.types.Member.entries_share": 256,
    "messages.types.StagedModel.samples": 1,
    "messages.types.StagedModel.micro_batches": 1,
    "messages.types.StagedModel.copies": 3.0,
    "messages.types.StagedModel.rematerialise": True,
    "planning.cost_model.exchange_cost(vote)": True,
    "planning.cost_model.exchange_cost(max_messages)": 30000,
    "planning.exchange_choice.ExchangeChoice.rate_timeout_s": 2.0,
    "planning.exchange_choice.ExchangeChoice.report_timeout_s": 300.0,
    "planning.exchange_choice.ExchangeChoice._adopt(measured)": True,
    "planning.exchange_comparison.ExchangeEstimate.local_steps": 1,
    "planning.exchange_comparison.estimate_exchange(local_steps)": 1,
    "planning.exchange_comparison.estimate_exchange(max_messages)": 20000,
    "planning.exchange_comparison.estimate_best_order(local_steps)": 1,
    "planning.exchange_comparison.estimate_best_order(max_messages)": 20000,
    "planning.exchange_comparison.DenseTopology.ring_speedup": 1.0,
    "planning.exchange_facts.parse_workload(encrypted)": True,
    "planning.local_steps_proposal.propose_local_steps(target_share)": 0.1,
    "planning.local_steps_proposal.propose_local_steps(most)": 512,
    "planning.message_schedule.PlannedMessage.count": 1,
    "planning.network_model.LinkModel.bandwidth_Bps": math.inf,
    "planning.rank_order.LinkMeasurements.build_network(bounded)": True,
    "planning.workload.CpuCosts.message_s": 0.00025,
    "planning.workload.CpuCosts.wake_s": 0.0002,
    "planning.workload.CpuCosts.begin_s": 0.002,
    "planning.workload.CpuCosts.packet_s": 1.2e-05,
    "planning.workload.CpuCosts.byte_s": 1.5e-10,
    "planning.workload.CpuCosts.crypt_byte_s": 7e-10,
    "planning.workload.CpuCosts.add_byte_s": 1e-10,
    "planning.workload.CpuCosts.store_byte_s": 1.2e-10,
    "planning.workload.CpuCosts.hash_byte_s": 7e-10,
    "planning.workload.CpuCosts.encode_entry_s": 1.2e-08,
    "planning.workload.CpuCosts.decode_entry_s": 1e-08,
    "planning.workload.CpuCosts.merge_entry_s": 5.5e-08,
    "planning.workload.CpuCosts.sum_entry_s": 7e-08,
    "planning.workload.CpuCosts.select_parameter_s": 1.8e-09,
    "planning.workload.CpuCosts.round_element_s": 4e-09,
    "planning.workload.CpuCosts.widen_element_s": 1.2e-09,
    "planning.workload.Workload.density": 0.001,
    "planning.workload.Workload.encrypted": True,
    "planning.workload.Workload.of(encrypted)": True,
    "planning.workload.messages_of(max_messages)": 30000,
    "planning.workload.count_messages(max_messages)": 30000,
    "stages.bottleneck_partition.bottleneck_cuts(within)": math.inf,
    "stages.micro_batch_tuning.StepTimings.max_micro_batch_samples": math.inf,
    "stages.partition_chart._text(size)": 13,
    "stages.stage_cost.Card.speed": 1.0,
    "stages.stage_cost.Card.memory_bytes": math.inf,
    "stages.stage_cost.ExecutionSettings.samples": 1,
    "stages.stage_cost.ExecutionSettings.micro_batches": 8,
    "stages.stage_cost.ExecutionSettings.rematerialise": True,
    "stages.stage_cost.ExecutionSettings.copies": 3.0,
    "stages.stage_cost.ExecutionSettings.overlap": True,
    "stages.stage_cost.ExecutionSettings.message_s": 9e-05,
    "stages.step_time.propose_micro_batches(near)": 0.02,
}


def test_defaults_are_zero_or_no_besides_these() -> None:
    assert unusual_defaults("gridtrain.core") == UNUSUAL


def test_bounds_and_other_constants_are_those_that_were_recorded() -> None:
    compare(Path(__file__).with_name("recorded_constants.json"), "core", constants("gridtrain.core"))
