"""Plain data to text and pictures: tables, timelines.

May use: core.
Start reading: `tables`.
"""
