"""All tests and measurements that need a GPU: `make gpu`, or `python -m gpu` in benchmarks/.

__main__   runs each part in its own process, with a time limit; writes gpu.json after each part
parts      the parts: their functions, the packages that they need, their limits
exact      the tests marked `gpu`; selection and encoding on a GPU and the CPU, bit for bit
speed      selection beside other methods; copies, memory and times of a step
runs       training in many ways, a pipeline, and processes that share the GPU behind slow links
report     gpu.md
"""
