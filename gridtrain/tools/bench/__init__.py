"""How fast this machine, and a group of processes on it, can do what a step consists of.

Decides how a figure is taken: from which moment to which, and what is kept out of it.  Never decides whether
a figure is good; nothing of the training depends on this package.

    named.py      "gtopk:values=fp16" -> GTopK(values="fp16")
    referee.py    a barrier for processes in any namespace of one machine, and their reports
    member.py     one worker of a real run, that exchanges synthetic gradients when the referee says so
    group.py      coordinator and members as processes; one repeat after the other
    local.py      copy, selection, codec and merge in this process

`gridtrain bench` shows these for one machine; benchmarks/bench measures them over shaped links, beside
others.
"""
