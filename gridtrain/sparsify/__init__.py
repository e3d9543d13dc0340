"""Selects the entries to send, keeps the other entries as error feedback, and sums sparse payloads.

gradient --error_feedback--> accumulated vector --selection--> k entries --> payload
                             selection: which entries are sent, by chunks or by device
                             cpu_selection, tensor_selection, cuda_selection with triton_kernels: the same set
payloads of two members --merge--> payload of their sum, and truncated entries for the residual
"""
