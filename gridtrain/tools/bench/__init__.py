"""Measures the parts of a training step on this machine, and times exchanges in a group of processes.

    exchange_names     the name "gtopk:values=fp16" -> GTopK(values="fp16")
    process_barrier    a barrier for processes on one machine, which also collects their reports
    bench_member       one worker of a real run that exchanges synthetic gradients on command
    bench_group        coordinator and members as processes, for all repeats
    processor_bench    times copy, selection, codec and merge in this process
    main               `gridtrain bench`: all measurements in order, and the report

`gridtrain bench` prints the results for one machine; benchmarks/bench also measures over shaped links, and
compares gridtrain with other systems.
"""
