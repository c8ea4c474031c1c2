"""Ranks: processes that train one model together, each on its own part of every batch.

May use: weights, device, threads.
Start reading: `turns`, then `exchange`; `group` is the connection.
"""
