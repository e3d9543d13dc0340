"""The coordinator daemon: admits workers, makes generations and keeps the journal.  Does not use torch.

serving      the process: folder, keys, port, dashboard
daemon       the loop: transport --> membership, access --> effects, in order
run/ stages/ membership/    pure: the record of the run, stages of a pipeline, the state machine
access/      pure: which keys may connect, violations, bans; access_handler connects it to the loop
journal/     SQLite store, keys, backups, disk-full mode
dashboard/   the web page that shows the run
status_report, log, message_batch, doctor_checks (for `gridtrain doctor`), bundle_server
"""
