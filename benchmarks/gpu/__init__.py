"""What waits for a GPU, in one command: `make gpu`, or `python -m gpu` in benchmarks/.

__main__   each part in a process of its own, with a time limit; gpu.json after each part
parts      the parts: their functions, the packages that they need, their limits
exact      the tests marked `gpu`; what a GPU and the CPU select and encode, bit for bit
speed      selection beside other ways; copies, memory and the times of a step; overlap with backward
runs       training in many ways, a pipeline, and processes that share the GPU behind slow links
worker     the script of each of these processes
report     gpu.md and gpu.svg
"""
