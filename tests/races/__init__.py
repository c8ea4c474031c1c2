"""Random timing at every hand-off between threads and streams: results stay the same to the bit."""
