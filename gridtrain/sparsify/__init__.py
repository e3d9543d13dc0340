"""Selects the entries to send, keeps the others in the residual (error feedback), and sums sparse payloads.

    gradient --error_feedback--> residual + contribution --selection--> k entries --> payload
    payloads of two members --merge--> payload of their sum, and truncated entries for the residual

`selection` chooses how entries are selected: from each chunk, or from the whole vector with `cpu_selection`,
`cuda_selection` (kernels in `triton_kernels`) or, on other devices, `tensor_selection`.  From the same
vector, these three select the same entries; each starts with a threshold from `threshold_hint`.
"""
