"""The coordinator daemon: membership, generations, journal.  Never imports torch.

daemon.py runs the core over a transport, serving.py the process around it, store.py is the journal, views.py
what `gridtrain status` is told, log.py one line for each event.
"""
