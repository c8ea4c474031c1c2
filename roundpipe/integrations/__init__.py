"""Other libraries' training loops, driving a rotation.

Each module here is imported by name, and needs the library that it is for.
"""
