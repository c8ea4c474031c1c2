"""Ranks: processes that train one model together, each on its own part of every batch.

May use: weights, profiling, device, threads.
Start reading: `turns`, then `exchange`; `group` is the connection, `shared_memory` that of ranks on one host.
"""
