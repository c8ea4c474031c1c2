"""Plain data to text and pictures.

    tables            bytes, seconds, rates and shares with units; the one table helper
    memory            what memory is used for, by name: planned, forecast and reported alike
    partition_table   a model's layers and stages
    timeline          what ran when, as data, as a trace and, with `plotting`, as a picture

May use: core.
Start reading: `tables`.
"""
