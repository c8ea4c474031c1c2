"""What the runtime measures of itself: seconds of layers, idle times by cause, spans of a timeline.

May use: core, reports (`timeline`), device.
Start reading: `meter`.
"""
