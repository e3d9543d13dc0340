"""Selects the entries to send, keeps the other entries as error feedback, and sums sparse payloads.

gradient --error_feedback--> accumulated vector --selection--> k entries --> payload
                             cpu_selection, cuda_selection with triton_kernels: the same set of entries
payloads of two members --merge--> payload of their sum, and truncated entries for the residual
"""
